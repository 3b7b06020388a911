"""Split the tokens of a forward pass over learners, for long prompts (DeepSpeed-Ulysses).

    mesh        data x sequence: learner i trains shard i // sequence, with part i % sequence of the tokens of each pass
    layers      embedding, norms, MLP, head: a learner's own tokens
    attention   heads are exchanged for tokens before it, and tokens for heads after it (all-to-all):
                    [1, H, T / n, D] -> [1, H / n, T, D] -> attention over the whole trie -> [1, T / n, H, D]
    outputs     log-probs of all tokens on every learner; a backward pass starts from a learner's own ones

The loss of a learner covers its own tokens, so the sum of gradients over all learners is that of one learner. Weights
are sharded over all learners as without it.

Source: Jacobs et al. 2023 (DeepSpeed Ulysses), arXiv 2309.14509, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def own_tokens(tokens_RT: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this learner's tokens, [R, ceil(T / n)]; those of the last learners are filled up with 0."""
    start, stop = own_range(tokens_RT.shape[1], mesh)
    return _filled(tokens_RT, 1, mesh)[:, start:stop]


def own_range(num_tokens: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return the range [start, stop) of this learner's tokens, filled ones included."""
    size = -(-num_tokens // mesh.size())
    return mesh.get_local_rank() * size, (mesh.get_local_rank() + 1) * size


def to_heads(own_1HtD: torch.Tensor, num_tokens: int, mesh: DeviceMesh) -> torch.Tensor:
    """Return [1, H / n, T, D] of all tokens of [1, H, T / n, D], with gradients; a collective."""
    of_heads = own_1HtD[0].unflatten(0, (mesh.size(), -1))  # [n, H / n, T / n, D], by the learner that gets them
    return _exchanged(of_heads, mesh).transpose(0, 1).flatten(1, 2)[None, :, :num_tokens]


def to_tokens(out_1THD: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return [1, T / n, H, D] of all heads of an attention's output [1, T, H / n, D], with gradients; a collective."""
    of_tokens = _filled(out_1THD, 1, mesh)[0].unflatten(0, (mesh.size(), -1))  # [n, T / n, H / n, D]
    return _exchanged(of_tokens, mesh).transpose(0, 1).flatten(1, 2)[None]


def _exchanged(parts: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the parts [n, ...] that the learners have for this one, in their order, given its parts for them."""
    # torch.distributed.nn.functional, the public form, is deprecated in favour of this one.
    from torch.distributed._functional_collectives import all_to_all_single

    found: torch.Tensor = all_to_all_single(parts.contiguous(), None, None, mesh)
    return found


def of_all(own_N: torch.Tensor, is_own_N: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the values of all learners, [N]; the gradient of a learner's own ones goes back to it; a collective.

    Args:
        own_N: values of this learner's tokens, then others, which are left out.
        is_own_N: which of all N tokens are this learner's; each is of one learner.
        mesh: of the learners.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    spread_N = own_N.new_zeros(len(is_own_N)).masked_scatter(is_own_N, own_N)
    total = DTensor.from_local(spread_N, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    whole_N: torch.Tensor = total.to_local()
    return whole_N.clone()  # FSDP2 warns of outputs that are views


def _filled(tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """Return a tensor with zeros at the end of `dim`, up to a multiple of the number of learners."""
    missing = -tensor.shape[dim] % mesh.size()
    if not missing:
        return tensor
    shape: list[Any] = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)

