"""The trainer: train one version, play held-out prompts, apply the gates, write the files.

It runs in its own process (`trainer_process.py`) at the lowest priority and waits while the server answers. Killed, it
continues with the newest checkpoint when it is started again.

The gates compare a candidate with version 0, the model that was given, and not with its parent: small losses, each
within the margin, would otherwise add up over many versions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import numpy as np

from rllib_srl.algorithm.evaluation import GREEDY, Play
from rllib_srl.cli.serving.job import Job, JsonFile, Progress, Result
from rllib_srl.cli.serving.rated_run import NUM_BAD, RatedRun, rated_config
from rllib_srl.cli.serving.trainer_process import UP, take_turns
from rllib_srl.cli.serving.version_files import NUM_TOKENS, PROMPT_TOKENS, Canary, Continuation
from rllib_srl.cli.shared.cluster import start_ray
from rllib_srl.common.environments import environment_id, grading_digest
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.engine.canary import canary_sequences
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model
from rllib_srl.engine.protocol import Sampling
from rllib_srl.people import gates
from rllib_srl.people.gates import Change, Verdict
from rllib_srl.types import Prompt

MAX_LOST = 0.1  # largest share of held-out episodes of a domain that infrastructure may end
Answers = dict[str, bool]  # key of a prompt -> whether its greedy answer was right


class Before(JsonFile):
    """Answers of version 0, beside the versions: of one start of the server, while they are graded the same."""

    name: ClassVar[str] = "before.json"

    grading: dict[str, str]  # domain -> digest of what grades its answers
    answers: dict[str, Answers]


class Examiner:
    """Plays held-out prompts of the domains to keep, greedily, the same ones at each call."""

    def __init__(self, job: Job) -> None:
        """Construct the environments and draw their held-out prompts; ValueError: one has too few."""
        self.prompts: dict[str, list[Prompt]] = {kept.domain: [] for kept in job.keep}
        self.grading: dict[str, str] = {}  # domain -> digest of what grades its answers
        if not job.keep:
            return
        config, settings = rated_config(job, Path()), job.settings
        config.validate()
        envs = (config.env_creators(), config.env_configs(), config.mixture_weights())
        source = PromptSource(*envs, job.seed, config.task_stream())
        for prompt in source.heldout(settings.gate_prompts * len(job.keep)):
            self.prompts[prompt.domain].append(prompt)
        least = gates.least_prompts(settings.max_drop, settings.confidence)
        for kept in job.keep:
            environment = source.environments[environment_id(kept.env, kept.domain)]
            self.grading[kept.domain] = grading_digest(environment, kept.env_config)
            if (num := len(self.prompts[kept.domain])) < least:
                why = f"since fewer cannot exclude a drop of max_drop = {settings.max_drop:g}"
                too_few = f"--keep {kept.env} has {num} held-out prompts"
                raise ValueError(f"{too_few}; expected at least {least}, {why} (--gate-prompts, --max-drop)")

    def answers(self, play: Play) -> dict[str, Answers]:
        """Return for each domain which prompts are answered right; those lost to infrastructure must be few."""
        batches = list(play([prompt for prompts in self.prompts.values() for prompt in prompts], "gates", **GREEDY))
        answers: dict[str, Answers] = {domain: {} for domain in self.prompts}
        for group in [group for batch in batches for group in batch.groups]:
            answers[group.prompt.domain][group.prompt.key] = bool(group.is_right_G()[0])
        errors = [error for batch in batches for error in batch.errors]
        for domain, prompts in self.prompts.items():
            if (lost := len(prompts) - len(answers[domain])) > MAX_LOST * len(prompts):
                why = f"{lost} of {len(prompts)} held-out episodes of {domain} were lost"
                by = errors[-1] if errors else "a failure"
                raise RuntimeError(f"{why}, the last one by: {by}; expected at most {MAX_LOST:.0%}")
        return answers


def train(directory: Path) -> None:
    job = Job.read(directory)
    examiner = Examiner(job)
    if job.served.is_on_card:
        take_turns(directory)
    start_ray(verbose=False)
    (directory / UP).touch()
    with closing(RatedRun(job, directory)) as run:
        before = answers_before(examiner, run.algo.play, directory.parent)
        run.start()
        while run.num_done < run.num_slices:
            run.step()
            Progress(done=run.num_done, of=run.num_slices).write(directory)
        last = {**run.noted.metrics, "kl": run.kl()}
        last[NUM_BAD] += not np.isfinite(last["kl"])
        after = examiner.answers(run.algo.play)
        verdicts, changes = judged(job, before, after, last)
        run.write(directory)
        Canary(continuations=canary_of(run, job)).write(directory)
        counts = {"num_slices": run.num_slices, "num_answers": len(job.answers), "num_trained": len(run.noted.trained)}
    Result(
        verdicts=verdicts,
        changes=changes,
        metrics={name: value for name, value in (last | counts).items() if np.isfinite(value)},  # of no update: NaN
    ).write(directory)


def answers_before(examiner: Examiner, play: Play, directory: Path) -> dict[str, Answers]:
    """Return the answers of version 0, played once and then read from the directory while their grading is the same.

    The server removes them when it starts, since data that environments read from files may have changed.
    """
    if (directory / Before.name).exists() and (kept := Before.read(directory)).grading == examiner.grading:
        return kept.answers
    answers = examiner.answers(play)
    Before(grading=examiner.grading, answers=answers).write(directory)
    return answers


def judged(
    job: Job, before: Mapping[str, Answers], after: Mapping[str, Answers], last: Mapping[str, float]
) -> tuple[list[Verdict], dict[str, Change]]:
    settings = job.settings
    verdicts = [gates.sanity(int(last[NUM_BAD])), gates.drift(last["kl"], settings.max_kl)]
    changes = {name: gates.paired_change(before[name], after[name], settings.confidence) for name in after}
    verdicts += [gates.kept(name, change, settings.max_drop) for name, change in changes.items()]
    return verdicts, changes


def canary_of(run: RatedRun, job: Job) -> list[Continuation]:
    """Return the candidate's own continuations of the fixed prompts: tokens of its engine, log-probs of the learner."""
    tokenizer = load_tokenizer(local_model(job.served.model))
    prompts = [ids[:PROMPT_TOKENS] for ids in canary_sequences(tokenizer, job.served.context - NUM_TOKENS)]
    turns = run.engine.generate(prompts, Sampling(max_tokens=NUM_TOKENS, temperature=0.0, runs_to_limit=True))
    sequences = [[*prompt, *turn.token_ids.tolist()] for prompt, turn in zip(prompts, turns, strict=True)]
    logps = run.learner.scorer.score(sequences)
    return [
        Continuation(prompt, turn.token_ids.tolist(), logp[len(prompt) - 1 :].tolist())
        for prompt, turn, logp in zip(prompts, turns, logps, strict=True)
    ]


def run(directory: Path) -> int:
    """Run the trainer of a version; return the exit status. The last line of standard error says why it failed."""
    try:
        train(directory)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0
