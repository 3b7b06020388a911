"""The algorithm SRL: GRPO with experience replay for language models on RLlib.

    training_step
      ratings    new ratings by people become rewards of stored groups, and grades
      plan       stored prompts (revisit) + fresh prompts
      rollout    LLMEnvRunner.play_groups ──> groups (the driver gets metadata; tokens stay in the object store)
      remember   the memory grades and stores the played groups, and draws stored groups (reuse)
      batch      advantages, loss weights ──> one shard per learner
      learn      one update of the learners
      sync       verified weights to every engine
      look_back  learner feedback to the memory, reference model, planner, callbacks
"""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from rllib_srl.algorithm.gpu_memory import ModelShape, check_memory
from rllib_srl.algorithm.metrics import Report
from rllib_srl.algorithm.resources import card_bytes_here, check_build, check_cluster_holds
from rllib_srl.batch.advantage_estimator import AdvantageBatch, AdvantageEstimator
from rllib_srl.batch.estimators import has_signal
from rllib_srl.batch.layout import balanced_shards
from rllib_srl.batch.posterior import NO_HISTORY
from rllib_srl.batch.shard import TrainingShard, build_shards
from rllib_srl.common.callbacks import augmented, call_finished, call_rllibs, call_stopped, planned
from rllib_srl.common.remote_calls import ActorFailure, Failure, RunnerFailure
from rllib_srl.curriculum.controller import Controller, weighted
from rllib_srl.curriculum.filling import Batch, make_filler
from rllib_srl.curriculum.planner import Plan
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.engine.canary import canary_sequences
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.learner.group.learners import Learners
from rllib_srl.learner.reference import ReferenceClock
from rllib_srl.people.rating_feed import RatingFeed
from rllib_srl.people.rating_store import RATINGS, RatingsError
from rllib_srl.replay.admission.admission import MALFORMED
from rllib_srl.replay.client import ReplayClient
from rllib_srl.replay.history import Policy
from rllib_srl.replay.intake import Visit
from rllib_srl.replay.rllib import RLlibReplayBuffer
from rllib_srl.rollout.ahead import RolloutsAhead
from rllib_srl.rollout.batches import PlayArguments, PlayOptions, RunnerBatch
from rllib_srl.rollout.loss_watch import LossWatch
from rllib_srl.rollout.started_runners import StartedRunners, runners_started_in_time
from rllib_srl.storage.local_paths import local_path
from rllib_srl.storage.memory_directory import memory_directory
from rllib_srl.storage.seal_key import make_key
from rllib_srl.types import GroupMeta, History, Prompt
from rllib_srl.weights.sync import WeightSync
from rllib_srl.weights.transports import ObjectStoreTransport, VLLMTransport

if TYPE_CHECKING:  # loaded if a run asks for it
    from rllib_srl.learner.group.retention import Retention

starting = logging.getLogger("rllib_srl.start")  # progress messages of the start-up
BEGUN_PER_SEAT = 2  # with max_lag: episodes that a runner plays at a time, in units of the engine's max_num_seqs
MAX_TRIES = 3  # attempts to play the same prompts when runners die

ReplayBufferInterface.register(RLlibReplayBuffer)


