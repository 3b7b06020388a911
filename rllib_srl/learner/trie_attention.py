"""Compute exact attention over a prefix trie without a [T, T] mask, as a transformers attention function.

    CPU   torch's flash kernel on each part of `Trie.cover`; parts are merged by their log-sum-exps:
              out = sum_r exp(lse_r - lse) out_r,   lse = logsumexp_r lse_r
          Given the merged `out` and `lse`, the backward pass is a sum over rectangles too, because
          dS = P * (dP - rowsum(dO * O)) needs only P = exp(S - lse) of each rectangle.
    GPU   flex-attention with a BlockMask whose `mask_mod` compares a row with the subtree end of its key (`block_mask`)

Capped scores (Gemma 2) have no such kernel; they are computed directly with the explicit [T, T] mask.
A sliding window compares depths along the path; for a single stream these are its positions.

Source: Dao et al. 2022 (FlashAttention), arXiv 2205.14135, appendix B (merging by log-sum-exps, the backward pass).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.trie import Cover, Rectangle, Squares, Trie

logger = logging.getLogger(__name__)

NAME = "srl_trie"  # name of the attention function in transformers' registry
HIDDEN = -1e30  # added to masked scores; finite, so that a fully masked row of a rectangle merges with weight 0
BLOCK = 128  # rows and keys of one block of flex-attention's masks; torch's default
SHARING_TOLERANCE = 1e-3  # largest allowed |log-prob difference| of trie and padded layout in fp32, nats
CHECK_TOKENS = 192  # the check's longest stream has this many tokens beyond the sliding window
MAX_GRAPHS = 64  # maximum graphs of flex-attention in one process; a model needs about 6 (gradients, dtype, window)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def register() -> str:
    """Register the attention function with transformers and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for padded batches
    return NAME


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    trie: Trie | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend along a trie, or as transformers' "sdpa" with `attention_mask` if `trie` is None.

    The query is [R, H, T, D], key and value are [R, Hkv, T, D], where Hkv divides H; with a trie R is 1. The mask of
    padded batches is bool [R, 1, T, T], None means causal. A token attends to `sliding_window` positions, itself
    included. Scores are multiplied by `scaling`, D ** -0.5 by default, and capped: softcap * tanh(score / softcap).

    Returns:
        Output [R, T, H, D], and None in place of attention weights.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap:
        mask = attention_mask if trie is None else _explicit(trie, sliding_window, query.device)
        return _capped(query, key, value, mask, scaling, softcap).transpose(1, 2), None
    if trie is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.device.type != "cpu":
        return _flex(query, key, value, trie, scaling, sliding_window).transpose(1, 2), None
    by_parts: Callable[..., torch.Tensor] = _ByParts.apply
    return by_parts(query, key, value, trie.cover(sliding_window), scaling), None


