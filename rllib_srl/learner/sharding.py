"""Shard models over learners with FSDP2: each learner holds a part of every weight, gradient and optimiser state.

    build       `shard` wraps each decoder layer, then the root; a forward pass gathers weights layer by layer, in
                fp32 or, with `gather_dtype`, in bfloat16
    backward    torch averages gradients over learners (reduce-scatter); `summed_shards` turns means into sums
    passes      a pass gathers weights from all learners, so all run equally many; the learner adds empty ones
    to engines  every learner is called and gathers (`whole`); learner 0 packs
    checkpoint  each learner writes its part (`learner.py`); any number of learners can restore them
    get_state   all learners gather first (`whole_optimizer_state`), so RLlib gets whole tensors

Sources: Zhao et al. 2023 (PyTorch FSDP), arXiv 2304.11277; torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# torch.distributed.tensor and .fsdp take 1.5 s to load, so the functions that need them import them.


def shard(
    module: torch.nn.Module,
    model: Any,
    device: torch.device,
    gather_dtype: str = "float32",
    is_offloaded: bool = False,
) -> None:
    """Shard a module over all learners, in place.

    With `gather_dtype` "bfloat16" the matrices of decoder layers are rounded before they are sent, as autocast rounds
    them before each product, so that the results stay the same; their gradients are summed in fp32. The rest, which
    autocast computes in fp32, is gathered in fp32: norms, embedding and head.

    Args:
        module: the root module. Only its own forward pass gathers weights: never call the inner model directly.
        model: the Hugging Face model inside `module`.
        device: "cpu" or a GPU. The process group must be initialised.
        gather_dtype: "float32" or "bfloat16".
        is_offloaded: keep the shards in host memory; each is copied to the device when its layer is gathered.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if gather_dtype == "bfloat16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    home = CPUOffloadPolicy(pin_memory=device.type == "cuda") if is_offloaded else OffloadPolicy()
    for layer in decoder_layers(model):
        if gather_dtype == "bfloat16":
            fully_shard(norms_of(layer), mesh=mesh, offload_policy=home)
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=home)
    fully_shard(module, mesh=mesh, offload_policy=home)


def decoder_layers(model: Any) -> torch.nn.ModuleList:
    """Return the decoder layers of a Hugging Face model, whatever it calls them.

    Raises:
        ValueError: the model has no list of as many modules as its config has layers.
    """
    number = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    found = next((layers for layers in lists if len(layers) == number), None)
    if found is None:
        raise ValueError(
            f"model {model.config.name_or_path!r}: its decoder layers were not found; expected a ModuleList of "
            f"num_hidden_layers = {number} in {type(model).__name__}, for fsdp, replay_retain, or a reference or "
            "teacher in bfloat16"
        )
    return found


def norms_of(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of a layer whose own weights are all vectors."""
    pairs = ((module, list(module.parameters(recurse=False))) for module in layer.modules())
    return [module for module, weights in pairs if weights and all(weight.ndim == 1 for weight in weights)]


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether the weights are sharded over learners."""
    return is_spread(next(model.parameters()))


def is_spread(tensor: torch.Tensor) -> TypeIs[DTensor]:
    """Return whether a tensor is a DTensor; a sharded parameter is of class DTensor, not `Parameter`."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(named_tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor gathered to its whole; a collective, so every learner must iterate to the end."""
    for name, tensor in named_tensors:
        yield name, _gathered(tensor)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if is_spread(tensor) else tensor


def summed_shards(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums over learners of gradients that torch has averaged; they stay sharded."""
    return [gradient * gradient.device_mesh.size() for gradient in gradients if is_spread(gradient)]


def norm_of_shards(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the global L2 norm of all gradients over all learners; a collective."""
    parts = [torch.linalg.vector_norm(local(gradient)).square() for gradient in gradients]
    total = torch.stack(parts).sum()
    torch.distributed.all_reduce(total)
    length: torch.Tensor = total.sqrt()
    return length


def clipped_shards(gradients: Mapping[Any, torch.Tensor], norm: float, limit: float | None) -> dict[Any, torch.Tensor]:
    """Return the gradients scaled down from their global norm to at most `limit`; None: no limit."""
    if limit is None:
        return dict(gradients)
    factor = min(1.0, limit / (norm + 1e-6))
    return {ref: gradient * factor for ref, gradient in gradients.items()}


def most(number: int, device: torch.device) -> int:
    """Return the maximum of `number` over learners; a collective."""
    maximum = torch.tensor([number], device=device)
    torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX)
    return int(maximum)


def assign(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set a parameter from a whole tensor; each learner keeps its own shard."""
    with torch.no_grad():
        parameter.copy_(_like(parameter, value.to(parameter.device)))


def whole_optimizer_state(state: Mapping[str, Any], keeps: bool = True) -> dict[str, Any]:
    """Return an optimiser's `state_dict()` with its tensors gathered, in host memory; a collective.

    Without `keeps` this learner only takes part in gathering, and its entries are empty.
    """
    entries: dict[Any, dict[str, Any]] = {}
    for index, entry in state["state"].items():
        entries[index] = {}
        for name, value in whole(iter(entry.items())):
            if keeps:
                entries[index][name] = value.cpu() if isinstance(value, torch.Tensor) else value
    return {**state, "state": entries}


def sharded_optimizer_state(
    entries: Mapping[Any, Mapping[str, Any]], parameters: Sequence[torch.nn.Parameter]
) -> dict[int, dict[str, Any]]:
    """Return this learner's shard of an optimiser's whole entries; the parameters are in the optimiser's order."""
    sharded = {}
    for index, entry in entries.items():
        tensor = parameters[int(index)]
        sharded[int(index)] = {
            name: _like(tensor, value) if isinstance(value, torch.Tensor) and value.shape == tensor.shape else value
            for name, value in entry.items()
        }
    return sharded


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not is_spread(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this learner's part of a tensor (all of it if it is not sharded): shared memory, no gradient."""
    detached = tensor.detach()
    return detached.to_local() if is_spread(detached) else detached


def of_local(parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the sharding of `parameter`, built from this learner's part of it."""
    rows = rows.to(local(parameter).device)
    if not is_spread(parameter):
        return rows
    from torch.distributed.tensor import DTensor

    whole_shape, strides = parameter.shape, parameter.stride()
    return DTensor.from_local(
        rows, parameter.device_mesh, parameter.placements, run_check=False, shape=whole_shape, stride=strides
    )
