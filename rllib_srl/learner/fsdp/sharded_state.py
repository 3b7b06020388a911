"""Save and load weights and optimiser state of FSDP2 learners by torch's distributed checkpoint, without a pickle.

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

from rllib_srl.learner.fsdp.sharding import is_spread
from rllib_srl.storage.checkpoints import CheckpointError

# torch.distributed.checkpoint takes a second to load, so the functions that need it import it.

INDEX = "index.json"
SHARDS = "learner_shards"  # in a checkpoint
Parameters = Mapping[str, torch.nn.Parameter]
Optimizers = Mapping[str, torch.optim.Optimizer]


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