class _ByParts(torch.autograd.Function):
    """Autograd function for attention over the parts of a cover, [1, H, T, D] -> [1, T, H, D].

    Invariant: computes in fp32 for every input dtype. Without AMX the kernel's bf16 is no faster, and up to six times
    slower in the backward pass on short rows.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, cover: Cover, scaling: float
    ) -> torch.Tensor:
        q, k, v = _expanded(query, key, value)
        out_THD = torch.empty(1, q.shape[2], q.shape[1], q.shape[3])
        out, lse_HT = out_THD.transpose(1, 2), torch.empty(1, q.shape[1], q.shape[2])
        for squares in cover.squares:
            stacked = (_stacked(tensor, squares) for tensor in (q, k, v))
            part, part_lse = _flash(*stacked, attn_mask=_hidden(squares), scale=scaling)
            for n, run, inside in _places(squares):
                out[0, :, run], lse_HT[0, :, run] = part[n, :, inside], part_lse[n, :, inside]
        for rectangle in [*cover.triangles, *cover.below]:
            part, part_lse = _flash(
                q[:, :, rectangle.rows],
                k[:, :, rectangle.keys],
                v[:, :, rectangle.keys],
                is_causal=rectangle.is_causal,
                attn_mask=_additive(rectangle),
                scale=scaling,
            )
            if rectangle.rows == rectangle.keys:  # triangles come first, so there is nothing to merge with yet
                out[:, :, rectangle.rows], lse_HT[:, :, rectangle.rows] = part, part_lse
            else:
                _merge(out[:, :, rectangle.rows], lse_HT[:, :, rectangle.rows], part, part_lse)
        out_THD = out_THD.to(query.dtype)
        ctx.save_for_backward(query, key, value, out_THD, lse_HT)
        ctx.cover, ctx.scaling = cover, scaling
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out_THD, lse_HT = ctx.saved_tensors
        q, k, v = _expanded(query, key, value)
        grad, out = grads[0].transpose(1, 2).float(), out_THD.transpose(1, 2).float()
        sums = [torch.zeros_like(tensor) for tensor in (q, k, v)]
        for squares in ctx.cover.squares:
            stacked = [_stacked(tensor, squares) for tensor in (grad, q, k, v, out, lse_HT)]
            # Rows outside a run are fully masked: exp(HIDDEN - lse) = 0, so they get no gradient.
            parts = _flash_backward(*stacked, 0.0, False, attn_mask=_hidden(squares), scale=ctx.scaling)
            for total, part in zip(sums, parts, strict=True):
                for n, run, inside in _places(squares):
                    total[0, :, run] = part[n, :, inside]
        for rectangle in [*ctx.cover.triangles, *ctx.cover.below]:
            parts = _flash_backward(
                grad[:, :, rectangle.rows],
                q[:, :, rectangle.rows],
                k[:, :, rectangle.keys],
                v[:, :, rectangle.keys],
                out[:, :, rectangle.rows],
                lse_HT[:, :, rectangle.rows].contiguous(),
                0.0,
                rectangle.is_causal,
                attn_mask=_additive(rectangle),
                scale=ctx.scaling,
            )
            for total, at, part in zip(sums, (rectangle.rows, rectangle.keys, rectangle.keys), parts, strict=True):
                total[:, :, at] += part
        num_heads = key.shape[1]
        grad_k, grad_v = (total.unflatten(1, (num_heads, -1)).sum(2) for total in sums[1:])
        return sums[0].to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype), None, None


def _stacked(tensor: torch.Tensor, squares: Squares) -> torch.Tensor:
    """Return [N, H, S, ...] of [1, H, T, ...]."""
    return torch.stack([tensor[0, :, start : start + squares.size] for start in squares.starts])


def _places(squares: Squares) -> Iterator[tuple[int, slice, slice]]:
    """Yield for each square its index, its run of rows, and the position of that run inside the square."""
    for n, (start, run) in enumerate(zip(squares.starts, squares.runs, strict=True)):
        yield n, run, slice(run.start - start, run.stop - start)


def _hidden(squares: Squares) -> torch.Tensor:
    return torch.zeros(squares.mask_NSS.shape).masked_fill_(~torch.from_numpy(squares.mask_NSS), HIDDEN)[:, None]


def _expanded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return query, key and value in fp32, with keys and values repeated for grouped-query attention."""
    group = query.shape[1] // key.shape[1]
    return query.float(), *(tensor.float().repeat_interleave(group, 1) for tensor in (key, value))


def _additive(rectangle: Rectangle) -> torch.Tensor | None:
    if rectangle.mask is None:
        return None
    return torch.zeros(rectangle.mask.shape).masked_fill_(~torch.from_numpy(rectangle.mask), HIDDEN)


def _merge(out: torch.Tensor, lse_HT: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    merged = torch.logaddexp(lse_HT, part_lse)
    out.mul_((lse_HT - merged).exp_().unsqueeze(-1)).addcmul_(part, (part_lse - merged).exp_().unsqueeze(-1))
    lse_HT.copy_(merged)


# --- capped scores --------------------------------------------------------------------------------


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, softcap: float
) -> torch.Tensor:
    group, num_tokens = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    if mask is None:
        mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=query.device).tril()
    scores = torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap)).float() * softcap
    weights = torch.softmax(scores.masked_fill(~mask, HIDDEN), -1)
    return (weights.to(query.dtype) @ value.to(query.dtype)).to(value.dtype)


