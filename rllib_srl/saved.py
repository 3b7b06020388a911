"""How SRL is saved and restored: RLlib's own files, ours beside them, sealed together.

    checkpoint/   algorithm state (with ours under "srl"), learner_group/, memory/shard_0.sqlite, manifest.json
                  with `fsdp` also learner_shards/: weights and optimiser, by each learner its part (`sharded_files`)

A restored run brings every engine to the restored weights, and its memory to the snapshot's journal position.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import COMPONENT_LEARNER_GROUP
from ray.tune.result import SHOULD_CHECKPOINT

from rllib_srl import checkpoints
from rllib_srl.comparison import Comparison
from rllib_srl.learners import call_learners, num_asked
from rllib_srl.planning import Planning
from rllib_srl.prompts import PromptSource
from rllib_srl.reference import ReferenceClock
from rllib_srl.replay.client import Memory
from rllib_srl.replay.no_memory import NoMemory
from rllib_srl.report import Report
from rllib_srl.sharded_files import SHARDS, ShardedFiles
from rllib_srl.weight_sync import WeightSync

SNAPSHOTS = "memory"  # in a checkpoint


class SavedAlgorithm(Algorithm):
    """An algorithm that trains language models, as far as saving and restoring goes.

    Invariant: what `restore_from_path` or `set_state` took continues as if it had never stopped.
    """

    source: PromptSource
    memory: Memory | NoMemory
    comparison: Comparison
    reference_clock: ReferenceClock
    planning: Planning
    report: Report
    weight_sync: WeightSync
    version: int
    seed: int
    _is_saving = False

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
        """Return RLlib's state and ours: version, seed, where the prompt stream stands, and the memory's snapshot."""
        own = {"version": self.version, "seed": self.seed, "prompts": self.source.get_state()}
        own["memory"], own["comparison"] = self.memory.get_state(), self.comparison.get_state()
        own["reference_clock"] = self.reference_clock.get_state()
        own["planning"] = self.planning.get_state()
        if not self._is_saving:  # a checkpoint brings its own snapshot
            self._gather_learners()
            own["snapshot"] = str(Path(self.logdir) / "replay" / f"state_{uuid.uuid4().hex[:12]}")
            self.memory.snapshot(Path(own["snapshot"]))
        return {**super().get_state(*args, **kwargs), "srl": own}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take a state and, if weights are in it, bring every engine to them.

        Raises:
            ValueError: the state is of other worlds or of another number of shards; nothing was changed.
        """
        if "srl" in state:
            self.source.check_worlds(state["srl"]["prompts"]["drawn"])
            self.memory.check_fits(state["srl"]["memory"]["num_shards"])
        super().set_state(state)
        if "srl" in state:
            self.version, self.seed = state["srl"]["version"], state["srl"]["seed"]
            self.source.set_state(state["srl"]["prompts"])
            self.memory.set_state(state["srl"]["memory"])
            self.comparison.set_state(state["srl"]["comparison"])
            self.reference_clock.set_state(state["srl"]["reference_clock"])
            self.planning.set_state(state["srl"]["planning"])
            if "snapshot" in state["srl"]:
                self._restore_memory(Path(state["srl"]["snapshot"]))
        if COMPONENT_LEARNER_GROUP in state:
            self._restore_runners(self.weight_sync.sync(self.version)[1])

    def save_to_path(self, path: Any = None, **kwargs: Any) -> str:
        """Write a checkpoint, the memory's snapshot in it, and seal it."""
        self._is_saving = True
        if self.config.fsdp:
            self._ask_all("leave_to_shards", (), "preparing a checkpoint")
        try:
            saved = super().save_to_path(path, **kwargs)
        finally:
            self._is_saving = False
        if self.config.fsdp:
            shards = Path(saved).absolute() / SHARDS
            self._ask_all("save_shards", (str(shards),), "writing shards")
            ShardedFiles(shards)  # or a learner wrote where this process cannot see it
        self.memory.snapshot(Path(saved) / SNAPSHOTS)
        about = {"worlds": self.source.world_ids, "version": self.version, "memory_shards": self.memory.num_shards}
        about["has_learner_shards"] = self.config.fsdp
        checkpoints.seal(Path(saved), about)
        return saved

    def _gather_learners(self) -> None:
        """With `fsdp` let all learners gather what RLlib then asks one of them for."""
        if self.config.fsdp:
            self._ask_all("gather", (), "gathering weights")

    def _ask_all(self, method: str, arguments: tuple, what: str) -> None:
        everyone = [arguments] * max(1, self.config.num_learners)
        call_learners(self.learner_group, method, everyone, self.config.sync_timeout_s, what)

    def _restore_memory(self, directory: Path) -> None:
        self.report.count("num_orphan_groups", self.memory.restore(directory))

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
            about = checkpoints.verify_sealed(Path(path))
            self.source.check_worlds(about["worlds"])
            self.memory.check_fits(about["memory_shards"])
        super().restore_from_path(path, *args, component=component, **kwargs)
        if component is None:
            if about.get("has_learner_shards"):
                self._ask_all("load_shards", (str(Path(path).absolute() / SHARDS),), "reading shards")
            self._restore_memory(Path(path) / SNAPSHOTS)
        self._restore_runners(self.weight_sync.sync(self.version)[1])

    @classmethod
    def from_checkpoint(cls, path: Any, *args: Any, **kwargs: Any) -> SavedAlgorithm:
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
        arguments = [(str(target),)] * num_asked(self.learner_group)
        call_learners(self.learner_group, "export", arguments, self.config.sync_timeout_s, "exporting")
        return target
