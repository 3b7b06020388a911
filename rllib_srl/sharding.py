"""FSDP2 inside the learners: each holds a part of every weight, gradient and optimiser state.

    build       `shard`: decoder layers one by one, then the rest; weights are gathered layer by layer in a pass
    backward    torch averages gradients over learners as it scatters them; `summed_shards` makes them sums again
    passes      every learner runs equally many, for each gathers weights from all: short ones run `empty` passes
    to engines  all learners are asked; each gathers (`whole`), the first one packs
    checkpoint  each learner writes its rows (`sharded_state`); any number of learners restores them
    get_state   all learners gather first (`whole_optimizer_state`); what RLlib gets is whole

Sources: Zhao et al. 2023 (PyTorch FSDP), arXiv 2304.11277; torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(module: torch.nn.Module, model: Any, device: torch.device) -> None:
    """Shard a module over all learners, in place.

    Args:
        module: the root, whose forward pass gathers weights: call it, never the model inside.
        model: the Hugging Face model in it.
        device: "cpu" or a GPU; the process group must be there.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether weights are spread over learners."""
    return isinstance(next(model.parameters()), DTensor)


def whole(named_tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather each tensor; every learner must iterate to the end."""
    for name, tensor in named_tensors:
        yield name, tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def summed_shards(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return sums over learners of gradients that torch has averaged, each still in its shards."""
    num_learners = torch.distributed.get_world_size()
    return [gradient * num_learners for gradient in gradients]


def norm_of_shards(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of all gradients taken as one vector, over all learners."""
    parts = [torch.linalg.vector_norm(local(gradient)) for gradient in gradients]
    total = torch.linalg.vector_norm(torch.stack(parts)).square()
    torch.distributed.all_reduce(total)
    return total.sqrt()


def most(number: int, device: torch.device) -> int:
    """Return the largest of the learners' numbers; every learner must join in."""
    found = torch.tensor([number], device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return int(found)


def assign(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set a parameter to a whole tensor; each learner keeps its own part."""
    with torch.no_grad():
        parameter.copy_(_like(parameter, value.to(parameter.device)))


def whole_optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Gather an optimiser's `state_dict()`; every learner must join in."""
    entries = {index: dict(whole(iter(entry.items()))) for index, entry in state["state"].items()}
    return {**state, "state": entries}


def sharded_optimizer_state(state: Mapping[str, Any], parameters: Sequence[torch.nn.Parameter]) -> dict[str, Any]:
    """Cut a whole optimiser state to this learner's parts.

    Args:
        state: as of `whole_optimizer_state`, of any number of learners.
        parameters: in the optimiser's order.
    """
    entries = {}
    for index, entry in state["state"].items():
        own = parameters[int(index)]
        entries[int(index)] = {
            name: _like(own, value) if isinstance(value, torch.Tensor) and value.shape == own.shape else value
            for name, value in entry.items()
        }
    return {**state, "state": entries}


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this learner's rows of a tensor, sharing its memory, without gradient; all where it is whole."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def own_rows(parameter: torch.Tensor) -> tuple[int, int]:
    """Return the first of the rows that this learner holds, and the one after the last.

    Raises:
        RuntimeError: torch did not cut along the rows as `torch.chunk` does.
    """
    num_rows, num_own = parameter.shape[0], len(local(parameter))
    if not isinstance(parameter, DTensor):
        return 0, num_rows
    size = -(-num_rows // parameter.device_mesh.size())
    start = min(parameter.device_mesh.get_local_rank() * size, num_rows)
    if not parameter.placements[0].is_shard(0) or num_own != min(size, num_rows - start):
        raise RuntimeError(f"{num_own} of {num_rows} rows here, {parameter.placements}; expected FSDP2's even rows")
    return start, start + num_own


def of_local(parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a tensor laid out as a parameter, given this learner's rows of it."""
    rows = rows.to(local(parameter).device)
    if not isinstance(parameter, DTensor):
        return rows
    whole_shape, strides = parameter.shape, parameter.stride()
    return DTensor.from_local(
        rows, parameter.device_mesh, parameter.placements, run_check=False, shape=whole_shape, stride=strides
    )