def _explicit(trie: Trie, window: int | None, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(trie.mask_TT(window)).to(device)


# --- GPU ------------------------------------------------------------------------------------------


def mask_mod(trie: Trie, window: int | None, device: torch.device | str) -> Callable[..., torch.Tensor]:
    """Return flex-attention's predicate "row sees key": constant time, two numbers per token."""
    end_T, depth_T = torch.from_numpy(trie.end_T).to(device), torch.from_numpy(trie.depth_T).to(device)

    def sees(batch: Any, head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (key <= row) & (row < end_T[key])
        return seen if window is None else seen & (depth_T[row] - depth_T[key] < window)

    return sees


def block_mask(trie: Trie, window: int | None, device: torch.device | str) -> Any:
    """Return the BlockMask of a trie: the blocks of rows and keys that flex-attention computes.

    torch's `create_block_mask` would evaluate all T^2 pairs: 8 GB at 32k tokens. `Trie.blocks` needs T / 128 squared.
    """
    from torch.nn.attention.flex_attention import BlockMask

    some_NN, all_NN = trie.blocks(BLOCK, window)
    return BlockMask.from_kv_blocks(
        *_listed(some_NN & ~all_NN, device),
        *_listed(all_NN, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod(trie, window, device),
        seq_lengths=(len(trie), len(trie)),
    )


def _listed(is_chosen_NN: np.ndarray, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of chosen blocks in each row, int32 [1, 1, N], and their columns first, int32 [1, 1, N, N]."""
    columns_NN = np.argsort(~is_chosen_NN, axis=1, kind="stable").astype(np.int32)
    number_N = is_chosen_NN.sum(1).astype(np.int32)
    return torch.from_numpy(number_N).to(device)[None, None], torch.from_numpy(columns_NN).to(device)[None, None]


class CompiledFlex:
    """flex-attention, compiled; calls in training and without gradients, of every dtype, share one limit of graphs.

    Invariant: it never runs uncompiled. Beyond torch's default limit of 8 graphs it would, with a [H, T, T] tensor of
    scores and one warning. Here a graph above `limit` raises.
    """

    def __init__(self, limit: int = MAX_GRAPHS, backend: str = "inductor") -> None:
        """Set the maximum number of graphs and torch's compiler backend."""
        self._limit, self._backend_name = limit, backend
        self.num_graphs = 0  # compiled so far; 0 on a CPU
        self._compiled: Callable[..., torch.Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the output of `flex_attention` for its arguments.

        Raises:
            RuntimeError: the arguments need more graphs than the limit.
        """
        from torch._dynamo.exc import FailOnRecompileLimitHit

        if self._compiled is None:
            self._compiled = self._compile()
        try:
            return self._compiled(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"flex-attention needs more than {self._limit} compiled graphs; set prefix_sharing = False, and report "
                "the model: each micro-batch would otherwise need a [heads, tokens, tokens] tensor"
            ) from error

    def _compile(self) -> Callable[..., torch.Tensor]:
        from torch._dynamo.backends.registry import lookup_backend
        from torch.nn.attention.flex_attention import flex_attention

        backend: Any = lookup_backend(self._backend_name)

        def counted(graph: Any, inputs: Any) -> Any:
            self.num_graphs += 1
            return backend(graph, inputs)

        # `dynamic`: lengths differ from one micro-batch to the next. `fullgraph` makes the limit an error.
        options: dict[str, Any] = {"dynamic": True, "fullgraph": True, "recompile_limit": self._limit}
        compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, backend=counted, **options)
        return compiled


compiled_flex = CompiledFlex()


def _flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, trie: Trie, scaling: float, window: int | None
) -> torch.Tensor:
    place = (window, str(query.device))
    if place not in trie.block_masks:
        trie.block_masks[place] = block_mask(trie, window, query.device)
    is_shared = query.shape[1] != key.shape[1]
    return compiled_flex(query, key, value, block_mask=trie.block_masks[place], scale=scaling, enable_gqa=is_shared)


# --- check ----------------------------------------------------------------------------------------


def is_sharing_exact(score: Callable[..., list[np.ndarray]], model: Any, max_tokens: int) -> bool:
    """Return whether a trie and padding give the same log-probs under the real weights; log a warning if not."""
    config = model.config.get_text_config()
    streams = check_streams(int(config.vocab_size), _window(config), max_tokens)
    try:
        shared = score(streams, share_prefixes=True, is_exact=True)
        padded = [score([stream], is_exact=True)[0] for stream in streams]
        gap = max(float(np.abs(a - b).max()) for a, b in zip(shared, padded, strict=True))
        reason = f"its log-probs differ by {gap:.3g} nats"
    except (TypeError, ValueError, RuntimeError) as error:  # the architecture does not support a trie
        gap, reason = float("inf"), f"{type(error).__name__}: {error}"
    if gap <= SHARING_TOLERANCE:
        return True
    logger.warning(
        "prefix sharing is off for %s: %s; training uses padding instead, which is slower and also correct",
        type(model).__name__,
        reason,
    )
    return False


def check_streams(vocab_size: int, window: int | None, longest: int) -> list[list[int]]:
    """Return random token streams that exercise every kind of rectangle of a trie and exceed the sliding window."""
    length = min(longest, CHECK_TOKENS + (window or 0))
    ids = np.random.default_rng(0).integers(0, vocab_size, (5, length))
    fork, early = max(1, 5 * length // 8), max(1, length // 4)
    branches = [ids[0], np.concatenate([ids[0][:fork], ids[1][: max(1, length // 6)]])]
    branches += [np.concatenate([ids[0][:fork], ids[1][:1], ids[2][:2]]), ids[4][: max(2, length // 8)]]
    branches.append(np.concatenate([ids[0][:early], ids[3][: max(1, length // 8)]]))
    return [branch.tolist() for branch in branches]


def _window(config: Any) -> int | None:
    is_sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    return int(config.sliding_window) if is_sliding and config.sliding_window else None
