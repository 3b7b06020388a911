"""Saves and restores SRL: RLlib's checkpoint files, SRL's own files, and one signed manifest that covers them all.

    checkpoint/   algorithm state (SRL's under "srl"), learner_group/, memory/snapshot.db, manifest.json
                  learner_group/learner/rl_module/default_policy/weights.safetensors

Restoring syncs the restored weights to every engine and resets the memory to the snapshot.
RLlib pickles its state, and loading a pickle can run code. `restore_from_path` and `from_checkpoint` therefore accept
only checkpoints sealed with this user's key; `restore_weights` reads arrays only and accepts any checkpoint.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import (
    COMPONENT_LEARNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_RL_MODULE,
    DEFAULT_MODULE_ID,
)
from ray.tune import Checkpoint
from ray.tune.result import SHOULD_CHECKPOINT

from rllib_srl.algorithm.config import NAME_CODE, SRLConfig
from rllib_srl.algorithm.metrics import Report
from rllib_srl.algorithm.resources import draining_nodes
from rllib_srl.common.callbacks import set_states, states_of
from rllib_srl.common.loading import functions_in
from rllib_srl.common.remote_calls import ProcessLost, cause_of, first_line
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.engine.adapters import add_adapters
from rllib_srl.engine.model_dir import vocabulary_digest
from rllib_srl.learner.group.learners import Learners
from rllib_srl.learner.model_setup import export
from rllib_srl.learner.rl_module import CausalLMModule
from rllib_srl.replay.client import ReplayClient
from rllib_srl.rollout.rollouts import Rollouts
from rllib_srl.storage import checkpoints
from rllib_srl.storage.disk import writing
from rllib_srl.storage.paths import MEMORY, STATE
from rllib_srl.storage.seal_key import make_key
from rllib_srl.storage.weight_file import WEIGHTS, read_weights
from rllib_srl.weights.sync import WeightSync

SNAPSHOTS = "memory"  # path within a checkpoint, as is `MODULE`
MODULE = Path(COMPONENT_LEARNER_GROUP, COMPONENT_LEARNER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID)
PARTIAL = ".partial"  # file in the directory of an export that is not whole
TUNES_PICKLE = "_dict_checkpoint.pkl"  # if present, Tune unpickles it before it calls `restore_from_path`


class SavedAlgorithm(Algorithm):
    """Base class of `SRL` with its checkpointing.

    Invariant: after `restore_from_path` or `set_state` a run continues as if it had never stopped.
    """

    source: PromptSource
    gradings: dict[str, str]  # `grading_digest` of each environment, of the code with which this process started
    memory: ReplayClient
    report: Report
    ratings: Any  # `people.rating_feed.RatingFeed`, once people have rated; else None
    learner_group: Any  # RLlib's
    learners: Learners
    weight_sync: WeightSync
    seed: int
    rollouts: Rollouts
    retention: Any  # `learner.group.retention.Retention`; None in a run without retention
    _newest: Path | None = None  # the checkpoint last written or restored
    _drained: frozenset[str] = frozenset()  # nodes whose drain notice led to a checkpoint
    _is_saving = False
    _is_stopped = False
    _is_due = False  # is a checkpoint due after the iteration?
    _regraded: Sequence[str] = ()  # environments whose grading differs from that of the restored checkpoint

    def lost(self, error: Exception) -> ProcessLost:
        """End the learners, which may wait forever in a collective for a lost one; return the error to raise."""
        self.learners.end()
        return ProcessLost(first_line(cause_of(error)), self._newest_checkpoint())

    def save_if_due(self) -> None:
        """Write the checkpoint that `note_due` found to be due, and remove old ones."""
        if self._is_due:
            place = checkpoints.place_for(Path(self.logdir), self.iteration)
            checkpoints.make_newest(place)
            self.save_to_path(place)
            checkpoints.prune(Path(self.logdir), self.config.checkpoints_kept)

    def _newest_checkpoint(self) -> str | None:
        written = [self._newest] if self._newest and (self._newest / checkpoints.MANIFEST).is_file() else []
        saved = written or checkpoints.checkpoints_in(Path(self.logdir))  # Tune moves the written checkpoint
        return str(saved[-1]) if saved else None

    def note_due(self, results: dict[str, Any]) -> None:
        """Decide whether a checkpoint is due after the iteration with these results, or request one from Tune.

        One is due every `checkpoint_every` iterations, and when Ray drains the node of a learner or of this process.
        """
        every = self.config.checkpoint_every
        is_due = bool(every) and (self._is_drain_noticed() or (self.iteration + 1) % every == 0)
        if is_due and self._storage is not None:
            results[SHOULD_CHECKPOINT] = True
        self._is_due = is_due and self._storage is None

    def _is_drain_noticed(self) -> bool:
        """Return whether Ray has newly begun to drain a node whose loss would cost iterations."""
        used_nodes = {*self.learners.nodes, ray.get_runtime_context().get_node_id()}
        new = (draining_nodes() & used_nodes) - self._drained
        self._drained |= new
        for node in sorted(new):
            self.report.warn(f"Ray drains node {node[:8]} of this run; writing a checkpoint")
        return bool(new)

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return RLlib's state and SRL's: prompt source, rollouts, memory and callbacks.

        The state names a copy of the memory in the log directory, which the next call replaces.
        """
        srl_state: dict[str, Any] = {"prompts": self.source.get_state(), "rollouts": self.rollouts.get_state()}
        srl_state["memory"], srl_state["vocabulary"] = self.memory.get_state(), self._vocabulary
        srl_state["callbacks"], srl_state["gradings"] = states_of(self), self.gradings
        if self.retention:
            srl_state["retention"] = self.retention.get_state()
        if self.config.fsdp:  # RLlib reads the full state from one learner
            self.learners.gather(self.config.sync_timeout_s)
        if not self._is_saving:  # `_save_to` writes the snapshot into the checkpoint
            srl_state["snapshot"] = self._copy_memory()
        return {**super().get_state(*args, **kwargs), "srl": srl_state}

    def _copy_memory(self) -> str:
        """Write a copy of the memory in place of that of the state before; return its directory."""
        earlier = list(Path(self.logdir, MEMORY).glob(f"{STATE}*"))
        place = Path(self.logdir, MEMORY, f"{STATE}{uuid.uuid4().hex[:12]}")
        self.memory.snapshot(place)
        for path in earlier:
            shutil.rmtree(path)
        return str(place)

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state and, if it contains weights, sync them to every engine.

        Raises:
            ValueError: the state has other environments, another tokenizer, or a memory where this run has none, or its
                copy of the memory is gone; nothing was changed.
        """
        if "srl" in state:
            srl_state = state["srl"]
            self._check_fits(srl_state["prompts"]["drawn"], bool(srl_state["memory"]), srl_state["vocabulary"])
            if self.memory.is_on and "snapshot" in srl_state and not Path(srl_state["snapshot"]).is_dir():
                raise ValueError(f"{srl_state['snapshot']} is gone; expected the newest state that get_state returned")
        super().set_state(state)
        if "srl" in state:
            self.rollouts.set_state(state["srl"]["rollouts"])
            self.seed = self.rollouts.seed
            self.source.set_state(state["srl"]["prompts"])
            self.memory.set_state(state["srl"]["memory"])
            set_states(self, state["srl"]["callbacks"])
            stored = state["srl"]["gradings"]
            self._regraded = [name for name, own in self.gradings.items() if stored.get(name, own) != own]
            if self.retention and "retention" in state["srl"]:  # a run without retention may be resumed with it
                self.retention.set_state(state["srl"]["retention"])
            if "snapshot" in state["srl"]:
                self._restore_memory(Path(state["srl"]["snapshot"]))
        if COMPONENT_LEARNER_GROUP in state:
            self._sync_restored()

    @cached_property
    def _vocabulary(self) -> str:
        return vocabulary_digest(self.config.model_dir())

    def _check_fits(self, envs: Iterable[str], has_memory: bool, vocabulary: str) -> None:
        """Check that environments, memory and tokenizer of a checkpoint fit this run; raise a ValueError if not."""
        self.source.check_envs(envs)
        self.memory.check_fits(has_memory)
        if vocabulary != self._vocabulary:
            raise ValueError(
                f"the tokenizer of {self.config.model_config['model']!r} differs from that of the checkpoint, whose "
                "memory holds token ids; expected the tokenizer with which the run began, or a new run"
            )

    def _sync_restored(self) -> None:
        """Send the restored weights to every engine.

        With `colocate` the restored optimiser state is offloaded first, as after an update.
        """
        if self.config.colocate:
            self.learners.offload(self.config.sync_timeout_s)
        with self.rollouts.at_rest():
            self.rollouts.restore(self.weight_sync.sync(self.rollouts.version)[1])

    def save_to_path(self, path: Any = None, **kwargs: Any) -> str:
        """Write a checkpoint with the memory's snapshot and seal it; a failed write is removed.

        Raises:
            SealKeyError: the seal key cannot be used; nothing was written.
            DiskFull: the disk is full; earlier checkpoints are unchanged.
        """
        key = make_key(self.config.seal_key_file)
        if path is None:
            return self._save_to(path, key, **kwargs)
        target = Path(path).absolute()  # RLlib takes a relative path for a URI
        with checkpoints.written_whole(target):
            saved = self._save_to(str(target), key, **kwargs)
        self._newest = Path(saved)
        return saved

    def _save_to(self, path: Any, key: bytes, **kwargs: Any) -> str:
        self.learners.check_alive(self.config.sync_timeout_s)  # RLlib does not report the death of a learner
        self._is_saving = True
        try:
            with self.learners.unreachable_reported("writing a checkpoint"):
                saved: str = super().save_to_path(path, **kwargs)
        finally:
            self._is_saving = False
        have_saved = self.learners.take_saved(self.config.sync_timeout_s)
        if "state" not in kwargs and not any(have_saved):
            raise RuntimeError(f"no learner wrote its state to checkpoint {saved}")
        self.memory.snapshot(Path(saved) / SNAPSHOTS)
        about = {"envs": self.source.env_ids, "version": self.rollouts.version, "has_memory": self.memory.is_on}
        about |= {"iteration": self.iteration, "vocabulary": self._vocabulary}
        about |= {"functions": functions_in({name: getattr(self.config, name) for name in NAME_CODE})}
        checkpoints.seal(Path(saved), about, key)
        return saved

    def _restore_memory(self, directory: Path) -> None:
        """Restore the memory; stored answers of environments whose grading has changed since are not held any more."""
        self.report.count("num_groups_undone", self.memory.restore(directory))
        num = self.memory.drop_answers(self._regraded, self.iteration) if self._regraded and self.memory.is_on else 0
        if num and self.retention:
            self.report.warn(
                f"{', '.join(self._regraded)}: config or code has changed since the checkpoint, so {num} stored "
                "answers may no longer be right and are not held; answers that are graded from now on take their place"
            )
        if self.ratings is not None:
            self.ratings.restart()

    def restore_from_path(
        self, path: Any, *args: Any, component: str | None = None, trust: bool = False, **kwargs: Any
    ) -> None:
        """Verify signature and files of a checkpoint, restore it, and sync its weights to every engine.

        Args:
            path: a checkpoint written by `save_to_path`, or, with `component`, the path of that part of it.
            args: passed to RLlib.
            component: RLlib's path of the part to restore, such as "learner_group/learner/rl_module"; None for all.
            trust: accept a checkpoint that another user sealed; its pickles can run any code.
            kwargs: passed to RLlib.

        Raises:
            CheckpointError: another user sealed it, or a file is missing, damaged or unlisted; nothing was changed.
            ValueError: the checkpoint has other environments or another tokenizer (nothing was changed), or another
                model.
        """
        path = Path(path).absolute()  # RLlib takes a relative path for a URI
        if component is None:
            about = _verified(path, self.config.seal_key_file, trust)
            self._check_fits(about["envs"], about["has_memory"], about["vocabulary"])
        elif not trust:
            checkpoints.verify_own(_whole(path, component), self.config.seal_key_file)
        super().restore_from_path(str(path), *args, component=component, **kwargs)
        if component is None:
            self._restore_memory(path / SNAPSHOTS)
        self._sync_restored()
        if component is None:
            self._newest = path

    def restore_weights(self, path: Any) -> None:
        """Load only the weights of a checkpoint and sync them to every engine; no pickle is opened.

        Any user's checkpoint is accepted. Optimiser, memory, environments and prompt source are not restored.

        Args:
            path: a checkpoint written by `save_to_path`.

        Raises:
            CheckpointError: a file is missing, damaged or unlisted; nothing was changed.
            ValueError: the weights belong to another model.
        """
        place = Path(path).absolute()
        about = checkpoints.verify_sealed(place)
        self.learners.take_weights(read_weights(place / MODULE / WEIGHTS), self.config.sync_timeout_s)
        self.rollouts.version, self._iteration = int(about.get("version", 0)), int(about.get("iteration", 0))
        self._sync_restored()

    def restore(self, checkpoint_path: Any) -> None:
        """Restore a checkpoint that Tune passes; see `restore_from_path`.

        Raises:
            CheckpointError: as there, or it contains a pickle that Tune would open before any check.
        """
        checkpoint = getattr(checkpoint_path, "checkpoint", checkpoint_path)
        checkpoint = Checkpoint.from_directory(checkpoint) if isinstance(checkpoint, str) else checkpoint
        if checkpoint.filesystem.get_file_info(f"{checkpoint.path}/{TUNES_PICKLE}").type.name != "NotFound":
            raise checkpoints.CheckpointError(
                f"checkpoint {checkpoint.path} contains {TUNES_PICKLE}, which SRL never writes; use another checkpoint"
            )
        super().restore(checkpoint_path)

    @classmethod
    def from_checkpoint(
        cls, path: Any, *args: Any, trust: bool = False, seal_key_file: str | Path | None = None, **kwargs: Any
    ) -> SavedAlgorithm:
        """Build an algorithm from a checkpoint.

        Args:
            path: a checkpoint written by `save_to_path`.
            args: passed to RLlib.
            trust: as in `restore_from_path`.
            seal_key_file: the setting of that name; the checkpoint's own settings cannot be read before the check.
            kwargs: passed to RLlib.

        Raises:
            CheckpointError: another user sealed it, or a file is missing, damaged or unlisted.
        """
        place = Path(path).absolute()  # RLlib takes a relative path for a URI
        _verified(place, seal_key_file, trust)
        # The seal was checked one line above.
        algo: SavedAlgorithm = super().from_checkpoint(str(place), *args, trust=True, **kwargs)
        return algo

    def check_export(self, directory: str | Path) -> None:
        """Check, before training, that this process will see what learner 0 exports.

        Raises:
            FileNotFoundError: learner 0 runs on another node, which does not share the directory.
        """
        target = Path(directory).absolute()
        is_new = not target.exists()
        target.mkdir(parents=True, exist_ok=True)
        token = target / f".shared-{uuid.uuid4().hex}"
        token.touch()
        try:
            is_seen = self.learners.first_sees(str(token), self.config.sync_timeout_s)
        finally:
            token.unlink(missing_ok=True)
        if is_new:
            target.rmdir()
        if not is_seen:
            raise FileNotFoundError(
                f"learner 0, which writes the exported model on its own node, cannot see {target}; expected a "
                "directory that all nodes share, or srl export from a checkpoint after the run"
            )

    def export_to_huggingface(self, directory: str | Path) -> Path:
        """Write model and tokenizer as a Hugging Face directory, fp32.

        Raises:
            FileExistsError: the directory exists and is not empty.
            FileNotFoundError: learner 0 wrote it on another node, whose directory this process does not share.
        """
        target = Path(directory).absolute()
        refuse_not_empty(target)
        with _exporting(target):
            self.learners.export(str(target), self.config.sync_timeout_s)
        if not has_model(target):
            raise FileNotFoundError(
                f"{target} has no model: learner 0 wrote it on its own node; expected a directory that all nodes share "
                "(srl export writes the model of a checkpoint on this node)"
            )
        return target


def export_checkpoint(path: str | Path, config: SRLConfig, directory: str | Path) -> dict[str, Any]:
    """Write the model of a checkpoint as a Hugging Face directory, fp32; no pickle is opened, and Ray does not start.

    Args:
        path: a checkpoint written by `save_to_path`, of any user.
        config: the run's model and `lora`; its other settings are not read.
        directory: new or empty.

    Returns:
        The `about` entry of the checkpoint's manifest.

    Raises:
        CheckpointError: a file of the checkpoint is missing, damaged or unlisted.
        FileExistsError: the directory is not empty.
        ValueError: the weights belong to another model.
    """
    target = Path(directory).absolute()
    refuse_not_empty(target)
    policy, about = policy_of(path, config)
    with _exporting(target):
        export(policy, str(target), is_first=True)
    return about


def policy_of(path: str | Path, config: SRLConfig) -> tuple[CausalLMModule, dict[str, Any]]:
    """Return the policy of a checkpoint and the `about` entry of its manifest; no pickle is opened, without Ray.

    Args:
        path: as in `export_checkpoint`.
        config: as in `export_checkpoint`.

    Raises:
        CheckpointError: a file of the checkpoint is missing, damaged or unlisted.
        ValueError: the weights belong to another model.
    """
    place = Path(path).absolute()
    about = checkpoints.verify_sealed(place)
    policy = CausalLMModule(model_config=config.model_config)
    if config.lora_rank:
        add_adapters(policy.model, config.adapter_spec(), seed=0)
    policy.set_state(read_weights(place / MODULE / WEIGHTS))
    return policy, about


def has_model(directory: Path) -> bool:
    """Return whether a directory has an exported model, whole."""
    return any(directory.glob("*.safetensors*")) and not (directory / PARTIAL).exists()


@contextmanager
def _exporting(target: Path) -> Iterator[None]:
    """Mark a directory while a model is exported to it: one that was cut off is written again."""
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        (target / PARTIAL).touch()
        yield
        (target / PARTIAL).unlink()


def refuse_not_empty(directory: Path) -> None:
    """Check that an export directory is new or empty, or has a part of an export that was cut off.

    Raises:
        FileExistsError: it has other files, or is a file.
    """
    if not directory.exists() or (directory / PARTIAL).exists():
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise FileExistsError(f"export directory {directory} is not empty; expected a new one")


def _verified(path: Path, key_file: str | Path | None, trust: bool) -> dict[str, Any]:
    """Verify a checkpoint before its pickles are opened; return the `about` entry of its manifest."""
    return checkpoints.verify_sealed(path) if trust else checkpoints.verify_own(path, key_file)


def _whole(path: Path, component: str) -> Path:
    """Return the checkpoint that contains a component's path; the path itself if it is not a component's."""
    parts = Path(component).parts
    return path.parents[len(parts) - 1] if path.parts[-len(parts) :] == parts else path
