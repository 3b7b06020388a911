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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.cli.serving.adapter import CANARY, read_json
from rllib_srl.cli.serving.canary import NUM_TOKENS, PROMPT_TOKENS, Continuation
from rllib_srl.cli.serving.job import PROGRESS, RESULT, Job, KeptDomain, write_json
from rllib_srl.cli.serving.trainer.grading_key import grading_key
from rllib_srl.cli.serving.trainer.process import UP, take_turns
from rllib_srl.cli.serving.trainer.rated_run import NUM_BAD, WAIT_S, RatedRun, shared_settings
from rllib_srl.cli.shared.cluster import start_ray
from rllib_srl.cli.shared.settings import build_config
from rllib_srl.common.environments import environment_id
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

BEFORE = "before.json"  # answers of version 0, beside the versions
GATE_DEADLINE_S = WAIT_S  # for a domain
MAX_LOST = 0.1  # largest share of held-out episodes of a domain that infrastructure may end
Answers = dict[str, bool]  # key of a prompt -> whether its greedy answer was right


class Examiner:
    """Plays held-out prompts of the domains to keep, greedily, with weights of the learner."""

    def __init__(self, job: Job) -> None:
        """Construct the environments and draw their held-out prompts, the same ones at each call.

        Raises:
            ValueError: an environment has too few.
        """
        self._job, self._configs, self.prompts = job, {}, dict[str, list[Prompt]]()
        least = gates.least_prompts(job.settings.max_drop, job.settings.confidence)
        for domain in job.keep:
            config = self._configs[domain.domain] = kept_config(job, domain)
            env_id = environment_id(domain.world, domain.domain)
            (creator,) = config.world_creators().values()
            (given,) = config.world_configs().values()
            source = PromptSource({env_id: creator}, {env_id: given}, {env_id: 1.0}, job.seed)
            prompts = self.prompts[domain.domain] = source.heldout(job.settings.gate_prompts)
            if len(prompts) < least:
                why = f"since fewer cannot exclude a drop of max_drop = {job.settings.max_drop:g}"
                found = f"--keep {domain.world} has {len(prompts)} held-out prompts"
                raise ValueError(f"{found}; expected at least {least}, {why} (--gate-prompts, --max-drop)")
            self._configs[domain.domain] = (config, {env_id: partial(creator, given)})

    def grading(self) -> dict[str, str]:
        """Return for each domain a key of how its answers are generated and graded."""
        limits = {name: _limits_of(config, self._job.context_length) for name, (config, _) in self._configs.items()}
        return {one.domain: grading_key(one, limits[one.domain]) for one in self._job.keep}

    def answers(self, engine: Engine) -> dict[str, Answers]:
        """Return for each domain which prompts are answered right; episodes lost to infrastructure are left out.

        Raises:
            RuntimeError: so many are lost that nothing can be said about the policy.
        """
        tokenizer = load_tokenizer(local_model(self._job.model))
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


def _limits_of(config: Any, context_length: int) -> dict[str, Any]:
    names = ("prompt_format", "max_turns", "max_turn_tokens", "max_episode_tokens")
    return {"right": RIGHT, "context_length": context_length, **{name: str(getattr(config, name)) for name in names}}


def kept_config(job: Job, domain: KeptDomain) -> Any:
    """Return a valid config that plays one domain."""
    config = build_config({**shared_settings(job, [domain]), "replay_capacity": 0})
    config.validate()
    return config


def train(directory: Path) -> None:
    """Do the job of a version's directory."""
    job = Job.read(directory)
    examiner = Examiner(job)
    if job.dtype == "bfloat16":
        take_turns(directory)
    start_ray(verbose=False)
    (directory / UP).touch()
    with closing(RatedRun(job, directory)) as run:
        before = answers_before(job, examiner, run.engine, directory.parent / BEFORE)
        run.start()
        while run.num_done < run.num_slices:
            run.step()
            write_json(directory / PROGRESS, {"done": run.num_done, "of": run.num_slices})
        last = {**run.metrics, "kl": run.kl()}
        last[NUM_BAD] += not np.isfinite(last["kl"])
        after = examiner.answers(run.engine)
        verdicts, changes = judged(job, examiner, before, after, last)
        run.write(directory)
        write_json(directory / CANARY, [asdict(one) for one in canary_of(run, job)])
        counts = {"num_slices": run.num_slices, "num_answers": len(job.answers), "num_trained": len(run.trained)}
    reasons = lines_of(verdicts)
    result = {"is_passed": not reasons, "reasons": reasons, "verdicts": verdicts_of(verdicts), "trained": run.trained}
    write_json(directory / RESULT, {**result, "changes": changes_of(changes), "metrics": {**last, **counts}})


def answers_before(job: Job, examiner: Examiner, engine: Engine, path: Path) -> dict[str, Answers]:
    """Return the answers of version 0, played once and then read from `path` while prompts and grading are the same."""
    wanted = {name: sorted(prompt.key for prompt in prompts) for name, prompts in examiner.prompts.items()}
    key = {"model": job.model, "prompts": wanted, "grading": examiner.grading()}
    if path.exists():
        kept = read_json(path)
        if all(kept.get(name) == value for name, value in key.items()):
            return dict(kept["answers"])
    found = examiner.answers(engine)  # the engine has just read the model's own files
    write_json(path, {**key, "answers": found})
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
    tokenizer = load_tokenizer(local_model(job.model))
    prompts = [ids[:PROMPT_TOKENS] for ids in canary_sequences(tokenizer, job.context_length - NUM_TOKENS)]
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
