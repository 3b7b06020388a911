"""The trainer: train one version, play held-out prompts, apply the gates, write the files.

It runs in its own process (`process.py`) at the lowest priority and waits while the server answers. Killed, it
continues with the newest checkpoint when it is started again.

The gates compare a candidate with version 0, the model that was given, and not with its parent: small losses, each
within the margin, would otherwise add up over many versions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rllib_srl.cli.serving.canary import NUM_TOKENS, PROMPT_TOKENS, Canary, Continuation
from rllib_srl.cli.serving.job import Job, JsonFile, KeptDomain, Progress, Result
from rllib_srl.cli.serving.trainer.process import UP, take_turns
from rllib_srl.cli.serving.trainer.rated_run import NUM_BAD, WAIT_S, RatedRun, shared_settings
from rllib_srl.cli.shared.cluster import start_ray
from rllib_srl.cli.shared.settings import build_config
from rllib_srl.common.environments import environment_id, grading_digest
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.engine import Engine, Sampling, canary_sequences
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model
from rllib_srl.people import gates
from rllib_srl.people.gates import Change, Health, Verdict, changes_of, lines_of, most_lost, verdicts_of
from rllib_srl.rollout.env_calls import EnvCalls
from rllib_srl.rollout.episodes import LiveEpisode
from rllib_srl.rollout.player import Limits, play
from rllib_srl.rollout.transcript import make_transcript
from rllib_srl.types import RIGHT, Prompt, passed

GATE_DEADLINE_S = WAIT_S  # for a domain
MAX_LOST = 0.1  # largest share of held-out episodes of a domain that infrastructure may end
Answers = dict[str, bool]  # key of a prompt -> whether its greedy answer was right


class Before(JsonFile):
    """Answers of version 0, beside the versions: of one start of the server, while they are graded the same."""

    name: ClassVar[str] = "before.json"

    grading: dict[str, str]  # domain -> digest of what grades its answers
    answers: dict[str, Answers]


class Examiner:
    """Plays held-out prompts of the domains to keep, greedily, with weights of the learner."""

    def __init__(self, job: Job) -> None:
        """Construct the environments and draw their held-out prompts, the same ones at each call.

        Raises:
            ValueError: an environment has too few.
        """
        self._job, self._configs, self.prompts = job, {}, dict[str, list[Prompt]]()
        self.grading = dict[str, str]()  # domain -> digest of what grades its answers
        least = gates.least_prompts(job.settings.max_drop, job.settings.confidence)
        for domain in job.keep:
            config = self._configs[domain.domain] = kept_config(job, domain)
            env_id = environment_id(domain.world, domain.domain)
            (creator,) = config.world_creators().values()
            (given,) = config.world_configs().values()
            source = PromptSource({env_id: creator}, {env_id: given}, {env_id: 1.0}, job.seed)
            prompts = self.prompts[domain.domain] = source.heldout(job.settings.gate_prompts)
            self.grading[domain.domain] = grading_digest(source.environments[env_id], domain.env_config)
            if len(prompts) < least:
                why = f"since fewer cannot exclude a drop of max_drop = {job.settings.max_drop:g}"
                found = f"--keep {domain.world} has {len(prompts)} held-out prompts"
                raise ValueError(f"{found}; expected at least {least}, {why} (--gate-prompts, --max-drop)")
            self._configs[domain.domain] = (config, {env_id: partial(creator, given)})

    def answers(self, engine: Engine) -> dict[str, Answers]:
        """Return for each domain which prompts are answered right; episodes lost to infrastructure are left out.

        Raises:
            RuntimeError: so many are lost that nothing can be said about the policy.
        """
        tokenizer = load_tokenizer(local_model(self._job.served.model))
        found: dict[str, Answers] = {}
        for name, prompts in self.prompts.items():
            config, worlds = self._configs[name]
            episodes = [LiveEpisode(prompt, f"{name}/{number}", 0) for number, prompt in enumerate(prompts)]
            calls = EnvCalls(num_workers=1, timeout_s=config.env_timeout_s)
            found[name], error = {}, ""
            try:
                for episode in play(
                    episodes,
                    engine=engine,
                    worlds=worlds,
                    transcript=make_transcript(config.prompt_format, tokenizer, config.max_turns),
                    sampling=Sampling(max_tokens=config.max_turn_tokens, temperature=0.0),
                    limits=Limits(config.max_turns, config.max_turn_tokens, config.max_episode_tokens),
                    calls=calls,
                    deadline_s=GATE_DEADLINE_S,
                ):
                    about = episode.custom_data
                    if about["stop_reason"].is_infrastructure:
                        error = about["error"]
                    else:
                        reward_G = np.array([episode.get_return()], np.float32)
                        is_right = bool(passed(reward_G, about["pass_reward"], RIGHT)[0])
                        found[name][about["prompt"].key] = is_right
            finally:
                calls.close()
            if (lost := len(prompts) - len(found[name])) > MAX_LOST * len(prompts):
                why = f"{lost} of {len(prompts)} held-out episodes of {name} were lost"
                raise RuntimeError(f"{why}, the last one by: {error or 'a failure'}; expected at most {MAX_LOST:.0%}")
        return found


def kept_config(job: Job, domain: KeptDomain) -> Any:
    """Return a valid config that plays one domain."""
    config = build_config({**shared_settings(job, [domain]), "replay_capacity": 0})
    config.validate()
    return config


def train(directory: Path) -> None:
    """Do the job of a version's directory."""
    job = Job.read(directory)
    examiner = Examiner(job)
    if job.served.is_on_card:
        take_turns(directory)
    start_ray(verbose=False)
    (directory / UP).touch()
    with closing(RatedRun(job, directory)) as run:
        before = answers_before(examiner, run.engine, directory.parent)
        run.start()
        while run.num_done < run.num_slices:
            run.step()
            Progress(done=run.num_done, of=run.num_slices).write(directory)
        last = {**run.metrics, "kl": run.kl()}
        last[NUM_BAD] += not np.isfinite(last["kl"])
        after = examiner.answers(run.engine)
        verdicts, changes = judged(job, examiner, before, after, last)
        run.write(directory)
        Canary(continuations=canary_of(run, job)).write(directory)
        counts = {"num_slices": run.num_slices, "num_answers": len(job.answers), "num_trained": len(run.trained)}
    Result(
        reasons=lines_of(verdicts),
        verdicts=verdicts_of(verdicts),
        changes=changes_of(changes),
        metrics=last | counts,
        trained=run.trained,
    ).write(directory)


def answers_before(examiner: Examiner, engine: Engine, directory: Path) -> dict[str, Answers]:
    """Return the answers of version 0, played once and then read from the directory while their grading is the same.

    The server removes them when it starts, since data that environments read from files may have changed.
    """
    if (directory / Before.name).exists() and (kept := Before.read(directory)).grading == examiner.grading:
        return kept.answers
    found = examiner.answers(engine)  # the engine has just read the model's own files
    Before(grading=examiner.grading, answers=found).write(directory)
    return found


def judged(
    job: Job, examiner: Examiner, before: Mapping[str, Answers], after: Mapping[str, Answers], last: Mapping[str, float]
) -> tuple[list[Verdict], dict[str, Change]]:
    """Apply the gates to a candidate."""
    settings, prompts = job.settings, examiner.prompts
    health = Health(int(last[NUM_BAD]), last["kl"], *most_lost(prompts, after))
    verdicts = [gates.sanity(health, MAX_LOST), gates.drift(health, settings.max_kl)]
    if not verdicts[0].is_passed:
        return verdicts, {}
    changes = {name: gates.paired_change(before[name], after[name], settings.confidence) for name in prompts}
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
