"""SRL: GRPO for language models on RLlib, with a seam for the memory.

    training_step
      plan ──> prompts ──> LLMEnvRunner.play_groups ──> groups (metadata; tokens stay in the object store)
      advantages ──> shards, one a learner ──> update ──> verified weights back to every engine
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from pyarrow.fs import LocalFileSystem
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import COMPONENT_LEARNER_GROUP
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    TIMERS,
)
from ray.tune.result import SHOULD_CHECKPOINT

from rllib_srl import checkpoints
from rllib_srl.advantages import group_relative, has_signal
from rllib_srl.carriers import Direct, ObjectStore
from rllib_srl.config import SRLConfig
from rllib_srl.deadlines import ActorFailure, Failure
from rllib_srl.engine.canary import canary_sequences
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.env_runner import RunnerBatch
from rllib_srl.evaluation import evaluate
from rllib_srl.learners import call_learners, update_learners
from rllib_srl.models import local_model
from rllib_srl.placement import check_cluster_holds
from rllib_srl.prompts import PromptSource
from rllib_srl.report import Report
from rllib_srl.runners import Runners
from rllib_srl.shard import TrainingShard, build_shards
from rllib_srl.types import GroupMeta, Prompt
from rllib_srl.weight_sync import WeightSync

MAX_TRIES = 3  # of the same prompts, when the runner that plays them dies


class SRL(Algorithm):
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
        self.source = PromptSource(
            self.config.world_creators(), self.config.world_configs(), self.config.mixture_weights(), self.seed
        )
        self.runners = Runners(self.env_runner_group)
        self.runners.check_started(self.config.start_timeout_s)
        self.weight_sync = self._make_weight_sync(model_dir)
        self.weight_sync.start(self.version)
        self.report = Report(self.metrics, Path(self.logdir))

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
        """Play, compare, learn, sync."""
        with self._timed("plan"):
            prompts = self.source.draw(self.config.num_prompts_per_batch)
        with self._timed("rollout"):
            batches = list(self.play(prompts))  # an iterator of versioned batches: asynchrony changes this line only
        with self._timed("batch"):
            groups, advantages, shards = self._build(batches)
        with self._timed("learn"), self._engines_at_rest():
            is_updated = self._learn(shards)
        with self._timed("sync"):
            if is_updated:
                self._sync_weights()
        self.report.iteration(self.iteration + 1, batches, groups, advantages)

    # --- the five lines of training_step ---------------------------------------------------------

    def play(self, prompts: Sequence[Prompt], stream: str = "train", **arguments: Any) -> Iterator[RunnerBatch]:
        """Play prompts on all runners and yield what each played, as it arrives.

        A runner that dies or falls silent is restarted, gets the current weights, and its prompts are played again.

        Args:
            prompts: what to play.
            stream: names the random stream of sampling; "train", or evaluation's own.
            arguments: of `LLMEnvRunner.play_groups`, in place of training's.

        Raises:
            ActorFailure: the same prompts failed `MAX_TRIES` times, or a runner did not come back.
        """
        pending = [(f"{self.iteration + 1}.{slot}", prompt) for slot, prompt in enumerate(prompts)]
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

    def _build(self, batches: Sequence[RunnerBatch]) -> tuple[list[GroupMeta], list[np.ndarray], list[TrainingShard]]:
        groups = sorted((g for batch in batches for g in batch.groups), key=lambda g: _slot(g.group_id))
        rewards = self._rewards_with_kl(groups)
        advantages = group_relative(rewards, self.config.advantage)
        # By what was earned alone: a KL of rounding errors, divided by its own spread, would look like a signal.
        kept = [i for i, group in enumerate(groups) if has_signal(group.rewards_G)]
        shards = build_shards(
            [groups[i] for i in kept],
            [advantages[i] for i in kept],
            max(1, self.config.num_learners),
            self.config.sync_timeout_s,
        )
        return groups, advantages, shards

    def _rewards_with_kl(self, groups: Sequence[GroupMeta]) -> list[np.ndarray]:
        """Return the rewards, less kl_coeff times each episode's k1 where the KL belongs in the reward."""
        rewards = [group.rewards_G.astype(np.float64) for group in groups]
        if not self.config.kl_coeff or self.config.kl_estimator != "k1" or not groups:
            return rewards
        shards = build_shards(groups, rewards, max(1, self.config.num_learners), self.config.sync_timeout_s)
        arguments = [(shard,) for shard in shards]
        timeout_s = self.config.update_timeout_s
        answers = call_learners(self.learner_group, "episode_kl", arguments, timeout_s, "scoring the reference")
        refs = [id(ref) for shard in shards for ref in shard.group_refs]
        kl_of = dict(zip(refs, (np.array(kl) for answer in answers for kl in answer), strict=True))
        return [r - self.config.kl_coeff * kl_of[id(g.ref)] for g, r in zip(groups, rewards, strict=True)]

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

    # --- evaluation, checkpoints, export ----------------------------------------------------------

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """Play held-out prompts greedily, and k times for pass@k, on the training engines; see `evaluation.py`."""
        return evaluate(self)

    def step(self) -> dict[str, Any]:
        """Run one iteration, and write a checkpoint every `checkpoint_every`; under Tune, Tune writes and keeps it."""
        results = super().step()
        every = self.config.checkpoint_every
        if every and (self.iteration + 1) % every == 0:
            if self._storage is not None:
                results[SHOULD_CHECKPOINT] = True
                return results
            self._iteration += 1  # Trainable counts up after step(); the checkpoint must say what it holds
            self.save_to_path(checkpoints.place_for(Path(self.logdir), self._iteration))
            self._iteration -= 1
            checkpoints.prune(Path(self.logdir), self.config.checkpoints_kept)
        return results

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return RLlib's state and ours: version, seed, and where the prompt stream stands."""
        own = {"version": self.version, "seed": self.seed, "prompts": self.source.get_state()}
        return {**super().get_state(*args, **kwargs), "srl": own}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take a state and, if weights are in it, bring every engine to them.

        Raises:
            ValueError: the state is of other worlds; nothing was changed.
        """
        if "srl" in state:
            self.source.check_worlds(state["srl"]["prompts"]["drawn"])
        super().set_state(state)
        if "srl" in state:
            self.version, self.seed = state["srl"]["version"], state["srl"]["seed"]
            self.source.set_state(state["srl"]["prompts"])
        if COMPONENT_LEARNER_GROUP in state:
            self._restore_runners(self.weight_sync.sync(self.version)[1])

    def save_to_path(self, path: Any = None, **kwargs: Any) -> str:
        """Write a checkpoint and seal it."""
        saved = super().save_to_path(path, **kwargs)
        checkpoints.seal(Path(saved), {"worlds": self.source.world_ids, "version": self.version})
        return saved

    def restore_from_path(self, path: Any, *args: Any, component: str | None = None, **kwargs: Any) -> None:
        """Read a checkpoint, after checking that it is whole and fits, and bring every engine to its weights.

        Args:
            path: what `save_to_path` wrote, or with `component` that part of it.
            args: RLlib's.
            component: RLlib's path of the part to restore, such as "learner_group/learner/rl_module"; None for all.
            kwargs: RLlib's.

        Raises:
            CheckpointError: a file is missing or damaged; nothing was changed.
            ValueError: the checkpoint is of other worlds, in which case nothing was changed, or of another model.
        """
        if component is None:
            self.source.check_worlds(checkpoints.verify_sealed(Path(path))["worlds"])
        super().restore_from_path(path, *args, component=component, **kwargs)
        self._restore_runners(self.weight_sync.sync(self.version)[1])

    @classmethod
    def from_checkpoint(cls, path: Any, *args: Any, **kwargs: Any) -> SRL:
        """Build an algorithm from a checkpoint.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        checkpoints.verify_sealed(Path(path))
        return super().from_checkpoint(path, *args, **kwargs)

    def export_to_huggingface(self, directory: str | Path) -> Path:
        """Write model and tokenizer as a Hugging Face directory, fp32.

        Raises:
            FileExistsError: the directory exists and is not empty.
        """
        target = Path(directory).absolute()
        if target.exists() and any(target.iterdir()):
            raise FileExistsError(f"export directory {target} is not empty; expected a new one")
        call_learners(self.learner_group, "export", [(str(target),)], self.config.sync_timeout_s, "exporting")
        return target

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