class SRL(SavedAlgorithm):
    """Algorithm that trains a language model on text environments.

    Invariant: between iterations every engine holds the learner's weights of `version`, checked by the canary.
    """

    config: SRLConfig
    ahead: RolloutsAhead | None = None
    retention: Retention | None = None  # with `replay_retain` above 0
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
        self._memory_directory = memory_directory(Path(self.logdir), local)  # likewise
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
            check_memory(ModelShape.of(described), self.config.flat(), card_bytes_here())
        worlds = (self.config.world_creators(), self.config.world_configs(), self.config.mixture_weights())
        self.source = PromptSource(*worlds, self.seed, self.config.task_stream(), self.config.prompt_order)
        starting.info("starting engine and learner")
        with runners_started_in_time():
            super().setup(config)
        self.version = 0
        self.policy_kl = 0.0  # nats per token by which updates have moved the policy, if history is discounted by it
        assert isinstance(self.env_runner_group, StartedRunners)
        self.runners, self.learners = self.env_runner_group.wait_until_started(), Learners(self.learner_group)
        self.ahead = self._start_ahead()
        starting.info("testing the weight sync")
        model_dir = self.config.model_dir()
        self.weight_sync = self._make_weight_sync(model_dir)
        self.weight_sync.start(self.version)
        starting.info("opening the memory")
        self.memory = self._start_memory(model_dir)
        self.retention = self._make_retention()
        self.filler = make_filler(self.source, self.memory)
        fractions = (self.config.replay_settings().first_revisit_fraction, self.config.replay_reuse_fraction)
        self.controller = Controller(
            self.config.planner_settings(), fractions, self.source, self.metrics
        )
        loss = self.config.loss_settings()
        trains_all = any(one.trains_all for one in self.config.made_regularisers().values())
        self.advantage_estimator = AdvantageEstimator(loss, trains_all)
        self.reference_clock = ReferenceClock(loss.kl_reference, loss.reference_every, loss.reference_rate)
        flat = self.config.flat()
        self.report = Report(self.metrics, Path(self.logdir), flat.replay_admit)
        self.losses = LossWatch()
        self.ratings = RatingFeed(Path(self.logdir) / RATINGS)
        self.ratings.check()
        for line in self.source.small_pools(self.config.num_prompts_per_batch):
            self.report.warn(line)

    def _start_ahead(self) -> RolloutsAhead | None:
        """Return what keeps the runners playing during updates, None if rollout and training take turns."""
        if not self.config.max_lag:
            return None
        how = {"slice_s": self.config.slice_s, "timeout_s": self.config.sample_timeout_s, "max_tries": MAX_TRIES}
        most_begun = BEGUN_PER_SEAT * self.config.engine_max_num_seqs
        return RolloutsAhead(self.runners, **how, most_begun=most_begun)

    @property
    def _num_in_flight(self) -> int:
        """Return the largest number of groups that are played or wait to be trained on."""
        default: int = (self.config.max_lag + 1) * self.config.num_prompts_per_batch
        return default if self.config.in_flight is None else int(self.config.in_flight)

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

    def _make_retention(self) -> Retention | None:
        settings = self.config.replay_settings()
        if not settings.retain:
            return None
        from rllib_srl.learner.group.retention import Retention

        return Retention(settings, self.memory, self.learners, self.config.sync_timeout_s)

    def _make_weight_sync(self, model_dir: Path) -> WeightSync:
        config, timeout_s = self.config, self.config.sync_timeout_s
        sequences = canary_sequences(load_tokenizer(model_dir), config.max_episode_tokens)
        both = (self.learners, self.runners, sequences, timeout_s)
        transport: ObjectStoreTransport | VLLMTransport = ObjectStoreTransport(*both)
        if config.weight_transfer != "object_store":
            transport = VLLMTransport(*both, config.weight_transfer, config.flat().engine_tensor_parallel_size)
        has_adapters = config.flat().sends_adapter()
        return WeightSync(transport, self.runners, config.compute_dtype, timeout_s, has_adapters)

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

    def training_step(self) -> None:
        """Run one iteration: plan, rollout, remember, batch, learn, sync, look back."""
        now = self.iteration + 1
        self._welcome_runners()
        with self._timed("ratings"):
            self._apply_ratings()
        with self._timed("plan"):
            plan = planned(self, self.controller.begin(now), now)
            filled = self._fill(now, plan)
            prompts = augmented(self, filled.prompts, now)
        with self._timed("rollout"):
            batches = self._play_training(prompts, num_revisits=filled.num_revisits)
            num_played = sum(len(batch.groups) + batch.num_dropped_groups for batch in batches)
            batches += self._resampled(batches, now, plan)
            self.losses.check(batches)
            groups, late = self._kept(batches)
        with self._timed("remember"):
            visits = self.memory.add(groups, now, self.policy_kl)
            left_out = _unpaid(groups) | late | self._gone(groups, visits) | _malformed(visits)
            policy = Policy(self.version, self.policy_kl) if self.advantage_estimator.uses_history else None
            reused = self.memory.draw_groups(num_played, now, policy, plan.num_reused)
            held = self.retention.draw(groups, now) if self.retention else []
        with self._timed("batch"):
            batch = weighted(self._estimate_advantages(groups, visits, reused, left_out), plan.weights)
            shards = self._shards(batch)
            if self.retention:
                oldest = self.version - self.config.max_lag
                self.retention.add_to(shards, held, _stored(groups, visits), batch.groups, oldest)
        with self._timed("learn"):
            is_updated = self._learn(shards)
        with self._timed("sync"):
            if is_updated:
                self._sync_weights()
        with self._timed("look_back"):
            if is_updated:
                self._look_back(groups, reused, now)
            self.filler.observe(groups, {group.group_id for group in batch.groups})
            ended = self.controller.end(plan, groups, self.config.replay_pass_reward, now)
            refused = {name for name, visit in visits.items() if visit.without_loss}
            self._end_stages(ended, [group for group in groups if group.group_id not in refused])
            call_finished(self, groups, reused, ended, now)
        self.ratings.note_played(group.group_id for group in groups)
        self._report_iteration(now, batches, groups, batch, reused, visits)
        self.report.stages(ended)

    # --- the lines of training_step --------------------------------------------------------------

    def _report_iteration(
        self,
        now: int,
        batches: Sequence[RunnerBatch],
        groups: Sequence[GroupMeta],
        batch: AdvantageBatch,
        reused: Sequence[GroupMeta],
        visits: Mapping[str, Visit],
    ) -> None:
        self.report.iteration(now, batches, groups, batch.played)
        self.report.memory(self.memory, groups, reused, batch.groups, visits, now)
        self.report.signal(groups, batch, visits, self.advantage_estimator)
        paid = [group for group in groups if group.has_reward_G is None]
        self.report.pool(paid, self.config.replay_pass_reward, self.advantage_estimator.settings.advantage)

    def _fill(self, now: int, plan: Plan) -> Batch:
        """Return the prompts to begin in this iteration; after a resume those that were in play come first."""
        if plan.num_reused is not None:
            return Batch([], 0)
        again, self._again = self._again, []
        in_play = [one.prompt.key for one in self.ahead.outstanding] if self.ahead is not None else []
        num = max(0, self._num_in_flight - len(in_play) - len(again))
        filled = self.filler.fill(num, now, plan, [*in_play, *(prompt.key for prompt, _ in again)])
        if not again:
            return filled
        revisits = [prompt for prompt, is_revisit in again if is_revisit]
        fresh = [prompt for prompt, is_revisit in again if not is_revisit]
        num_revisits = len(revisits) + filled.num_revisits
        at = filled.num_revisits
        return Batch([*revisits, *filled.prompts[:at], *fresh, *filled.prompts[at:]], num_revisits)

    def _kept(self, batches: Sequence[RunnerBatch]) -> tuple[list[GroupMeta], frozenset[str]]:
        """Return the played groups in the order in which they were begun, and the ids of late ones among them.

        A group's lag is the number of updates since the weights of its first token. With `late` "drop" groups that lag
        more than `max_lag` are not among the groups.
        """
        groups = sorted((g for batch in batches for g in batch.groups), key=lambda g: _place(g.group_id))
        if self.ahead is None:
            return groups, frozenset()
        lag = {group.group_id: self.version - int(group.versions_G2[:, 0].min()) for group in groups}
        late = [group for group in groups if lag[group.group_id] > self.config.max_lag]
        num_tokens = int(sum(group.num_loss_tokens_G.sum() for group in late))
        is_dropped = self.config.late == "drop"
        is_trained_later = not is_dropped and self.config.flat().may_draw("reuse")
        spent = self.ahead.take_seconds(), self.ahead.take_waiting_share()
        self.report.ahead(list(lag.values()), len(late), num_tokens * (not is_trained_later), *spent)
        if late and not is_dropped and not is_trained_later:
            self.report.warn_of_late_groups(len(late))
        names = frozenset(group.group_id for group in late)
        if is_dropped:
            return [group for group in groups if group.group_id not in names], frozenset()
        return groups, names

    def _apply_ratings(self) -> None:
        """Apply new ratings of the run's directory to the memory; a file that cannot be read is left for later."""
        try:
            counts = self.ratings.apply(self.memory, self.iteration) if self.memory.is_on else {}
        except RatingsError as error:
            self.report.warn(f"new ratings are not applied in this iteration: {error}")
            return
        if counts.get("num_applied") and not self.config.flat().may_draw("reuse"):
            self.report.warn(
                "ratings grade prompts but do not train: replay_reuse_fraction is 0; set it above 0, such as 0.25"
            )
        elif num := counts.get("num_too_old"):
            self.report.warn(
                f"answers of {num} rated groups are older than replay_max_age = {self.config.replay_max_age} "
                "iterations: their ratings grade prompts but do not train"
            )

    def play(
        self,
        prompts: Sequence[Prompt],
        stream: str = "train",
        num_revisits: int = 0,
        first_slot: int = 0,
        **options: Unpack[PlayOptions],
    ) -> Iterator[RunnerBatch]:
        """Play prompts on all runners and yield each runner's batch as it arrives.

        A runner that dies or times out is restarted with the current weights, and plays its prompts again with the same
        seed: the run goes on as if nothing had happened. If it does not come back, others play them. Groups that are
        played ahead of training are played to their end first, so that the engines are free.

        Args:
            prompts: the prompts to play.
            stream: name of the random stream of sampling: "train", or a separate one for evaluation and probes.
            num_revisits: number of prompts, the first ones, that come from the memory.
            first_slot: number of the first prompt within the iteration.
            options: arguments of `LLMEnvRunner.play_groups` that replace those of training.

        Raises:
            ActorFailure: the same prompts failed `MAX_TRIES` times, or a runner did not come back.
        """
        if self.ahead is not None:
            self.ahead.finish(self._restore_runners)
        pending = {f"{self.iteration + 1}.{slot}": prompt for slot, prompt in enumerate(prompts, first_slot)}
        revisits = frozenset(list(pending)[:num_revisits])
        shares = _deal(pending, self.runners.ids)
        seeds = {i: self._play_seed(stream, i, 0) for i in shares}
        for attempt in range(MAX_TRIES):
            calls = {i: self._play_arguments(share, seeds[i], revisits, options) for i, share in shares.items()}
            lost: dict[int, Failure] = {}
            for runner_id, answer in self.runners.play_groups(calls, self.version, self.config.sample_timeout_s):
                if isinstance(answer, Failure):
                    lost[runner_id] = answer
                else:
                    yield answer
            if not lost:
                return
            pending = {group_id: prompt for runner_id in lost for group_id, prompt in shares[runner_id].items()}
            if attempt + 1 == MAX_TRIES:
                culprit = min(lost)
                raise ActorFailure(
                    f"{len(pending)} prompts could not be played in {MAX_TRIES} attempts: "
                    f"runner {culprit} {lost[culprit].reason}"
                )
            self.report.count("num_groups_played_again", len(pending))
            self._restore_runners(lost)
            shares = {i: shares[i] for i in lost}
            if not lost.keys() <= set(self.runners.ids):
                shares = _deal(pending, self.runners.ids)
                seeds = {i: self._play_seed(stream, i, attempt + 1) for i in shares}

    def _play_training(self, prompts: Sequence[Prompt], **where: Any) -> list[RunnerBatch]:
        """Play prompts to train on.

        Args:
            prompts: the prompts to play.
            where: `stream` and `num_revisits` of `play`.
        """
        where["first_slot"] = self._first_slot(len(prompts))
        if self.ahead is not None:
            return self._play_ahead(self.ahead, prompts, **where)
        return list(self.play(prompts, **where))

    def _first_slot(self, num: int) -> int:
        """Return the number of the first of `num` groups in this iteration, and count them.

        An iteration that is repeated after an error goes on counting: the memory may hold groups of the first try.
        """
        now, (counted_in, num_counted) = self.iteration + 1, self._counted
        first = num_counted if counted_in == now else 0
        self._counted = now, first + num
        return first

    def _play_ahead(
        self, ahead: RolloutsAhead, prompts: Sequence[Prompt], num_revisits: int, first_slot: int
    ) -> list[RunnerBatch]:
        """Begin prompts, each on the runner with the fewest episodes; return the batches of P groups that have ended.

        Args:
            ahead: plays.
            prompts: new ones; the first `num_revisits` come from the memory.
            num_revisits: their number.
            first_slot: number of the first prompt within the iteration.
        """
        loads = ahead.loads()
        shares: dict[int, dict[str, Prompt]] = {}
        for slot, prompt in enumerate(prompts, first_slot):
            runner_id = min(loads, key=lambda i: (loads[i], i))
            loads[runner_id] += self.config.group_size
            shares.setdefault(runner_id, {})[f"{self.iteration + 1}.{slot}"] = prompt
        revisits = frozenset(f"{self.iteration + 1}.{first_slot + slot}" for slot in range(num_revisits))
        for runner_id, share in shares.items():
            ahead.launch(
                runner_id, self._play_arguments(share, self._play_seed("train", runner_id, 0), revisits, {})
            )
        return ahead.take(self.config.num_prompts_per_batch, self._restore_runners)

    def _play_seed(self, stream: str, runner_id: int, attempt: int) -> int:
        words = [self.seed, sum(stream.encode()), self.iteration, runner_id, attempt]
        return int(np.random.SeedSequence(words).generate_state(1)[0] >> 1)  # non-negative in 32 bits

    def _play_arguments(
        self, share: dict[str, Prompt], seed: int, revisits: frozenset[str], options: PlayOptions
    ) -> PlayArguments:
        training: PlayOptions = {
            "group_size": self.config.group_size,
            "num_transcripts": self.config.num_transcripts,
            "min_episodes": self.advantage_estimator.min_episodes,
        }
        return {"prompts": share, "seed": seed, "revisits": revisits, **training, **options}

    def _restore_runners(self, lost: dict[int, Failure]) -> None:
        """Restart runners and sync the current weights to them; a runner that dies meanwhile is restarted again.

        The run goes on without runners whose node is dead, as long as others are left.

        Raises:
            ActorFailure: the last runner did not come back, or a runner died `MAX_TRIES` times.
        """
        for runner_id, failure in lost.items():
            for attempt in range(MAX_TRIES):
                self.report.warn(
                    f"runner {runner_id} {failure.reason}; restarting it and playing its prompts again"
                )
                is_back = self.runners.revive(runner_id, failure, self.config.start_timeout_s)
                self.report.count("num_runner_restarts" if is_back else "num_runners_lost", 1)
                try:
                    if is_back:
                        self.weight_sync.start(self.version, [runner_id])
                    else:
                        left = ", ".join(map(str, self.runners.ids))
                        self.report.warn(f"runner {runner_id} is lost; its prompts go to {left}")
                    if self.ahead is not None:
                        again = self.ahead.restarted({runner_id: failure})
                        self.report.count("num_groups_played_again", again)
                    break
                except RunnerFailure as error:
                    if attempt + 1 == MAX_TRIES:
                        raise
                    failure = error.failure

    def _welcome_runners(self) -> None:
        """Let runners that were away with their node play again, with the current weights."""
        if not (back := self.runners.returned()):
            return
        self.report.warn(f"lost runners are back: {', '.join(map(str, back))}")
        with self._runners_at_rest():
            for runner_id in back:
                self.report.count("num_runner_restarts", 1)
                try:
                    self.weight_sync.start(self.version, [runner_id])
                except RunnerFailure as error:
                    self._restore_runners({runner_id: error.failure})

    def _gone(self, groups: Sequence[GroupMeta], visits: Mapping[str, Visit]) -> frozenset[str]:
        """Return the ids of groups that were lost with the node that held them, before the memory had stored them."""
        if not self.memory.is_on:
            return frozenset()
        return frozenset(group.group_id for group in groups if group.group_id not in visits)

    def _resampled(self, batches: Sequence[RunnerBatch], now: int, plan: Plan) -> list[RunnerBatch]:
        """Dynamic sampling: play further prompts until `num_prompts_per_batch` groups have signal.

        At most `dynamic_sampling_tries` rounds.
        """
        more: list[RunnerBatch] = []
        num_more = 0
        for attempt in range(1, self.advantage_estimator.settings.dynamic_sampling_tries + 1):
            played = [group for batch in [*batches, *more] for group in batch.groups]
            missing = self.config.num_prompts_per_batch - sum(has_signal(group.rewards_G) for group in played)
            if missing <= 0:
                break
            filled, stream = self.filler.more(missing, now, plan), f"train again {attempt}"
            more += self._play_training(filled.prompts, stream=stream, num_revisits=filled.num_revisits)
            num_more += len(filled.prompts)
        self.report.count("num_prompts_resampled", num_more)
        return more

    def _estimate_advantages(
        self,
        played: Sequence[GroupMeta],
        visits: Mapping[str, Visit],
        reused: Sequence[GroupMeta],
        left_out: Collection[str],
    ) -> AdvantageBatch:
        """Return the groups to train on with their advantages.

        Groups that are left out (late, malformed, or without rewards) are not trained on; their advantages are 0.
        Episodes that the memory's admission keeps out of the loss are removed at the end: they count in the baseline.
        """
        groups = [group for group in played if group.group_id not in left_out]
        batch = self.advantage_estimator.estimate(
            groups,
            self.advantage_estimator.shaped_rewards(groups),
            self._kl_in_reward(groups),
            reused,
            _histories(groups, visits),
        )
        for name, number in batch.counts.items():
            self.report.count(name, number)
        found = dict(zip((group.group_id for group in groups), batch.played, strict=True))
        batch = batch.without({name: visit.without_loss for name, visit in visits.items() if visit.without_loss})
        return replace(batch, played=[found.get(g.group_id, np.zeros(len(g.rewards_G))) for g in played])

    def _shards(self, batch: AdvantageBatch) -> list[TrainingShard]:
        settings = self.advantage_estimator.settings
        return build_shards(
            batch.groups,
            batch.advantages,
            self.learners.num_shards,
            self.config.sync_timeout_s,
            aggregation=settings.aggregation,
            longest=settings.longest_answer,
        )

    def _kl_in_reward(self, groups: Sequence[GroupMeta]) -> list[np.ndarray] | None:
        """Return kl_coeff times each episode's estimate of the KL, None unless the KL is part of the reward."""
        settings = self.advantage_estimator.settings
        if not settings.kl_coeff or not settings.kl_in_reward or not groups:
            return None
        rewards = [group.rewards_G.astype(np.float64) for group in groups]
        shards = build_shards(groups, rewards, self.learners.num_shards, self.config.sync_timeout_s)
        answers = self.learners.episode_kl(shards, self.config.update_timeout_s)
        refs = [id(ref) for shard in shards for ref in shard.group_refs]
        kl_of = dict(zip(refs, (np.array(kl) for answer in answers for kl in answer), strict=True))
        return [settings.kl_coeff * kl_of[id(group.ref)] for group in groups]

    def _learn(self, shards: Sequence[TrainingShard]) -> bool:
        """Update the learners; return whether they were updated. A batch without any signal is skipped and counted."""
        is_empty = not any(shard.group_refs for shard in shards)
        self.report.count("num_empty_batches", int(is_empty))
        if is_empty:
            return False
        steps = self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
        timesteps = {NUM_ENV_STEPS_SAMPLED_LIFETIME: steps}
        with self._engines_at_rest():
            results = self.learners.update(shards, timesteps, self.config.num_epochs, self.config.update_timeout_s)
            self.metrics.aggregate(results, key=LEARNER_RESULTS)
            if self.config.flat().replay_history_by == "kl":
                with self._timed("policy_kl"):
                    self.policy_kl += self.learners.policy_kl(shards, self.config.update_timeout_s)
        return True

    def _look_back(self, groups: Sequence[GroupMeta], reused: Sequence[GroupMeta], now: int) -> None:
        """Pass learner feedback (drift, targets) to the memory, and update the reference."""
        if reused:
            self.memory.look_back(reused, self.learners.reuse_report(self.config.sync_timeout_s), now)
        if self.retention:
            self.report.retention(*self.retention.keep(now))
        if rate := self.reference_clock.rate_at(now, [r for group in groups for r in group.rewards_G]):
            self.learners.follow_policy(rate, self.config.sync_timeout_s)
            self.report.count("num_reference_moves", 1)

    def _end_stages(self, ended: Sequence[str], groups: Sequence[GroupMeta]) -> None:
        """Let the regularisers take over what was learned in stages that ended; the groups are those just played."""
        of_stages = {name: one for name, one in self.config.made_regularisers().items() if one.needs_stages}
        if not ended or not of_stages:
            return
        own = [group for group in groups if group.prompt.domain in ended]
        num_read = {name: one.num_stage_episodes for name, one in of_stages.items()}
        num_P = np.cumsum([0, *(len(group.rewards_G) for group in own)])
        own = own[: int(np.searchsorted(num_P, max(num_read.values())))]
        nothing = [np.zeros(len(group.rewards_G)) for group in own]
        shards = build_shards(own, nothing, self.learners.num_shards, self.config.sync_timeout_s)
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
        with self._runners_at_rest():
            self.version += 1
            gap, lost = self.weight_sync.sync(self.version)
            self._restore_runners(lost)
        self.report.sync(gap, self.version, self.weight_sync.seconds)

    @contextmanager
    def _runners_at_rest(self) -> Iterator[None]:
        """Play nothing ahead inside the context, and play on with the weights of `version` after it."""
        if self.ahead is None:
            yield
            return
        with self.ahead.at_rest():
            yield
            self.ahead.version = self.version

    @contextmanager
    def _engines_at_rest(self) -> Iterator[None]:
        """With `colocate`, put the engines to sleep while the learners use the shared GPU, and wake them up after."""
        if not self.config.colocate:
            yield
            return
        timeout_s = self.config.sync_timeout_s
        if lost := self.runners.sleep(self.runners.ids, timeout_s):
            self._restore_runners(lost)
            for runner_id, failure in self.runners.sleep(lost, timeout_s).items():
                raise RunnerFailure(runner_id, failure, "going to sleep")
        self.learners.onload(timeout_s)
        try:
            yield
            self.learners.offload(timeout_s)
        finally:
            self._restore_runners(self.runners.wake_up(self.runners.ids, timeout_s))

    # --- evaluation, resources, end ---------------------------------------------------------------

    def rate(self, ratings: Mapping[str, float]) -> int:
        """Grade items of the memory by people's ratings; return how many were graded. Call it between iterations.

        Args:
            ratings: key of a prompt (`srl memory list` shows it) -> rating, on the scale `replay_rating_scale`.

        Raises:
            ValueError: a rating outside its scale, or there is no memory; nothing was graded.
        """
        return self.memory.rate(ratings, self.iteration)

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
        """Stop callbacks and the memory, close the log files, and stop runners and learners."""
        self._is_stopped = True
        call_stopped(self)
        if self.ahead is not None:
            self.ahead.close()
        if hasattr(self, "memory"):
            self.memory.stop()
        if hasattr(self, "report"):
            self.report.close()
        if hasattr(self, "ratings"):
            self.ratings.close()
        super().cleanup()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with self.metrics.log_time((TIMERS, name), reduce="mean", window=1):
            yield


