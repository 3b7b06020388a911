"""The algorithm SRL: GRPO with experience replay for language models on RLlib.

    training_step
      plan       stored prompts (revisit) + fresh prompts
      rollout    LLMEnvRunner.play_groups ──> groups (the driver gets metadata; tokens stay in the object store)
      remember   the memory grades and stores played and rated groups, and draws stored groups (reuse, retain)
      batch      advantages, loss weights ──> one shard per learner
      learn      one update of the learners
      sync       verified weights to every engine
      look_back  learner feedback to the memory, callbacks
"""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import ray
from pyarrow.fs import LocalFileSystem
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    TIMERS,
)
from ray.rllib.utils.replay_buffers.base import ReplayBufferInterface

from rllib_srl.algorithm.checkpointing import SavedAlgorithm
from rllib_srl.algorithm.config import SRLConfig
from rllib_srl.algorithm.evaluation import evaluate
from rllib_srl.algorithm.gpu_memory import check_memory
from rllib_srl.algorithm.metrics import Report
from rllib_srl.algorithm.model_shape import ModelShape
from rllib_srl.algorithm.resources import card_bytes_here, check_build, check_cluster_holds
from rllib_srl.batch.advantages import AdvantageBatch, AdvantageEstimator, has_variance
from rllib_srl.batch.posterior import NO_HISTORY
from rllib_srl.batch.shard import TrainingShard, build_shards
from rllib_srl.common.callbacks import augmented, call_finished, call_rllibs, call_stopped, hooks, planned
from rllib_srl.common.environments import grading_digest
from rllib_srl.common.remote_calls import is_loss
from rllib_srl.curriculum.curriculum import Batch, Curriculum, Plan, weighted
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.engine.canary import canary_sequences
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.learner.group.learners import Learners
from rllib_srl.people.rating_store import RATINGS, RatingsError
from rllib_srl.replay.admission import MALFORMED
from rllib_srl.replay.client import ReplayClient
from rllib_srl.replay.intake import Visit
from rllib_srl.replay.rllib import RLlibReplayBuffer
from rllib_srl.rollout.batches import PlayOptions, RunnerBatch
from rllib_srl.rollout.rollouts import LossWatch, Rollouts, group_order
from rllib_srl.rollout.runner_group import StartedRunners, runners_started_in_time
from rllib_srl.storage.paths import local_path, memory_directory
from rllib_srl.storage.seal_key import make_key
from rllib_srl.types import GroupMeta, History, Prompt
from rllib_srl.weights.sync import WeightSync

if TYPE_CHECKING:  # at run time imported only if a run needs it
    from rllib_srl.learner.group.retention import Retention
    from rllib_srl.people.rating_feed import RatingFeed

starting = logging.getLogger("rllib_srl.start")  # progress messages of the start-up

ReplayBufferInterface.register(RLlibReplayBuffer)


@dataclass
class Iteration:
    """Data that the lines of `training_step` pass on, in their order."""

    now: int  # number of the iteration, from 1
    plan: Plan = field(default_factory=Plan)
    batches: list[RunnerBatch] = field(default_factory=list)
    num_played: int = 0  # groups of the batches, including dropped ones, without those of dynamic sampling
    groups: list[GroupMeta] = field(default_factory=list)  # those of `played` that are not dropped for their lag
    late: frozenset[str] = frozenset()  # ids of those that lag too much to be trained on
    visits: Mapping[str, Visit] = field(default_factory=dict)  # outcome of adding each group to the memory
    reused: list[GroupMeta] = field(default_factory=list)
    held: Sequence[Any] = ()  # stored answers that retention holds
    batch: AdvantageBatch = field(default_factory=lambda: AdvantageBatch([], [], [], {}))  # the groups to train on

    @property
    def played(self) -> list[GroupMeta]:
        """Return all groups of the batches, in the order in which they were begun."""
        return _played(self.batches)


