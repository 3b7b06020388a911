"""Split the matrices of a model over learners by attention heads, inner columns and vocabulary (tensor parallelism).

    mesh         data x tensor: learner i trains shard i // tensor, with part i % tensor of each matrix
    plan         the model's own (`base_model_tp_plan` of transformers), applied by torch's `parallelize_module`
    colwise      q, k, v, gate, up: rows of the weight, so that a learner has heads / tensor attention heads
    rowwise      o, down: columns of the weight; the products of all learners are summed
    tokens       token table and head: rows, by vocabulary; `split_token_scores` merges log-sum-exps over learners
    others       norms: whole on each learner, inside the plan with summed gradients (Qwen 3's q_norm and k_norm)

Hidden states between the matrices are whole, and equal on all learners that share a shard. Attention sees a learner's
own heads, so padding, tries and sliding windows work as on one learner.

Sources: Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053, section 3; torch.distributed.tensor.parallel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rllib_srl.learner.fsdp.sharding import is_spread
from rllib_srl.learner.scoring import Scale, row_scores, token_scores

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ParallelStyle

KINDS = ("gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")  # `model_type` of what a test compares
SUMMED = "replicated_with_grad_allreduce"  # transformers' name for a weight that each learner applies to its own heads
TOKENS = "embedding_rowwise"  # transformers' name for a token table that is split by vocabulary
COLWISE, ROWWISE = "colwise", "rowwise"
STYLES = (COLWISE, ROWWISE, SUMMED, TOKENS)  # of transformers' plans
WHOLE = "whole"  # equal inputs, weights and gradients on all learners
SPLIT_ALONG: dict[str, dict[str, int]] = {  # style -> parameter -> dimension
    COLWISE: {"weight": 0, "bias": 0},
    ROWWISE: {"weight": 1},
    TOKENS: {"weight": 0},
    SUMMED: {},
    WHOLE: {},
}


def faults_of(directory: Path, size: int) -> Iterator[str]:
    """Yield why the model in a directory cannot be split over `size` learners; it reads config.json only."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") not in KINDS:
        yield f"expected a model of the kinds {', '.join(KINDS)}, not {config.get('model_type')!r}"
    yield from head_faults(directory, size)
    for name, key in (("inner columns", "intermediate_size"), ("tokens of the vocabulary", "vocab_size")):
        yield from _indivisible(name, config.get(key), size)


def head_faults(directory: Path, size: int) -> Iterator[str]:
    """Yield why the attention heads of the model in a directory cannot be split over `size` learners."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_attention_heads")
    yield from _indivisible("attention heads", heads, size)
    yield from _indivisible("key-value heads", config.get("num_key_value_heads") or heads, size)


def _indivisible(name: str, count: Any, size: int) -> Iterator[str]:
    if not isinstance(count, int) or count % size:
        yield f"expected a divisor of the model's number of {name}, {count}"


def split(model: Any, mesh: DeviceMesh) -> None:
    """Split a Hugging Face model over the learners of a one-dimensional mesh, in place.

    Every parameter becomes a DTensor on the mesh. Modules compute on the local parts: operations on DTensors would plan
    how to shard anew for each length of a micro-batch.

    Raises:
        ValueError: the model's plan has a style that is not known here.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    plan = {path: style for path, style in (model.config.base_model_tp_plan or {}).items() if style != TOKENS}
    if unknown := set(plan.values()) - set(STYLES):
        raise ValueError(f"the plan of {type(model).__name__} has {sorted(unknown)}; expected {', '.join(STYLES)} only")
    parallelize_module(model.base_model, mesh, {path: _style(style) for path, style in plan.items()})
    tokens, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is tokens.weight
    # A subclass computes more than the look-up, so its table stays whole.
    parallelize_module(tokens, mesh, _style(TOKENS if type(tokens) is torch.nn.Embedding else WHOLE))
    if is_tied:
        head.weight = tokens.weight
    else:  # nothing calls the head: `split_token_scores` reads its rows
        _distribute(head, mesh, {"weight": 0})
    head.token_scores = split_token_scores  # for `rl_module.token_logps`
    for owner in model.modules():
        if any(not is_spread(one) for one in owner.parameters(recurse=False)):
            parallelize_module(owner, mesh, _style(WHOLE))


def _distribute(module: torch.nn.Module, mesh: DeviceMesh, dims: Mapping[str, int]) -> None:
    """Make each own parameter of a module a DTensor: split along its dimension, or whole on each learner without."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = Shard(dims[name]) if name in dims else Replicate()
        spread = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, torch.nn.Parameter(spread, requires_grad=parameter.requires_grad))


def _style(kind: str) -> ParallelStyle:
    """Return how one module is split: a name of transformers' plans, or `WHOLE`."""
    from torch.distributed.tensor.parallel import ParallelStyle

    class Style(ParallelStyle):
        def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
            _distribute(module, device_mesh, SPLIT_ALONG[kind])
            boundary = _Boundary(module, device_mesh, kind)
            module.register_forward_pre_hook(boundary.enter)
            module.register_forward_hook(boundary.leave, always_call=True)
            return module

    return Style()


