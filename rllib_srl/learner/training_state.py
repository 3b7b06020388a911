"""Gather, save, load and move the state that training changes: trained weights and the state of their optimiser.

    get_state     RLlib calls it on one learner only; with FSDP2 all learners `gather` first
    checkpoint    with FSDP2 each learner writes its part (`save_shards`) and `get_state` leaves it out
    restore       `load_shards` reads this learner's part, or whole tensors without FSDP2

Shards are written by torch's distributed checkpoint, without a pickle:

    learner_shards/shard-00001-....safetensors    learner 0's part of every tensor
                   shard-00002-....safetensors    learner 1's part
                   index.json                     number of shards; shapes and dtypes of the whole tensors; of each
                                                  optimiser its class, settings of parameter groups, scalars (steps)

    weights/<parameter>                           a parameter
    optimizers/<optimizer>/<parameter>/<kind>     a state tensor with the parameter's shape, such as exp_avg

Only learner groups with FSDP2 write this format, because there no learner holds whole tensors. Any number of learners,
with or without FSDP2, reads it bit for bit; each reads the parts that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.torch_utils import convert_to_torch_tensor

from rllib_srl.learner.rl_module import CausalLMModule
from rllib_srl.learner.sharding import is_spread, sharded_optimizer_state, whole_optimizer_state
from rllib_srl.storage.checkpoints import CheckpointError

# torch.distributed.checkpoint takes a second to load, so the functions that need it import it.

INDEX = "index.json"
SHARDS = "learner_shards"  # in a checkpoint
Parameters = Mapping[str, torch.nn.Parameter]
Optimizers = Mapping[str, torch.optim.Optimizer]


class TrainingState:
    """Weights and optimiser state of a learner.

    Invariant: what was gathered is dropped by the next update (`forget_gathered`), so it is never older than the
    weights.
    """

    def __init__(
        self,
        policy: CausalLMModule,
        optimizers: Mapping[str, torch.optim.Optimizer],
        device: torch.device,
        is_sharded: bool,
        is_first: bool,
    ) -> None:
        """Set the policy and its optimisers by name.

        Args:
            policy: module in training.
            optimizers: its optimisers; the same objects for the whole life of the learner.
            device: device of the policy.
            is_sharded: whether FSDP2 shards the weights.
            is_first: whether RLlib calls `get_state` on this learner.
        """
        self._policy, self._optimizers, self._device = policy, optimizers, device
        self._is_sharded, self._is_first = is_sharded, is_first
        self._gathered: dict[str, Any] | None = None  # whole optimiser states

    def gather(self) -> None:
        """Gather weights and optimiser state for `get_state`; a collective."""
        if not self._is_sharded:
            return
        self._policy.gather(self._is_first)
        states = {name: one.state_dict() for name, one in self._optimizers.items()}
        self._gathered = {name: whole_optimizer_state(state, self._is_first) for name, state in states.items()}

    def leave_to_shards(self) -> None:
        """Exclude weights and optimiser from `get_state`, because `save_shards` writes them."""
        self._policy.leave_to_shards()
        self._gathered = {}

    def forget_gathered(self) -> None:
        """Drop what `gather` and `leave_to_shards` prepared."""
        self._policy.gathered = self._gathered = None

    def save_shards(self, directory: Path) -> None:
        """Write this learner's rows of weights and optimiser; with FSDP2 only, and on every learner."""
        self.forget_gathered()
        save_sharded(directory, dict(self._policy.saved_parameters()), self._optimizers)

    def load_shards(self, directory: Path, weights_only: bool) -> None:
        """Load this learner's rows from the shards, or whole tensors without FSDP2.

        Args:
            directory: written by `save_shards` on any number of learners.
            weights_only: keep the optimiser state.

        Raises:
            CheckpointError: a shard is missing or cannot be read.
            ValueError: the shards belong to another model or optimiser.
        """
        optimizers = {} if weights_only else self._optimizers
        load_sharded(directory, dict(self._policy.saved_parameters()), optimizers)
        self._policy.awaits_shards = False

    def gathered_optimizers(self) -> dict[str, Any]:
        """Return the gathered optimiser state in RLlib's form.

        Raises:
            RuntimeError: `gather` was not called.
        """
        if self._gathered is None:
            raise RuntimeError("the optimiser is spread over learners; call gather on all of them first")
        return {
            name: {"module_id": DEFAULT_MODULE_ID, "state": convert_to_numpy(state)}
            for name, state in self._gathered.items()
        }

    def set_gathered_optimizers(self, state: Mapping[str, Any]) -> None:
        """Load this learner's rows of what `gathered_optimizers` returned; {} leaves them to `load_shards`."""
        if not state:
            return
        for name, optimizer in self._optimizers.items():
            given = state[name]["state"]
            entries = convert_to_torch_tensor(given["state"], device=self._device)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(sharded_optimizer_state({**given, "state": entries}, parameters))

    def move_optimizers(self, device: torch.device | str) -> None:
        """Move the tensors of the optimiser state to a device."""
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():  # step counts stay where the optimiser put them
                        state[name] = value.to(device)