class SRL(SavedAlgorithm):
    """Algorithm that trains a language model on text environments.

    Invariant: between iterations every engine holds the learner's weights of `version`, checked by the canary.
    """

    config: SRLConfig
    retention: Retention | None = None  # if answers may be held
    ratings: RatingFeed | None = None  # once people have rated answers
    result_logs: tuple[Callable[[int, dict[str, Any]], None], ...] = ()  # called with each iteration and its result

    @classmethod
    def get_default_config(cls) -> SRLConfig:
        """Return the default settings of SRL."""
        return SRLConfig()

    def setup(self, config: SRLConfig) -> None:
        """Start runners, learners and memory; verify that each engine holds the learner's weights."""
        if self.config.checkpoint_every:
            make_key(self.config.seal_key_file)  # fail now, not when the first checkpoint is written
        local = self.config.replay_settings().local_directory
        self._memory_directory = memory_directory(Path(self.logdir), local)  # also fails now if it cannot be used
        self.seed = self.config.seed if self.config.seed is not None else secrets.randbelow(2**31)
        try:
            self._start(config)
        except BaseException:
            call_stopped(self)
            raise

    def _start(self, config: SRLConfig) -> None:
        if not ray.is_initialized():
            ray.init()  # the resource check below needs a running Ray
        if ray.util.get_current_placement_group() is None:
            check_cluster_holds(super().default_resource_request(self.config), self.config)
        starting.info("preparing the model")
        described = self.config.described_model()
        check_build(self.config)
        if described is not None:
            check_memory(ModelShape.of(described), self.config, card_bytes_here())
        envs = (self.config.env_creators(), self.config.env_configs(), self.config.mixture_weights())
        self.source = PromptSource(*envs, self.seed, self.config.task_stream(), self.config.prompt_order)
        self.gradings = {name: grading_digest(env, envs[1][name]) for name, env in self.source.environments.items()}
        starting.info("starting engine and learner")
        with runners_started_in_time():
            super().setup(config)
        assert isinstance(self.env_runner_group, StartedRunners)
        self.runners, self.learners = self.env_runner_group.wait_until_started(), Learners(self.learner_group)
        loss, admit = self.config.loss_settings(), self.config.replay_admit
        trains_all = any(regulariser.trains_all for regulariser in self.config.made_regularisers().values())
        self.advantage_estimator = AdvantageEstimator(loss, trains_all)
        self.report = Report(self.metrics, Path(self.logdir), admit)
        model_dir = self.config.model_dir()
        self.weight_sync = self._make_weight_sync(model_dir)
        least, send = self.advantage_estimator.min_episodes, self.weight_sync.start
        self.rollouts = Rollouts(self.runners, self.config, least, self.seed, send, self.report)
        starting.info("testing the weight sync")
        self.weight_sync.start(self.version)
        starting.info("opening the memory")
        self.memory = self._start_memory(model_dir)
        self.retention = self.make_retention()
        self.curriculum = Curriculum(self.source, self.memory, self.metrics)
        self.losses = LossWatch()
        self.hooks = hooks(self)
        self.ratings = self._open_ratings()
        if self.ratings is not None:
            self.ratings.check()
        for line in self.source.small_pools(self.config.num_prompts_per_batch):
            self.report.warn(line)

    def _start_memory(self, model_dir: Path) -> ReplayClient:
        return ReplayClient.start(
            self.config.replay_settings(),
            directory=self._memory_directory,
            seed=int(np.random.SeedSequence([self.seed, sum(b"memory")]).generate_state(1)[0]),
            run=uuid.uuid4().hex[:12],
            model_dir=model_dir,
            max_prompt_tokens=self.config.max_episode_tokens - 2 * self.config.max_turn_tokens,
            is_local=self.config.num_env_runners == 0,
            timeout_s=self.config.start_timeout_s,
        )

    def make_retention(self, kind: Callable[..., Retention] | None = None) -> Retention | None:
        """Return a new retention of class `kind` (default: `Retention`); None if nothing is held."""
        if not self.config.may_hold():
            return None
        from rllib_srl.learner.group.retention import Retention

        settings, timeout_s = self.config.replay_settings(), self.config.sync_timeout_s
        return (kind or Retention)(settings, self.memory, self.learners, timeout_s)

    def _make_weight_sync(self, model_dir: Path) -> WeightSync:
        config, timeout_s = self.config, self.config.sync_timeout_s
        sequences = canary_sequences(load_tokenizer(model_dir), config.max_episode_tokens)
        has_adapters = config.sends_adapter()
        return WeightSync(self.learners, self.runners, sequences, config.compute_dtype, timeout_s, has_adapters)

    def _setup_logdir(self) -> None:
        """Create the log directory: under Tune the trial's own, else `log_directory`, else RLlib's default."""
        if self._storage is not None:
            super()._setup_logdir()
            if isinstance(self._storage.storage_filesystem, LocalFileSystem):
                self._logdir = self._storage.trial_fs_path  # Tune's working directory is not kept
        elif self.config.log_directory:
            self._logdir = str(local_path(self.config.log_directory).expanduser().absolute())
        else:
            super()._setup_logdir()
        Path(self._logdir).mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds private transcripts and memory

    # --- an iteration -----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Return the version of the weights: the number of updates."""
        return self.rollouts.version

    def train(self) -> dict[str, Any]:
        """Run one iteration, log its result, then write a checkpoint where one is due.

        Because of this order a killed run may log an iteration twice, but never omits one.

        Raises:
            ProcessLost: a process was lost that this run cannot replace. The learners have been ended.
            RuntimeError: the algorithm was stopped.
        """
        if self._is_stopped:
            raise RuntimeError(
                "train() was called after stop(); build a new algorithm, or go on with SRL.from_checkpoint(PATH)"
            )
        try:
            result: dict[str, Any] = super().train()
            self.save_if_due()
        except Exception as error:  # any: what Ray raises depends on who notices the loss
            if is_loss(error):
                raise self.lost(error) from error
            raise
        return result

    def step(self) -> dict[str, Any]:
        """Run one iteration, and note whether a checkpoint is due after it."""
        results: dict[str, Any] = super().step()
        self.note_due(results)
        return results

    def training_step(self) -> None:
        """Run one iteration: plan, rollout, remember, batch, learn, sync, look back."""
        it = Iteration(self.iteration + 1)
        with self._timed("plan"):
            prompts = self._plan(it)
        with self._timed("rollout"):
            self._rollout(it, prompts)
        with self._timed("remember"):
            self._remember(it)
        with self._timed("batch"):
            shards = self._batch(it)
        with self._timed("learn"):
            is_updated = self._learn(shards)
        with self._timed("sync"):
            if is_updated:
                self._sync_weights()
        with self._timed("look_back"):
            ended = self._look_back(it, is_updated)
        self._report(it)
        self.report.stages(ended)

    def _plan(self, it: Iteration) -> Batch:
        """Set the plan; return the prompts to begin."""
        it.plan = planned(self, it.plan, it.now) if self.hooks else it.plan
        filled = Batch([], 0)
        if it.plan.num_reused is None:
            in_play = [prompt.key for prompt, _ in self.rollouts.in_play]
            filled = self.curriculum.fill(self.rollouts.num_free, it.now, it.plan, in_play)
            filled = self.rollouts.resumed_first(filled)
        prompts = augmented(self, filled.prompts, it.now) if self.hooks else filled.prompts
        return Batch(prompts, filled.num_revisits)

    def _rollout(self, it: Iteration, prompts: Batch) -> None:
        """Play the prompts.

        Dynamic sampling: further prompts are played until `num_prompts_per_batch` groups have variance, in at most
        `dynamic_sampling_tries` rounds.
        """
        it.batches = self.rollouts.play_training(prompts.prompts, self.iteration, prompts.num_revisits)
        it.num_played = sum(len(batch.groups) + batch.num_dropped_groups for batch in it.batches)
        num_more = 0
        for attempt in range(1, self.advantage_estimator.settings.dynamic_sampling_tries + 1):
            num_live = sum(has_variance(group.rewards_G) for batch in it.batches for group in batch.groups)
            if num_live >= self.config.num_prompts_per_batch:
                break
            more = self.source.draw(self.config.num_prompts_per_batch - num_live, it.plan.fresh)
            it.batches += self.rollouts.play_training(more, self.iteration, stream=f"train again {attempt}")
            num_more += len(more)
        self.report.count("num_prompts_resampled", num_more)
        self.losses.check(it.batches)
        it.groups, it.late = self._kept(it.batches)

    def _remember(self, it: Iteration) -> None:
        """Store played groups and people's ratings; draw the groups to train on again and the answers to hold."""
        self._apply_ratings()
        it.visits = self.memory.add(it.groups, it.now)
        version = self.version if self.advantage_estimator.uses_history else None
        it.reused = self.memory.draw_groups(it.num_played, it.now, version, it.plan.num_reused)
        if self.retention:
            it.held = self.retention.draw(it.groups, it.reused, it.now, self.curriculum.learned(it.plan))

    def _look_back(self, it: Iteration, is_updated: bool) -> list[str]:
        """Give the learner's feedback to the memory, call the callbacks, return the domains whose stage has ended."""
        if is_updated and it.reused:
            self.memory.look_back(it.reused, self.learners.num_left_out(self.config.sync_timeout_s), it.now)
        if is_updated and self.retention:
            self.report.retention(*self.retention.report())
        ended = self.curriculum.end(it.plan, it.played)
        refused = {name for name, visit in it.visits.items() if visit.without_loss}
        self._end_stages(ended, [group for group in it.groups if group.group_id not in refused])
        if self.hooks:
            call_finished(self, it.groups, it.reused, ended, it.now)
        if self.ratings is not None:
            self.ratings.note_played(group.group_id for group in it.groups)
        return ended

    def _report(self, it: Iteration) -> None:
        played = it.played
        self.report.iteration(it.now, it.batches, played, it.batch.played)
        self.report.memory(self.memory, played, it.reused, it.batch.groups, it.visits, it.now)
        self.report.trained(played, it.batch, it.visits, self.advantage_estimator)
        paid = [group for group in played if group.has_reward_G is None]
        self.report.pool(paid, self.config.replay_pass_reward, self.advantage_estimator.settings.advantage)

    # --- parts of its lines -----------------------------------------------------------------------

    def _kept(self, batches: Sequence[RunnerBatch]) -> tuple[list[GroupMeta], frozenset[str]]:
        """Return the played groups in the order in which they were begun, and the ids of late ones among them.

        A group's lag is the number of updates since the weights of its first token. With `late` "drop" groups that lag
        more than `max_lag` are not among the groups.
        """
        groups = _played(batches)
        if self.rollouts.ahead is None:
            return groups, frozenset()
        lag = {group.group_id: self.version - int(group.versions_G2[:, 0].min()) for group in groups}
        late = [group for group in groups if lag[group.group_id] > self.config.max_lag]
        num_tokens = int(sum(group.num_loss_tokens_G.sum() for group in late))
        is_dropped = self.config.late == "drop"
        is_trained_later = not is_dropped and self.config.may_draw("reuse")
        self.report.ahead(list(lag.values()), len(late), num_tokens * (not is_trained_later))
        if late and not is_dropped and not is_trained_later:
            self.report.warn_of_late_groups(len(late))
        names = frozenset(group.group_id for group in late)
        if is_dropped:
            return [group for group in groups if group.group_id not in names], frozenset()
        return groups, names

    def _apply_ratings(self) -> None:
        """Apply new ratings of the run's directory to the memory; a file that cannot be read is left for later."""
        if self.ratings is None:
            self.ratings = self._open_ratings()
        if self.ratings is None or not self.memory.is_on:
            return
        try:
            counts = self.ratings.apply(self.memory, self.iteration)
        except RatingsError as error:
            self.report.warn(f"new ratings are not applied in this iteration: {error}")
            return
        if counts.get("num_applied") and not self.config.may_draw("reuse"):
            self.report.warn(
                "ratings grade prompts but do not train: replay_reuse_fraction is 0; set it above 0, such as 0.25"
            )
        elif num := counts.get("num_too_old"):
            self.report.warn(
                f"answers of {num} rated groups are older than replay_max_age = {self.config.replay_max_age} "
                "iterations: their ratings grade prompts but do not train"
            )

    def _open_ratings(self) -> RatingFeed | None:
        """Return the feed of ratings, None as long as people have rated nothing."""
        if not (Path(self.logdir) / RATINGS).exists():
            return None
        from rllib_srl.people.rating_feed import RatingFeed

        return RatingFeed(Path(self.logdir) / RATINGS)

    def play(
        self, prompts: Sequence[Prompt], stream: str = "train", num_revisits: int = 0, **options: Unpack[PlayOptions]
    ) -> Iterator[RunnerBatch]:
        """Play prompts on all runners in this iteration; see `Rollouts.play`."""
        return self.rollouts.play(prompts, self.iteration, stream, num_revisits, **options)

    def _batch(self, it: Iteration) -> list[TrainingShard]:
        """Set the groups to train on, with their advantages; return what each learner trains on.

        Groups that are late, malformed, without rewards, or lost with their node before they were stored are not
        trained on; their advantages are 0. Episodes that the memory's admission keeps out of the loss are removed at
        the end: they count in the baseline.
        """
        groups = [
            group
            for group in it.groups
            if group.group_id not in it.late
            and group.has_reward_G is None
            and (group.group_id in it.visits or not self.memory.is_on)
            and not (group.group_id in it.visits and it.visits[group.group_id].refused in MALFORMED)
        ]
        batch = self.advantage_estimator.estimate(
            groups,
            self.advantage_estimator.shaped_rewards(groups),
            self._kl_in_reward(groups),
            it.reused,
            _histories(groups, it.visits),
        )
        for name, number in batch.counts.items():
            self.report.count(name, number)
        advantages = dict(zip((group.group_id for group in groups), batch.played, strict=True))
        batch = batch.without({name: visit.without_loss for name, visit in it.visits.items() if visit.without_loss})
        played = [advantages.get(group.group_id, np.zeros(len(group.rewards_G))) for group in it.played]
        it.batch = weighted(replace(batch, played=played), it.plan.weights)
        return self._shards(it)

    def _shards(self, it: Iteration) -> list[TrainingShard]:
        settings = self.advantage_estimator.settings
        shards = build_shards(
            it.batch.groups,
            it.batch.advantages,
            self.learners.num,
            self.config.sync_timeout_s,
            aggregation=settings.aggregation,
            longest=settings.longest_answer,
        )
        if self.retention:
            self.retention.add_to(shards, it.held)
        return shards

    def _kl_in_reward(self, groups: Sequence[GroupMeta]) -> list[np.ndarray] | None:
        """Return kl_coeff times each episode's estimate of the KL, None unless the KL is part of the reward."""
        settings = self.advantage_estimator.settings
        if not settings.kl_coeff or not settings.kl_in_reward or not groups:
            return None
        rewards = [group.rewards_G.astype(np.float64) for group in groups]
        shards = build_shards(groups, rewards, self.learners.num, self.config.sync_timeout_s)
        answers = self.learners.episode_kl(shards, self.config.update_timeout_s)
        refs = [id(ref) for shard in shards for ref in shard.group_refs]
        kl_of = dict(zip(refs, (np.array(kl) for answer in answers for kl in answer), strict=True))
        return [settings.kl_coeff * kl_of[id(group.ref)] for group in groups]

    def _learn(self, shards: Sequence[TrainingShard]) -> bool:
        """Update the learners and return True; with nothing to train on, count the batch and return False."""
        is_empty = not any(shard.group_refs for shard in shards)
        self.report.count("num_empty_batches", int(is_empty))
        if is_empty:
            return False
        steps = self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
        timesteps = {NUM_ENV_STEPS_SAMPLED_LIFETIME: steps}
        with self._engines_at_rest():
            results = self.learners.update(shards, timesteps, self.config.num_epochs, self.config.update_timeout_s)
            self.metrics.aggregate(results, key=LEARNER_RESULTS)
        return True

    def _end_stages(self, ended: Sequence[str], groups: Sequence[GroupMeta]) -> None:
        """Let the regularisers record what was learned in stages that ended; the groups are those just played."""
        of_stages = {name: one for name, one in self.config.made_regularisers().items() if one.needs_stages}
        if not ended or not of_stages:
            return
        stage_groups = [group for group in groups if group.prompt.domain in ended]
        num_read = {name: regulariser.num_stage_episodes for name, regulariser in of_stages.items()}
        num_P = np.cumsum([0, *(len(group.rewards_G) for group in stage_groups)])
        stage_groups = stage_groups[: int(np.searchsorted(num_P, max(num_read.values())))]
        nothing = [np.zeros(len(group.rewards_G)) for group in stage_groups]
        shards = build_shards(stage_groups, nothing, self.learners.num, self.config.sync_timeout_s)
        with self._engines_at_rest():
            num = self.learners.end_stages(ended, shards, self.config.update_timeout_s)
        if readers := [name for name, most in num_read.items() if most]:
            self.report.count("num_importance_episodes", num)
            if not num:
                self.report.warn(
                    f"regularisers.{readers[0]}: no episode of {', '.join(ended)} at the end of its stage; it is not "
                    "protected"
                )

    def _sync_weights(self) -> None:
        with self.rollouts.at_rest():
            self.rollouts.version += 1
            gap, lost = self.weight_sync.sync(self.version)
            self.rollouts.restore(lost)
        self.report.sync(gap, self.version, self.weight_sync.seconds)

    @contextmanager
    def _engines_at_rest(self) -> Iterator[None]:
        """With `colocate`, put the engines to sleep while the learners use the shared GPU, and wake them up after."""
        if not self.config.colocate:
            yield
            return
        timeout_s = self.config.sync_timeout_s
        with self.rollouts.asleep(timeout_s):
            self.learners.onload(timeout_s)
            yield
            self.learners.offload(timeout_s)

    # --- evaluation, resources, end ---------------------------------------------------------------

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """Play held-out prompts greedily, and k times for pass@k, on the training engines; see `evaluation.py`."""
        call_rllibs(self, "on_evaluate_start")
        results = evaluate(self.config, self.source, self.play)
        call_rllibs(self, "on_evaluate_end", evaluation_metrics=results)
        return results

    @classmethod
    def default_resource_request(cls, config: Any) -> Any:
        """Return the resources of one Tune trial.

        Raises:
            PlacementError: the cluster cannot hold them.
        """
        request = super().default_resource_request(config)
        settings = cls.get_default_config().update_from_dict(config if isinstance(config, dict) else config.to_dict())
        check_cluster_holds(request, settings)
        return request

    @classmethod
    def _should_create_evaluation_env_runners(cls, eval_config: Any) -> bool:
        return False  # the training engines also evaluate; extra engines would need more memory

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """Do nothing: `play` and `_sync_weights` detect dead runners and restore them with verified weights."""
        return []

    def log_result(self, result: dict[str, Any]) -> None:
        """Call RLlib's callbacks, then pass the metrics to `result_logs`."""
        super().log_result(result)
        for log in self.result_logs:
            log(self.iteration, result)

    def cleanup(self) -> None:
        """Stop callbacks and the memory, close the ratings, and stop runners and learners."""
        self._is_stopped = True
        call_stopped(self)
        if hasattr(self, "rollouts"):
            self.rollouts.close()
        if hasattr(self, "memory"):
            self.memory.stop()
        if self.ratings is not None:
            self.ratings.close()
        super().cleanup()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with self.metrics.log_time((TIMERS, name), reduce="mean", window=1):
            yield


def _played(batches: Sequence[RunnerBatch]) -> list[GroupMeta]:
    return sorted((g for batch in batches for g in batch.groups), key=lambda g: group_order(g.group_id))


def _histories(groups: Sequence[GroupMeta], visits: Mapping[str, Visit]) -> list[History]:
    """Return the history of each group's prompt before this iteration; [] without visits."""
    return [visits[g.group_id].history if g.group_id in visits else NO_HISTORY for g in groups] if visits else []