class _Boundary:
    """What happens before and after the forward pass of a split module, whose parameters are local inside of it."""

    def __init__(self, module: torch.nn.Module, mesh: DeviceMesh, kind: str) -> None:
        self._mesh, self._kind = mesh, kind
        self._kept: dict[str, Any] = {}
        self._is_own: torch.Tensor | None = None  # which tokens are in this learner's part of the table
        if kind == TOKENS and isinstance(module, torch.nn.Embedding):
            table: Any = module.weight  # a DTensor
            own, padding = table.to_local(), module.padding_idx
            self._start = mesh.get_local_rank() * len(own)
            is_inside = padding is not None and self._start <= padding < self._start + len(own)
            module.padding_idx = padding - self._start if is_inside and padding is not None else None

    def enter(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Put the local parameters into place and return the module's inputs."""
        from torch.distributed.tensor import Partial

        self._kept = {name: one for name, one in module._parameters.items() if one is not None}
        sums = [Partial()] if self._kind == SUMMED else None  # of gradients, where the input is a learner's own heads
        local = {name: one.to_local(grad_placements=sums) for name, one in self._kept.items()}
        module._parameters.update(local)
        first, *rest = inputs
        if self._kind == COLWISE:
            first = whole_input(first, self._mesh)
        elif self._kind == ROWWISE:
            module._parameters["bias"] = None  # `leave` adds it once
        elif self._kind == TOKENS:
            num_own = len(local["weight"])
            self._is_own = (first >= self._start) & (first < self._start + num_own)
            first = torch.where(self._is_own, first - self._start, 0)
        return (first, *rest)

    def leave(self, module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        """Put the sharded parameters back and return the module's output; after an error there is none."""
        kept, self._kept = self._kept, {}
        module._parameters.update(kept)
        if output is None:
            return None
        if self._kind == TOKENS and self._is_own is not None:
            output = output * self._is_own[..., None]
        if self._kind in (ROWWISE, TOKENS):
            output = sum_of_parts(output, self._mesh)
        bias = kept.get("bias") if self._kind == ROWWISE else None
        return output if bias is None else output + bias.to_local()


def whole_input(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a tensor that is equal on all learners; its gradient becomes the sum of theirs in the backward pass."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    spread = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    same: torch.Tensor = spread.to_local(grad_placements=[Partial()])
    return same


def sum_of_parts(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum over learners of a tensor; each gets the gradient of the sum. A collective."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    spread = DTensor.from_local(tensor, mesh, [Partial()], run_check=False)
    total: torch.Tensor = spread.redistribute(placements=[Replicate()]).to_local()
    return total


def split_token_scores(
    hidden_UD: torch.Tensor, weight_VD: DTensor, row_N: torch.Tensor, token_N: torch.Tensor, scale: Scale
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `scoring.token_scores` does, of a head whose rows are split over learners; a collective.

        lse_U = logsumexp_r lse_RU,   mean_U = sum_r exp(lse_RU - lse_U) mean_RU,   target_N: of the learner that has it

    Args:
        hidden_UD: equal on all learners of the mesh.
        weight_VD: split by rows over a mesh of one dimension, or whole on each learner.
        row_N: as for `token_scores`.
        token_N: as for `token_scores`.
        scale: as for `token_scores`.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = weight_VD.device_mesh
    if not weight_VD.placements[0].is_shard(0):
        return token_scores(hidden_UD, weight_VD.to_local(), row_N, token_N, scale)
    own_VD = weight_VD.to_local()
    start = mesh.get_local_rank() * len(own_VD)
    is_own_N = (token_N >= start) & (token_N < start + len(own_VD))
    own_N = torch.where(is_own_N, token_N - start, 0)
    lse_U, entropy_U, target_N = row_scores(whole_input(hidden_UD, mesh), own_VD, row_N, own_N, scale)
    both_12U = torch.stack([lse_U, lse_U - entropy_U])[None]
    spread = DTensor.from_local(both_12U, mesh, [Shard(0)], run_check=False)
    lse_RU, mean_RU = spread.redistribute(placements=[Replicate()]).to_local().unbind(1)
    target_N = sum_of_parts(torch.where(is_own_N, target_N, 0.0), mesh)
    total_U = torch.logsumexp(lse_RU, 0)
    entropy_U = total_U - ((lse_RU - total_U).exp() * mean_RU).sum(0)
    return target_N - total_U[row_N], entropy_U[row_N]
