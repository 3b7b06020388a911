"""SRL: GRPO for language models on RLlib, with a memory.

    training_step
      plan ──> due items (revisit) + fresh prompts ──> LLMEnvRunner.play_groups ──> groups (metadata; tokens stay put)
      remember ──> memory grades and stores what was played, and draws stored groups (reuse)
      advantages ──> shards, one a learner ──> update ──> verified weights back to every engine
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from pyarrow.fs import LocalFileSystem
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    TIMERS,
)

from rllib_srl.advantages import has_signal
from rllib_srl.callbacks import augmented
from rllib_srl.carriers import Direct, ObjectStore
from rllib_srl.comparison import Compared, Comparison
from rllib_srl.config import SRLConfig
from rllib_srl.deadlines import ActorFailure, Failure
from rllib_srl.engine.canary import canary_sequences
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.env_runner import RunnerBatch
from rllib_srl.evaluation import evaluate
from rllib_srl.learners import ask_learners, call_learners, update_learners
from rllib_srl.models import local_model
from rllib_srl.placement import check_cluster_holds
from rllib_srl.planning import Planning, weighted
from rllib_srl.prompts import PromptSource
from rllib_srl.reference import ReferenceClock
from rllib_srl.replay.client import Memory
from rllib_srl.replay.no_memory import NoMemory
from rllib_srl.replay.visits import Visit
from rllib_srl.report import Report
from rllib_srl.runners import Runners
from rllib_srl.saved import SavedAlgorithm
from rllib_srl.shaping import ramp
from rllib_srl.shard import TrainingShard, build_shards
from rllib_srl.types import GroupMeta, Prompt
from rllib_srl.weight_sync import WeightSync

MAX_TRIES = 3  # of the same prompts, when the runner that plays them dies


class SRL(SavedAlgorithm):
    """Trains a language model on text environments.

    Invariant: between iterations every engine holds the learner's weights of `version`, checked by the canary.
    """

    config: SRLConfig

    @classmethod
    def get_default_config(cls) -> SRLConfig:
        """Return the settings SRL starts from."""
        return SRLConfig()

    def setup(self, config: SRLConfig) -> None:
        """Start runners and learners, and prove that each engine follows the learner's weights."""
        model_dir = local_model(self.config.model_config["model"])  # once, before any process starts
        if not ray.is_initialized():
            ray.init()  # as the first remote call would, but before asking what the machine holds
        if ray.util.get_current_placement_group() is None:
            check_cluster_holds(super().default_resource_request(self.config), self.config)
        super().setup(config)
        self.version = 0
        self.seed = self.config.seed if self.config.seed is not None else int(np.random.SeedSequence().entropy % 2**31)
        worlds = (self.config.world_creators(), self.config.world_configs(), self.config.mixture_weights())
        self.source = PromptSource(*worlds, self.seed, self.config.task_stream())
        self.runners = Runners(self.env_runner_group)
        self.runners.check_started(self.config.start_timeout_s)
        self.weight_sync = self._make_weight_sync(model_dir)
        self.weight_sync.start(self.version)
        self.memory = self._start_memory(model_dir)
        fractions = (self.config.replay_revisit_fraction, self.config.replay_reuse_fraction)
        self.planning = Planning(self.config.planner_settings(), self.seed, fractions)
        loss = self.config.loss_settings()
        self.comparison = Comparison(loss, self.config.replay_pass_reward, self.seed)
        self.reference_clock = ReferenceClock(loss.kl_reference, loss.reference_every, loss.reference_rate)
        self.report = Report(self.metrics, Path(self.logdir))

    def _start_memory(self, model_dir: Path) -> Memory | NoMemory:
        settings = self.config.replay_settings()
        if not settings.is_on:
            return NoMemory()
        return Memory.start(
            settings,
            directory=Path(self.logdir) / "replay",
            seed=int(np.random.SeedSequence([self.seed, sum(b"memory")]).generate_state(1)[0]),
            run=uuid.uuid4().hex[:12],
            model_dir=model_dir,
            max_prompt_tokens=self.config.max_episode_tokens - 2 * self.config.max_turn_tokens,
            temperature=self.config.temperature,
            is_local=self.config.num_env_runners == 0,
            timeout_s=self.config.start_timeout_s,
        )

    def _make_weight_sync(self, model_dir: Path) -> WeightSync:
        config, timeout_s = self.config, self.config.sync_timeout_s
        sequences = canary_sequences(load_tokenizer(model_dir), config.max_episode_tokens)
        both = (self.learner_group, self.runners, sequences, timeout_s)
        carrier: ObjectStore | Direct = ObjectStore(*both)
        if config.weight_transfer != "object_store":
            carrier = Direct(*both, config.weight_transfer, config.engine_tensor_parallel_size)
        return WeightSync(carrier, self.runners, sequences, config.compute_dtype, timeout_s)

    def _setup_logdir(self) -> None:
        """Log into `log_directory` where it is set; under Tune into the trial's own directory of results."""
        if self._storage is not None:
            super()._setup_logdir()
            if isinstance(self._storage.storage_filesystem, LocalFileSystem):
                self._logdir = self._storage.trial_fs_path  # what lies in Tune's working directory is not kept
        elif self.config.log_directory:
            self._logdir = str(Path(self.config.log_directory).expanduser().absolute())
        else:
            super()._setup_logdir()
        Path(self._logdir).mkdir(parents=True, exist_ok=True)

    def training_step(self) -> None:
        """Plan, play, remember, compare, learn, sync."""
        now = self.iteration + 1
        with self._timed("plan"):
            plan = self.planning.begin(self, now)
            revisits = self.memory.due(self.config.num_prompts_per_batch, now, plan.stored)
            fresh = self.source.draw(self.config.num_prompts_per_batch - len(revisits), plan.fresh)
            prompts = augmented(self, revisits + fresh, now)
        with self._timed("rollout"):
            batches = list(self.play(prompts, num_revisits=len(revisits)))  # asynchrony changes this line only
            batches += self._resampled(batches, len(prompts), plan.fresh)
            groups = sorted((g for batch in batches for g in batch.groups), key=lambda g: _slot(g.group_id))
        with self._timed("remember"):
            visits = self.memory.add(groups, now)
            reused = self.memory.sample(len(prompts), now, plan.stored)
        with self._timed("batch"):
            compared = weighted(self._compare(groups, visits, reused, now), plan.weights)
            shards = self._shards(compared, now)
        with self._timed("learn"), self._engines_at_rest():
            is_updated = self._learn(shards)
        with self._timed("sync"):
            if is_updated:
                self._sync_weights()
        with self._timed("look_back"):
            if is_updated:
                self._look_back(groups, reused, now)
            self.planning.end(self, plan, groups, reused, now, is_updated)
        self.report.iteration(now, batches, groups, compared.played)
        self.report.memory(self.memory, groups, reused, visits, now)

    # --- the lines of training_step --------------------------------------------------------------

    def play(
        self,
        prompts: Sequence[Prompt],
        stream: str = "train",
        num_revisits: int = 0,
        first_slot: int = 0,
        **arguments: Any,
    ) -> Iterator[RunnerBatch]:
        """Play prompts on all runners and yield what each played, as it arrives.

        A runner that dies or falls silent is restarted, gets the current weights, and its prompts are played again.

        Args:
            prompts: what to play.
            stream: names the random stream of sampling; "train", or evaluation's own.
            num_revisits: how many prompts, the first ones, come from the memory.
            first_slot: number of the first prompt within the iteration.
            arguments: of `LLMEnvRunner.play_groups`, in place of training's.

        Raises:
            ActorFailure: the same prompts failed `MAX_TRIES` times, or a runner did not come back.
        """
        pending = [(f"{self.iteration + 1}.{slot}", prompt) for slot, prompt in enumerate(prompts, first_slot)]
        arguments = {**arguments, "revisits": frozenset(group_id for group_id, _ in pending[:num_revisits])}
        for attempt in range(MAX_TRIES):
            shares = _deal(pending, self.runners.ids)
            calls = {i: self._play_arguments(share, i, stream, attempt, arguments) for i, share in shares.items()}
            lost: dict[int, Failure] = {}
            for runner_id, answer in self.runners.each("play_groups", calls, self.config.sample_timeout_s):
                if isinstance(answer, Failure):
                    lost[runner_id] = answer
                else:
                    yield answer
            if not lost:
                return
            pending = [pair for runner_id in lost for pair in shares[runner_id]]
            if attempt + 1 == MAX_TRIES:
                culprit = min(lost)
                raise ActorFailure(
                    f"{len(pending)} prompts could not be played in {MAX_TRIES} tries: "
                    f"runner {culprit} {lost[culprit].reason}"
                )
            self._restore_runners(lost)

    def _play_arguments(
        self, share: list[tuple[str, Prompt]], runner_id: int, stream: str, attempt: int, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        words = [self.seed, sum(stream.encode()), self.iteration, runner_id, attempt]
        seed = int(np.random.SeedSequence(words).generate_state(1)[0] >> 1)  # non-negative in 32 bits
        defaults = {"group_size": self.config.group_size, "num_transcripts": self.config.num_transcripts}
        return {"prompts": share, "seed": seed, **defaults, **arguments}

    def _restore_runners(self, lost: dict[int, Failure]) -> None:
        for runner_id, failure in lost.items():
            self.report.warn(f"runner {runner_id} {failure.reason}; it is restarted, and what it lost is played again")
            self.runners.revive(runner_id, failure, self.config.start_timeout_s)
            self.weight_sync.start(self.version, [runner_id])
            self.report.count("num_runner_restarts", 1)

    def _resampled(
        self, batches: Sequence[RunnerBatch], num_played: int, shares: Mapping[str, float] | None
    ) -> list[RunnerBatch]:
        """Play fresh prompts in place of groups without signal, until each has one or the tries are used up."""
        more: list[RunnerBatch] = []
        num_slots = num_played
        for attempt in range(1, self.comparison.settings.dynamic_sampling_tries + 1):
            played = [group for batch in [*batches, *more] for group in batch.groups]
            missing = self.config.num_prompts_per_batch - sum(has_signal(group.rewards_G) for group in played)
            if missing <= 0:
                break
            fresh = self.source.draw(missing, shares)
            more += self.play(fresh, stream=f"train again {attempt}", first_slot=num_slots)
            num_slots += missing
        self.report.count("num_prompts_resampled", num_slots - num_played)
        return more

    def _compare(
        self, groups: Sequence[GroupMeta], visits: Mapping[str, Visit], reused: Sequence[GroupMeta], now: int
    ) -> Compared:
        """Return what is trained on, with advantages times the diversity bonus of its visit where there is one."""
        is_rescue = self.comparison.settings.rescue != "none"
        compared = self.comparison.compare(
            groups,
            self.comparison.shaped_rewards(groups, now),
            self._kl_in_reward(groups),
            [visits[g.group_id].bonus_G if g.group_id in visits else () for g in groups],
            reused,
            self.memory.successes(groups, now) if is_rescue else {},
        )
        for name, number in compared.counts.items():
            self.report.count(name, number)
        return compared

    def _shards(self, compared: Compared, now: int) -> list[TrainingShard]:
        settings = self.comparison.settings
        return build_shards(
            compared.groups,
            compared.advantages,
            max(1, self.config.num_learners),
            self.config.sync_timeout_s,
            self.config.replay_reuse_coeff * ramp(now, settings.reuse_ramp),
            settings.aggregation,
            settings.longest_answer,
            settings.reuse_normalisation,
        )

    def _kl_in_reward(self, groups: Sequence[GroupMeta]) -> list[np.ndarray] | None:
        """Return kl_coeff times each episode's k1 where the KL belongs in the reward, else None."""
        settings = self.comparison.settings
        if not settings.kl_coeff or settings.kl_estimator != "k1" or not groups:
            return None
        rewards = [group.rewards_G.astype(np.float64) for group in groups]
        shards = build_shards(groups, rewards, max(1, self.config.num_learners), self.config.sync_timeout_s)
        arguments = [(shard,) for shard in shards]
        timeout_s = self.config.update_timeout_s
        answers = call_learners(self.learner_group, "episode_kl", arguments, timeout_s, "scoring the reference")
        refs = [id(ref) for shard in shards for ref in shard.group_refs]
        kl_of = dict(zip(refs, (np.array(kl) for answer in answers for kl in answer), strict=True))
        return [settings.kl_coeff * kl_of[id(group.ref)] for group in groups]

    def _learn(self, shards: Sequence[TrainingShard]) -> bool:
        """Update the learners; a batch in which no group has signal changes nothing, and is counted."""
        is_empty = not any(shard.group_refs for shard in shards)
        self.report.count("num_empty_batches", int(is_empty))
        if is_empty:
            return False
        steps = self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
        results = update_learners(
            self.learner_group,
            shards,
            {NUM_ENV_STEPS_SAMPLED_LIFETIME: steps},
            self.config.num_epochs,
            self.config.update_timeout_s,
        )
        self.metrics.aggregate(results, key=LEARNER_RESULTS)
        return True

    def _look_back(self, groups: Sequence[GroupMeta], reused: Sequence[GroupMeta], now: int) -> None:
        """Tell the memory what only the learner knows (drift of groups, hidden states), and move the reference."""
        if reused:
            asked = [()] * max(1, self.config.num_learners)
            told = call_learners(self.learner_group, "reuse_report", asked, self.config.sync_timeout_s, "reporting")
            self.memory.look_back(reused, {name: row for one in told for name, row in one.items()}, now)
        if rate := self.reference_clock.rate_at(now, [r for group in groups for r in group.rewards_G]):
            rates = [(rate,)] * max(1, self.config.num_learners)
            call_learners(self.learner_group, "follow_policy", rates, self.config.sync_timeout_s, "moving a reference")
            self.report.count("num_reference_moves", 1)
        if self.config.replay_embedding == "policy":
            self.memory.embed(ask_learners(self.learner_group, "take_embeddings"), groups, now)

    def _sync_weights(self) -> None:
        self.version += 1
        gap, lost = self.weight_sync.sync(self.version)
        self._restore_runners(lost)
        self.report.sync(gap, self.version, self.weight_sync.seconds)

    @contextmanager
    def _engines_at_rest(self) -> Iterator[None]:
        """With `colocate`, put the engines to sleep while the learners use their card, and the other way round."""
        if not self.config.colocate:
            yield
            return
        timeout_s, no_arguments = self.config.sync_timeout_s, [()] * max(1, self.config.num_learners)
        everyone: dict[int, dict] = {runner_id: {} for runner_id in self.runners.ids}
        self.runners.all("rest", everyone, timeout_s, "going to sleep")
        call_learners(self.learner_group, "take_room", no_arguments, timeout_s, "taking the card")
        try:
            yield
            call_learners(self.learner_group, "make_room", no_arguments, timeout_s, "making room on the card")
        finally:
            self.runners.all("rise", everyone, timeout_s, "waking up")

    # --- evaluation, resources, end ---------------------------------------------------------------

    def rate(self, ratings: Mapping[str, float]) -> int:
        """Grade items of the memory by people's ratings, between iterations; return how many were graded.

        Args:
            ratings: key of a prompt (`scripts/buffer.py ls` shows it) -> rating, on the scale `replay_rating_scale`.

        Raises:
            ValueError: a rating outside its scale, or there is no memory; nothing was graded.
        """
        return self.memory.rate(ratings, self.iteration)

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """Play held-out prompts greedily, and k times for pass@k, on the training engines; see `evaluation.py`."""
        return evaluate(self)

    @classmethod
    def default_resource_request(cls, config: Any) -> Any:
        """Say what one Tune trial needs, and refuse at once what the cluster cannot hold."""
        request = super().default_resource_request(config)
        settings = cls.get_default_config().update_from_dict(config if isinstance(config, dict) else config.to_dict())
        check_cluster_holds(request, settings)
        return request

    @classmethod
    def _should_create_evaluation_env_runners(cls, eval_config: Any) -> bool:
        return False  # the training engines evaluate; a second engine would take their memory

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """Do nothing: `play` and `sync` notice a dead runner themselves and restore it with verified weights."""
        return []

    def cleanup(self) -> None:
        """End runners and learners."""
        if hasattr(self, "memory"):
            self.memory.stop()
        if hasattr(self, "report"):
            self.report.close()
        super().cleanup()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with self.metrics.log_time((TIMERS, name), reduce="mean", window=1):
            yield


def _deal(pending: Sequence[tuple[str, Prompt]], runner_ids: Sequence[int]) -> dict[int, list[tuple[str, Prompt]]]:
    """Split prompts evenly over runners; runners without any are left out."""
    shares = {runner_id: list(pending[at :: len(runner_ids)]) for at, runner_id in enumerate(runner_ids)}
    return {runner_id: share for runner_id, share in shares.items() if share}


def _slot(group_id: str) -> int:
    return int(group_id.rsplit(".", 1)[1])
