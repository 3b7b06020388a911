"""Save and load weights and optimiser state through `sharded_files`, bit for bit, on any number of learners.

    weights/<parameter>                          rows of the parameter
    optimizers/<optimizer>/<parameter>/<kind>    rows of a state tensor with the parameter's shape, such as exp_avg
    values[<optimizer>]                          class, settings of its parameter groups, scalars such as step counts

Only learner groups with FSDP2 write this format, because there no learner holds whole tensors. Every learner group,
with or without FSDP2, can read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rllib_srl.learner.fsdp.sharded_files import ShardedFiles, write_index, write_shard
from rllib_srl.learner.fsdp.sharding import local, of_rows, own_rows, rows_of_learner

Parameters = Mapping[str, torch.nn.Parameter]
Optimizers = Mapping[str, torch.optim.Optimizer]


def save_sharded(directory: Path, parameters: Parameters, optimizers: Optimizers) -> None:
    """Write this learner's rows; learner 0 also writes the index. Call it on every learner.

    Args:
        directory: shared by all learners.
        parameters: trained parameters by name.
        optimizers: optimisers of these parameters by name.
    """
    tensors = dict(_tensors(parameters, optimizers))
    rank = torch.distributed.get_rank()
    write_shard(directory, rank, {name: rows_of_learner(tensor) for name, tensor in tensors.items()})
    if rank == 0:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        values = {name: _values(parameters, optimizer) for name, optimizer in optimizers.items()}
        write_index(directory, torch.distributed.get_world_size(), shapes, values)


def load_sharded(directory: Path, parameters: Parameters, optimizers: Optimizers) -> None:
    """Load this learner's rows, or whole tensors if the learner is not sharded.

    Args:
        directory: written by `save_sharded` on any number of learners.
        parameters: as for `save_sharded`.
        optimizers: as for `save_sharded`.

    Raises:
        CheckpointError: a shard is missing or cannot be read.
        ValueError: the shards belong to another model or optimiser; nothing was changed.
    """
    files = ShardedFiles(directory)
    if faults := [*_optimizer_faults(files, optimizers), *_model_faults(files, parameters)]:
        raise ValueError("the shards do not fit this learner: " + "; ".join(faults[:8]))
    with torch.no_grad():
        for name, parameter in parameters.items():
            local(parameter).copy_(local(of_rows(parameter, files.rows(f"weights/{name}", *own_rows(parameter)))))
    for name, optimizer in optimizers.items():
        _load_optimizer(files, name, optimizer, parameters)


def _tensors(parameters: Parameters, optimizers: Optimizers) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters.items():
        yield f"weights/{name}", parameter.detach()
    for key, optimizer in optimizers.items():
        for name, parameter in parameters.items():
            for kind, value in optimizer.state.get(parameter, {}).items():
                if _has_rows(value):
                    yield f"optimizers/{key}/{name}/{kind}", value


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _values(parameters: Parameters, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    numbers = {
        name: {
            kind: value.item() if isinstance(value, torch.Tensor) else value
            for kind, value in optimizer.state.get(parameter, {}).items()
            if not _has_rows(value)
        }
        for name, parameter in parameters.items()
    }
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def _model_faults(files: ShardedFiles, parameters: Parameters) -> Iterator[str]:
    prefix = "weights/"
    saved = {name.removeprefix(prefix): shape for name, shape in files.shapes.items() if name.startswith(prefix)}
    for name in sorted(set(saved) ^ set(parameters)):
        yield f"{name}: {'unknown' if name in saved else 'missing'}"
    for name in sorted(set(saved) & set(parameters)):
        if saved[name] != tuple(parameters[name].shape):
            yield f"{name}: shape {saved[name]}; expected {tuple(parameters[name].shape)}"


def _optimizer_faults(files: ShardedFiles, optimizers: Optimizers) -> Iterator[str]:
    for name, optimizer in optimizers.items():
        saved = files.values.get(name, {}).get("class")
        if saved != type(optimizer).__name__:
            yield f"{name}: state of {saved}; expected {type(optimizer).__name__}, choose optimizer_name as it was"


def _load_optimizer(files: ShardedFiles, key: str, optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
    names = {parameter: name for name, parameter in parameters.items()}
    own, saved = optimizer.state_dict(), files.values[key]
    entries: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        prefix = f"optimizers/{key}/{names[parameter]}/"
        entry: dict[str, Any] = {
            name.removeprefix(prefix): of_rows(parameter, files.rows(name, *own_rows(parameter)))
            for name in files.shapes
            if name.startswith(prefix)
        }
        numbers = saved["numbers"][names[parameter]]
        entry |= {kind: torch.tensor(value) if isinstance(value, float) else value for kind, value in numbers.items()}
        if entry:
            entries[index] = entry
    groups = [
        {**mine, **{name: _typed(value, mine.get(name)) for name, value in theirs.items()}}
        for mine, theirs in zip(own["param_groups"], saved["groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _typed(value: Any, like: Any) -> Any:
    return tuple(value) if isinstance(like, tuple) else value  # JSON has no tuples