def _deal(pending: Mapping[str, Prompt], runner_ids: Sequence[int]) -> dict[int, dict[str, Prompt]]:
    """Split prompts by group id over runners, about as many each; leave out runners that get none."""
    listed = list(pending.items())
    parts = balanced_shards([1] * len(pending), len(runner_ids))
    shares = {runner_id: dict(listed[at] for at in part) for runner_id, part in zip(runner_ids, parts, strict=True)}
    return {runner_id: share for runner_id, share in shares.items() if share}


def _malformed(visits: Mapping[str, Visit]) -> frozenset[str]:
    """Return the ids of groups that the memory found malformed: their numbers must reach no baseline."""
    return frozenset(name for name, visit in visits.items() if visit.refused in MALFORMED)


def _stored(groups: Sequence[GroupMeta], visits: Mapping[str, Visit]) -> list[tuple[GroupMeta, Collection[int]]]:
    """Return the groups that the memory has stored, each with the episodes that it keeps out of the loss."""
    found = [(group, visits.get(group.group_id)) for group in groups]
    return [(group, visit.without_loss) for group, visit in found if visit is not None and not visit.refused]


def _unpaid(groups: Sequence[GroupMeta]) -> frozenset[str]:
    """Return the ids of the groups that were played where nothing is paid; they are not trained on."""
    return frozenset(group.group_id for group in groups if group.has_reward_G is not None)


def _histories(groups: Sequence[GroupMeta], visits: Mapping[str, Visit]) -> list[History]:
    """Return the history of each group's prompt before this iteration; [] without visits."""
    return [visits[g.group_id].history if g.group_id in visits else NO_HISTORY for g in groups] if visits else []


def _place(group_id: str) -> tuple[int, int]:
    """Return the iteration in which a group was begun, and its slot in it."""
    iteration, slot = group_id.split(".")
    return int(iteration), int(slot)
