"""A made-up study with the shape of a real one: domains are learned in turn, decay, and are kept better by replay."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rllib_srl.studies.records import Evaluation, TrialWriter, write_study
from rllib_srl.studies.study import Arm, Domain, Primary, Study

DOMAINS = ("chain_sum", "compare", "products", "lookup", "word_problem_tool")
PER_STAGE = 4  # evaluations
TOKENS = 12_000  # generated in a stage
KEEPING = {"srl": 0.85, "uniform": 0.55, "no_replay": 0.0, "fifo": 0.4, "extra_epochs": 0.0}  # share of decay avoided
TRAINED = {"srl": 1.3, "uniform": 1.3, "no_replay": 1.0, "fifo": 1.3, "extra_epochs": 1.3}  # tokens, of generated
ARMS = {
    "srl": ("SRL + diversity", "Old prompts come back when they are about to be forgotten, unlike ones first."),
    "uniform": ("uniform replay", "Old prompts come back at random."),
    "no_replay": ("no replay", "Old prompts never come back: plain GRPO."),
    "fifo": ("oldest first", "Old prompts come back in the order in which they were stored."),
    "extra_epochs": ("extra epochs", "No replay, but trained as many tokens as SRL, by more passes over each batch."),
}


def small_study(seeds: Sequence[int] = range(1, 11), arms: Sequence[str] = tuple(ARMS), **changes: object) -> Study:
    """Return a study of `arms`, with srl the treatment and all others but fifo the controls."""
    fields = {
        "name": "replay",
        "question": "Does replay by spaced repetition and diversity remember more than no replay, at an equal budget?",
        "answered_by": "Final accuracy and retention are higher than without replay and than with uniform replay.",
        "arms": tuple(Arm(name, *ARMS[name]) for name in arms),
        "domains": tuple(Domain(name, stage) for stage, name in enumerate(DOMAINS)),
        "num_stages": len(DOMAINS),
        "seeds": tuple(seeds),
        "budget": TOKENS * len(DOMAINS),
        "primary": Primary("srl", tuple(arm for arm in arms if arm not in ("srl", "fifo"))),
        "settings": {"model": "tiny", "group_size": 8},
    }
    return Study(**{**fields, **changes}).checked()  # type: ignore[arg-type]


def evaluations_of(study: Study, arm: str, seed: int) -> Iterator[Evaluation]:
    """Yield the evaluations of a trial: domains rise in their own stage and decay after it."""
    rng = np.random.default_rng([seed, 7])
    start_C = rng.uniform(0.05, 0.2, len(study.domains))
    noise = np.random.default_rng([seed, sorted(ARMS).index(arm)])
    for stage in range(-1, study.num_stages):
        for part in range(PER_STAGE) if 0 <= stage < study.num_stages - 1 else (PER_STAGE - 1,):
            done = stage * PER_STAGE + part + 1 if stage >= 0 else 0
            accuracy = {}
            for j, domain in enumerate(study.domains):
                since = done - PER_STAGE * (j + 1)
                rise = 1 - np.exp(-0.9 * np.clip(done - PER_STAGE * j, 0, PER_STAGE))
                lost = (1 - KEEPING[arm]) * (1 - np.exp(-0.25 * max(0, since))) * 0.65
                level = start_C[j] + (0.9 - start_C[j]) * rise * (1 - lost)
                accuracy[domain.name] = round(float(np.clip(level + noise.normal(0, 0.03), 0, 1)), 4)
            tokens = done * TOKENS // PER_STAGE
            yield Evaluation(
                study.fingerprint, stage, 3 * done, accuracy, tokens, int(tokens * TRAINED[arm]),
                done * 9.0 * TRAINED[arm], (done + 1) * 3_000, done * 2.0, 2_100_000_000 + seed,
                {name: {"answer_diversity": 0.4} for name in accuracy},
            )  # fmt: skip


def write_synthetic(directory: Path, study: Study, skip: Sequence[tuple[str, int]] = ()) -> Path:
    """Write a whole results directory; the trials in `skip` are cut off after their first stage."""
    write_study(directory, study)
    for arm in study.arms:
        for seed in study.seeds:
            trial = TrialWriter(directory, study, arm.name, seed)
            for evaluation in evaluations_of(study, arm.name, seed):
                if (arm.name, seed) in skip and evaluation.stage > 0:
                    break
                trial.add(evaluation)
            trial.close()
    return directory
