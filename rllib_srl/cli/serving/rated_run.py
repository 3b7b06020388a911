"""Train a version: an `SRL` run in one process that trains on rated answers from its memory.

    parent's checkpoint ──> weights, optimiser, memory ──> minus changed and old ratings, plus new ones
    each iteration          a draw of rated answers ──> reward - level of all ratings ──> one update ──> checkpoint
    last checkpoint         is the version: its child starts from it, a rollback leaves it

Rated answers are groups of one episode that earlier versions wrote, stored as not played. They train by reuse: the
ratio is to the log-probs recorded when they were sampled, clipped, and an answer from which the policy has moved too
far leaves the memory (`replay_max_logp_gap`). A rating trains in its own version and, less often, in the `MAX_AGE - 1`
versions after it. The level, from which the advantage is measured, is the mean of all ratings and a neutral one. With
`retain` later versions also train, by cross-entropy, on what was rated good; with `revisits` each iteration plays
prompts of the domains to keep, too.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import LEARNER_RESULTS

from rllib_srl.algorithm.named import MEMORIES
from rllib_srl.batch.advantages import AdvantageBatch, AdvantageEstimator
from rllib_srl.cli.serving.job import FileError, Job, RatedTokens
from rllib_srl.cli.serving.version_files import write_adapter
from rllib_srl.cli.shared.settings import build_config
from rllib_srl.common.callbacks import SRLCallback, hooks
from rllib_srl.curriculum.curriculum import Plan
from rllib_srl.learner.group.retention import Retention
from rllib_srl.people.served_store import SERVED
from rllib_srl.storage.checkpoints import checkpoints_in
from rllib_srl.storage.paths import MEMORY
from rllib_srl.types import Group, GroupMeta, History, Prompt, StopReason

MAX_AGE = 8  # versions in which a rating trains
WAIT_S = 7 * 86400.0  # for anything; the time in which the trainer is stopped counts, too
NUM_PLAYED = 32  # episodes at the same time on a card
NUM_BAD = "num_nonfinite"
_METRICS = ("reuse/kl", "reuse/ratio", "reuse/clip_fraction", "reuse/left_out")
_BAD = ("num_nonfinite_gradients", "num_nonfinite_logps")


class RatedAnswers(SRLCallback):
    """Lets a run train on rated answers, and keeps with its checkpoints which of them were trained on."""

    num_revisits = 0  # prompts of domains to keep that each iteration plays

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []  # version and its first iteration, this one and its ancestors
        self.metrics: dict[str, float] = {}  # of the last iteration; `NUM_BAD`: of all of this version
        self.trained: Counter[str] = Counter()  # answer -> iterations of this version
        self.new_keys: frozenset[str] = frozenset()  # keys of the answers with which this version was begun

    def begin(self, version: int, iteration: int, new_keys: Iterable[str]) -> None:
        """Begin a version after an iteration; forget one that is too old. `new_keys` are of its answers."""
        self.begun = [*self.begun[1 - MAX_AGE :], (version, iteration)]
        self.metrics, self.trained, self.new_keys = {NUM_BAD: 0.0}, Counter(), frozenset(new_keys)

    def change_plan(self, *, algorithm: Any, plan: Plan, **kwargs: Any) -> Plan:
        """Play nothing by itself."""
        return replace(plan, num_reused=algorithm.config.num_prompts_per_batch)

    def augment_batch(self, *, algorithm: Any, **kwargs: Any) -> Sequence[Prompt]:
        return algorithm.source.draw(self.num_revisits) if self.num_revisits else ()

    def post_step(self, *, algorithm: Any, reused: Sequence[GroupMeta], **kwargs: Any) -> None:
        metrics = {}
        for name in _METRICS + _BAD:  # missing if each rating is at the level, since nothing is trained on then
            default = 0.0 if name in _BAD else float("nan")
            metrics[name] = float(algorithm.metrics.peek((LEARNER_RESULTS, DEFAULT_MODULE_ID, name), default=default))
        num_bad = self.metrics[NUM_BAD] + sum(metrics[name] for name in _BAD)
        self.metrics = {**{name: metrics[name] for name in _METRICS}, NUM_BAD: num_bad}
        self.trained.update(group.prompt.prompt_id for group in reused)

    def get_state(self) -> dict[str, Any]:
        state = {"begun": self.begun, "metrics": self.metrics, "trained": dict(self.trained)}
        return {**state, "new_keys": sorted(self.new_keys)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.begun, self.metrics = [(v, i) for v, i in state["begun"]], dict(state["metrics"])
        self.trained, self.new_keys = Counter(state["trained"]), frozenset(state["new_keys"])


class RatedEstimator(AdvantageEstimator):
    """Judges rated answers by the level of all ratings, apart from what is played beside them."""

    level = 0.5  # mean of all ratings

    def estimate(
        self,
        groups: Sequence[GroupMeta],
        rewards: Sequence[np.ndarray],
        kl: Sequence[np.ndarray] | None,
        reused: Sequence[GroupMeta],
        histories: Sequence[History] = (),
    ) -> AdvantageBatch:
        """Return what is trained on, as `AdvantageEstimator.estimate`; rated answers have a scale of their own."""
        history = History(domain_mean=self.level)
        rated = super().estimate([], [], None, [replace(group, history=history) for group in reused])
        played = super().estimate(groups, rewards, kl, [], histories)
        counts = {name: number + rated.counts[name] for name, number in played.counts.items()}
        advantages = played.advantages + rated.advantages
        return AdvantageBatch(played.groups + rated.groups, advantages, played.played, counts)


class RatedRetention(Retention):
    """Holds also answers that were rated good, in versions after the first one that trains on them."""

    def __init__(self, noted: RatedAnswers, *parts: Any) -> None:
        """Use the parts of a run; `noted` knows the answers that are new in its version."""
        super().__init__(*parts)
        self._noted = noted

    def left_out(self, groups: Sequence[GroupMeta]) -> set[str]:
        return super().left_out(groups) | self._noted.new_keys


class RatedRun:
    """The run of one job. Invariant: each iteration that is done is in a checkpoint of the version's directory."""

    def __init__(self, job: Job, directory: Path) -> None:
        """Build the run with the weights of the model that was given. Ray has been started."""
        self._job, self._directory = job, directory
        shutil.rmtree(directory / MEMORY, ignore_errors=True)  # of a trainer that was killed
        self.algo = rated_config(job, directory).build_algo()
        self.learner: Any = next(iter(self.algo.learner_group.foreach_learner(lambda learner: learner))).get()
        self.engine = self.algo.env_runner.engine
        (self.noted,) = (hook for hook in hooks(self.algo) if isinstance(hook, RatedAnswers))
        self.noted.num_revisits = job.settings.revisits
        self.algo.advantage_estimator = estimator = RatedEstimator(self.algo.config.loss_settings())
        estimator.level = job.level
        self.algo.retention = self.algo.make_retention(partial(RatedRetention, self.noted))

    def start(self) -> None:
        """Go on with the newest checkpoint of this version, else begin it with the parent's."""
        if self._job.parent:
            self.algo.restore_from_path(parent_checkpoint(self._job.parent))
        self._parent_logps = self._logps()
        if checkpoints := checkpoints_in(self._directory):
            self.algo.restore_from_path(checkpoints[-1])
        else:
            self.remember(self._job)

    def remember(self, job: Job) -> None:
        """Begin the version of a job: bring the ratings in the memory up to date."""
        self._job, now, memory, noted = job, self.algo.iteration, self.algo.memory, self.noted
        if len(noted.begun) == MAX_AGE:
            memory.remove(before=noted.begun[1][1])
        new_keys = [Prompt(SERVED, answer.id).key for answer in job.answers]
        noted.begin(job.version, now, new_keys)
        memory.remove([*(Prompt(SERVED, name).key for name in job.changed), *new_keys])
        groups = [group_of(answer, now, job.good) for answer in job.answers]
        visits = memory.add([GroupMeta.of(group, group) for group in groups], now, is_played=False)
        if refused := {name: visit.refused for name, visit in visits.items() if visit.refused}:
            raise ValueError(f"the memory refused {len(refused)} rated answers, such as {next(iter(refused.items()))}")

    @property
    def num_slices(self) -> int:
        """Return the number of iterations of this version: every new answer could be drawn `passes` times."""
        settings = self._job.settings
        return settings.passes * -(-len(self._job.answers) // settings.slice_answers)

    @property
    def num_done(self) -> int:
        return int(self.algo.iteration) - self.noted.begun[-1][1]

    def step(self) -> None:
        """Train on a draw, and write a checkpoint."""
        self.algo.train()

    def kl(self) -> float:
        """Return the KL from the parent to the present policy on the tokens of the rated answers, nats per token.

        k3 = ratio - 1 - log ratio, whose mean over tokens of the parent is KL(parent || policy).
        """
        pairs = zip(self._logps(), self._parent_logps, strict=True)
        log_ratio_N = np.concatenate([now - before for now, before in pairs]).astype(np.float64)
        return float(np.mean(np.exp(log_ratio_N) - 1 - log_ratio_N))

    def _logps(self) -> list[np.ndarray]:
        """Return the log-probs of the tokens of each new answer under the present policy."""
        logps = []
        for answer in self._job.answers:
            (logp,) = self.learner.scorer.score([[*answer.prompt_ids, *answer.ids]])
            logps.append(logp[len(answer.prompt_ids) - 1 :])
        return logps

    def write(self, directory: Path) -> None:
        rank = self._job.served.rank
        write_adapter(self.learner.model, directory, rank, 2.0 * rank, Path(self._job.served.model).name)

    def close(self) -> None:
        """End the run; what it keeps is its newest checkpoint."""
        self.algo.stop()
        shutil.rmtree(self._directory / MEMORY, ignore_errors=True)
        for older in checkpoints_in(self._directory)[:-1]:
            shutil.rmtree(older)


def parent_checkpoint(parent: str) -> Path:
    checkpoints = checkpoints_in(Path(parent))
    if not checkpoints:
        raise FileError(f"{parent} has no checkpoint, so its memory is lost; expected one to train from")
    return checkpoints[-1]


def rated_config(job: Job, directory: Path) -> Any:
    """Return the config of a version's run in one process, not yet validated: on a card in bfloat16.

    Its environments are the domains to keep: for revisits, and for the gates.
    """
    served, settings, domains = job.served, job.settings, [kept.model_dump() for kept in job.keep]
    values: dict[str, Any] = {"model": served.model, "lr": settings.lr, "lora_rank": served.rank}
    if domains:
        weights = {kept.domain: 1.0 for kept in job.keep}
        values |= {"stream": {"domains": domains, "schedule": [[0, weights]]}}
    values |= {"engine": "transformers", "compute_dtype": served.dtype, "max_episode_tokens": served.context}
    values |= {"num_env_runners": 0, "num_learners": 0, "temperature": served.temperature, "seed": job.seed}
    values |= dict.fromkeys(("num_gpus_per_learner", "num_gpus_per_env_runner"), 0.5 if served.is_on_card else 0)
    if served.is_on_card:  # its shares were computed before the start (card.py); Ray does not know of vLLM's
        values |= {"engine_max_num_seqs": NUM_PLAYED, "check_resources": False}
        values |= {"colocate": False, "activation_checkpointing": True}
    values |= dict.fromkeys(("env_timeout_s", "sample_timeout_s", "update_timeout_s", "sync_timeout_s"), WAIT_S)
    values |= {"kl_coeff": settings.kl, "kl_on_reused": "weighted"} if settings.kl else {}
    values |= {"advantage": "posterior", "group_size": 1, "num_prompts_per_batch": settings.slice_answers}
    values |= {"log_directory": str(directory.absolute()), "checkpoint_every": 1, "checkpoints_kept": 1}
    values |= {**MEMORIES["uniform"], "replay_revisit_fraction": 0.0, "replay_retain": settings.retain}
    values |= {"replay_reuse_fraction": 0.5, "replay_reuse_selection": "srl"}
    values |= {"replay_domains": [SERVED]} if settings.revisits else {}  # what is played is not reused
    values |= dict.fromkeys(("replay_max_age", "replay_max_uses"), 10**6)  # `RatedRun` removes what is too old
    # What people rate is stored whatever it is: secrets were left out when it was logged.
    values |= {"replay_admit": None, "replay_degenerate_share": None}
    return build_config(values).callbacks(RatedAnswers)


def group_of(answer: RatedTokens, now: int, good: float) -> Group:
    """Return a rated answer as a group of one episode; its id begins with the iteration `now` in which it is stored."""
    num_prompt, num_all = len(answer.prompt_ids), len(answer.prompt_ids) + len(answer.ids)
    mask_N = np.arange(num_all) >= num_prompt
    logp_N = np.zeros(num_all, np.float32)
    logp_N[num_prompt:] = np.minimum(answer.logps, 0.0)
    group = Group(
        group_id=f"{now}.{answer.id}",
        prompt=Prompt(SERVED, answer.id, SERVED),
        token_ids_N=np.array([*answer.prompt_ids, *answer.ids], np.int32),
        loss_mask_N=mask_N,
        behaviour_logp_N=logp_N,
        offsets=np.array([0, num_all]),
        rewards_G=np.array([answer.reward], np.float32),
        versions_G2=np.full((1, 2), answer.version, np.int64),
        stop_reasons=(StopReason.TERMINATED,),
        extra={"pass_reward": good},
    )
    group.check_valid()
    return group