def save_sharded(directory: Path, parameters: Parameters, optimizers: Optimizers) -> None:
    """Write this learner's part of every tensor; learner 0 also writes the index. Call it on every learner.

    Args:
        directory: shared by all learners; created if missing.
        parameters: trained parameters by name.
        optimizers: optimisers of these parameters by name.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = dict(_tensors(parameters, optimizers))
    directory.mkdir(parents=True, exist_ok=True)
    save(tensors, storage_writer=HuggingFaceStorageWriter(str(directory), save_distributed=True))
    if torch.distributed.get_rank() == 0:
        index = {
            "num_shards": torch.distributed.get_world_size(),
            "tensors": {name: [list(one.shape), str(one.dtype)] for name, one in tensors.items()},
            "optimizers": {name: _values(parameters, optimizer) for name, optimizer in optimizers.items()},
        }
        scratch = directory / f"{INDEX}.tmp"
        scratch.write_text(json.dumps(index, indent=1, sort_keys=True, allow_nan=False))
        scratch.replace(directory / INDEX)


def read_index(directory: Path) -> dict[str, Any]:
    """Return the index of a directory that `save_sharded` wrote.

    Raises:
        CheckpointError: it cannot be read, or a shard is missing.
    """
    try:
        index: dict[str, Any] = json.loads((directory / INDEX).read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{directory / INDEX} cannot be read ({error}); use another checkpoint") from error
    if (num := len([*directory.glob("*.safetensors")])) != index["num_shards"]:
        raise CheckpointError(
            f"{directory} has {num} of {index['num_shards']} shards; expected all of them: learners on several "
            "machines need a directory that all of them share"
        )
    return index


def load_sharded(directory: Path, parameters: Parameters, optimizers: Optimizers) -> None:
    """Load this learner's part of every tensor, which is the whole without FSDP2.

    Args:
        directory: written by `save_sharded` on any number of learners.
        parameters: as for `save_sharded`.
        optimizers: as for `save_sharded`.

    Raises:
        CheckpointError: a shard is missing or cannot be read.
        ValueError: the shards belong to another model or optimiser; nothing was changed.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    index = read_index(directory)
    if faults := [*_optimizer_faults(index, optimizers), *_model_faults(index, parameters)]:
        raise ValueError("the shards do not fit this learner: " + "; ".join(faults[:8]))
    targets: dict[str, torch.Tensor] = {f"weights/{name}": one.detach() for name, one in parameters.items()}
    states = {key: _empty_states(index, key, parameters) for key in optimizers}
    for key, of_parameters in states.items():
        for name, state in of_parameters.items():
            targets |= {f"optimizers/{key}/{name}/{kind}": one for kind, one in state.items()}
    is_sharded = any(is_spread(one) for one in parameters.values())
    try:
        load(targets, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=not is_sharded)
    except CheckpointException as error:
        cause = next((one for one, _ in error.failures.values()), error)
        raise CheckpointError(f"a shard in {directory} cannot be read ({cause}); use another checkpoint") from error
    for key, optimizer in optimizers.items():
        _load_optimizer(index["optimizers"][key], states[key], optimizer, parameters)


def _tensors(parameters: Parameters, optimizers: Optimizers) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters.items():
        yield f"weights/{name}", parameter.detach()
    for key, optimizer in optimizers.items():
        for name, parameter in parameters.items():
            for kind, value in optimizer.state.get(parameter, {}).items():
                if _has_parts(value):
                    yield f"optimizers/{key}/{name}/{kind}", value


def _has_parts(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _values(parameters: Parameters, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    numbers = {
        name: {
            kind: value.item() if isinstance(value, torch.Tensor) else value
            for kind, value in optimizer.state.get(parameter, {}).items()
            if not _has_parts(value)
        }
        for name, parameter in parameters.items()
    }
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def _empty_states(index: Mapping[str, Any], key: str, parameters: Parameters) -> dict[str, dict[str, torch.Tensor]]:
    """Return for each parameter the state tensors to load into, by kind, sharded as the parameter is."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in parameters.items():
        prefix = f"optimizers/{key}/{name}/"
        dtypes = {full: dtype for full, (_, dtype) in index["tensors"].items() if full.startswith(prefix)}
        states[name] = {
            full.removeprefix(prefix): torch.empty_like(
                parameter.detach(), dtype=getattr(torch, dtype.removeprefix("torch."))
            )
            for full, dtype in dtypes.items()
        }
    return states


def _model_faults(index: Mapping[str, Any], parameters: Parameters) -> Iterator[str]:
    prefix = "weights/"
    tensors = index["tensors"].items()
    saved = {name.removeprefix(prefix): tuple(shape) for name, (shape, _) in tensors if name.startswith(prefix)}
    for name in sorted(set(saved) ^ set(parameters)):
        yield f"{name}: {'unknown' if name in saved else 'missing'}"
    for name in sorted(set(saved) & set(parameters)):
        if saved[name] != tuple(parameters[name].shape):
            yield f"{name}: shape {saved[name]}; expected {tuple(parameters[name].shape)}"


def _optimizer_faults(index: Mapping[str, Any], optimizers: Optimizers) -> Iterator[str]:
    for name, optimizer in optimizers.items():
        saved = index["optimizers"].get(name, {}).get("class")
        if saved != type(optimizer).__name__:
            yield f"{name}: state of {saved}; expected {type(optimizer).__name__}, choose optimizer_name as it was"


def _load_optimizer(
    saved: Mapping[str, Any],
    states: Mapping[str, dict[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
) -> None:
    names = {parameter: name for name, parameter in parameters.items()}
    entries: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        numbers = saved["numbers"][names[parameter]].items()
        plain = {kind: torch.tensor(value) if isinstance(value, float) else value for kind, value in numbers}
        if entry := {**states[names[parameter]], **plain}:
            entries[index] = entry
    groups = [
        {**mine, **{name: _typed(value, mine.get(name)) for name, value in theirs.items()}}
        for mine, theirs in zip(optimizer.state_dict()["param_groups"], saved["groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _typed(value: Any, like: Any) -> Any:
    return tuple(value) if isinstance(like, tuple) else value  # JSON has no tuples
