"""Compute log-probs of given tokens and entropies from hidden states, one tile of [rows, V] logits at a time.

    logits     l_UV = cap(hidden_UD @ weight_VD^T) / temperature            tile by tile, rows x vocabulary
    forward    lse_U, mean_U = sum_V p l,  entropy_U = lse_U - mean_U,  target_N = l[row_N, token_N]
    backward   recompute each tile:  dl = p * (d lse - d entropy * (l - mean)) + d target at its token
               d hidden += dl @ weight,  d weight += dl^T @ hidden

Matrix products use the compute dtype of training, as any linear layer under autocast; everything else is fp32.
Logits of up to `KEPT_BYTES` are kept instead of recomputed.

Source: Wijmans et al. 2024 (Cut Cross-Entropy), arXiv 2411.09009 (log-sum-exp over tiles, recomputed in the backward).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

ROWS = 2048  # maximum rows of a tile; each tile of rows makes one pass over the whole gradient of the weight
TILE = {"cpu": 2**21}  # logits of a tile; 8 MiB in fp32 fit a CPU's cache
GPU_TILE = 2**26
KEPT_BYTES = 64 * 2**20  # logits are kept for the backward pass up to this size


@dataclass(frozen=True)
class Scale:
    """Map from products to logits: `softcap` (None: no cap), then division by `temperature`."""

    temperature: float = 1.0
    softcap: float | None = None

    def logits(self, product: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits; `product` may be overwritten."""
        logits = product.float()
        if self.softcap:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.div_(self.temperature) if self.temperature != 1.0 else logits

    def backward(self, grad: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the product, given `grad` of the logits, which is overwritten."""
        if self.softcap:
            grad.mul_(1 - (logits * (self.temperature / self.softcap)).square_())
        return grad.div_(self.temperature) if self.temperature != 1.0 else grad


def token_scores(
    hidden_UD: torch.Tensor, weight_VD: torch.Tensor, row_N: torch.Tensor, token_N: torch.Tensor, scale: Scale
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of each token and the entropy of its row, both fp32 [N], nats, with gradients.

    Args:
        hidden_UD: last hidden states.
        weight_VD: weight of the head, which has no bias.
        row_N: row of each token, in [0, U).
        token_N: token ids, in [0, V).
        scale: softcap and temperature.
    """
    lse_U, entropy_U, target_N = row_scores(hidden_UD, weight_VD, row_N, token_N, scale)
    return target_N - lse_U[row_N], entropy_U[row_N]


def row_scores(
    hidden_UD: torch.Tensor, weight_VD: torch.Tensor, row_N: torch.Tensor, token_N: torch.Tensor, scale: Scale
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-sum-exp [U] and entropy [U] of each row and the logit of each token [N], fp32, with gradients.

    Arguments as for `token_scores`; `weight_VD` may hold some of the vocabulary only.
    """
    order = torch.argsort(row_N, stable=True)
    device = hidden_UD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_UD.dtype
    scores: Callable[..., tuple[torch.Tensor, ...]] = _Scores.apply
    lse_U, entropy_U, target_N = scores(hidden_UD, weight_VD, row_N[order], token_N[order], scale, dtype)
    return lse_U, entropy_U, target_N[torch.argsort(order)]


def top_tokens(
    hidden_UD: torch.Tensor, weight_VD: torch.Tensor, num: int, scale: Scale
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest tokens of each row, int64 [U, k], and their log-probs, fp32 [U, k], without gradient.

    Args:
        hidden_UD: last hidden states.
        weight_VD: weight of the head, which has no bias.
        num: k, at most V.
        scale: softcap and temperature.
    """
    device = hidden_UD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_UD.dtype
    tokens, logps = [], []
    if not num:
        none = hidden_UD.new_zeros((len(hidden_UD), 0))
        return none.long(), none
    with torch.no_grad():
        weight = weight_VD.to(dtype)
        for rows in hidden_UD.split(max(1, TILE.get(device, GPU_TILE) // len(weight))):
            top = scale.logits(rows.to(dtype) @ weight.T).log_softmax(-1).topk(num)
            tokens.append(top.indices)
            logps.append(top.values)
    return torch.cat(tokens), torch.cat(logps)


class _Scores(torch.autograd.Function):
    """Autograd function: log-sum-exp and entropy of each row, logit of each token. Invariant: `row_N` ascends."""

    @staticmethod
    def forward(
        ctx: Any, hidden_UD: Any, weight_VD: Any, row_N: Any, token_N: Any, scale: Scale, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        hidden, weight = hidden_UD.to(dtype), weight_VD.to(dtype)
        lses, means, target_N = [], [], torch.empty(len(row_N), device=hidden.device)
        is_kept = len(hidden) * len(weight) * hidden.element_size() <= KEPT_BYTES and any(ctx.needs_input_grad[:2])
        kept: dict[tuple[int, int], torch.Tensor] = {}
        for rows, at in _row_tiles(len(hidden), row_N):
            lse_CU, mean_CU = [], []
            for columns in _column_tiles(hidden, weight):
                product = hidden[rows] @ weight[columns].T
                if is_kept:
                    kept[rows.start, columns.start] = product
                logits = scale.logits(product.clone() if is_kept and dtype == torch.float32 else product)
                lse_U, mean_U = _summary(logits)
                lse_CU.append(lse_U)
                mean_CU.append(mean_U)
                here, row_H, column_H = _targets(rows, at, columns, row_N, token_N)
                target_N[here] = logits[row_H, column_H]
            tile_lse_CU = torch.stack(lse_CU)
            lses.append(torch.logsumexp(tile_lse_CU, 0))
            means.append(((tile_lse_CU - lses[-1]).exp_() * torch.stack(mean_CU)).sum(0))
        lse_U, mean_U = torch.cat(lses), torch.cat(means)
        ctx.save_for_backward(hidden, weight, row_N, token_N, lse_U, mean_U)
        ctx.dtypes = hidden_UD.dtype, weight_VD.dtype
        ctx.scale, ctx.kept = scale, kept
        return lse_U, lse_U - mean_U, target_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, row_N, token_N, lse_U, mean_U = ctx.saved_tensors
        grad_lse_U, grad_entropy_U, grad_target_N = grads
        grad_hidden = torch.zeros(hidden.shape, device=hidden.device)
        needs_weight = ctx.needs_input_grad[1]
        grad_weight = torch.empty(weight.shape, device=hidden.device) if needs_weight else None
        with_entropy = bool(grad_entropy_U.any())
        for columns in _column_tiles(hidden, weight):
            for rows, at in _row_tiles(len(hidden), row_N):
                product = ctx.kept.pop((rows.start, columns.start), None)
                logits = ctx.scale.logits(hidden[rows] @ weight[columns].T if product is None else product)
                grad = (logits - lse_U[rows, None]).exp_()  # p, and from here on in place
                if with_entropy:
                    factor = grad_lse_U[rows, None] + grad_entropy_U[rows, None] * (mean_U[rows, None] - logits)
                    grad.mul_(factor)
                else:
                    grad.mul_(grad_lse_U[rows, None])
                here, row_H, column_H = _targets(rows, at, columns, row_N, token_N)
                grad.index_put_((row_H, column_H), grad_target_N[here], accumulate=True)
                grad = ctx.scale.backward(grad, logits).to(hidden.dtype)
                grad_hidden[rows] += grad @ weight[columns]
                if grad_weight is not None:
                    part = grad.T @ hidden[rows]
                    if rows.start:
                        grad_weight[columns] += part
                    else:
                        grad_weight[columns] = part
        weight_out = None if grad_weight is None else grad_weight.to(ctx.dtypes[1])
        return grad_hidden.to(ctx.dtypes[0]), weight_out, None, None, None, None


def _summary(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-sum-exp and sum of p * logit of each row of a tile, with p normalised within the tile."""
    p = torch.softmax(logits, -1)
    # Saves one pass over logsumexp: max p = exp(max logit - lse).
    lse_U = logits.amax(-1) - p.amax(-1).log()
    return lse_U, torch.linalg.vecdot(p, logits)


def _row_tiles(num_rows: int, row_N: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of each tile and the slice of its tokens; `row_N` must ascend."""
    bounds = torch.arange(0, num_rows + ROWS, ROWS, device=row_N.device)
    cuts = torch.searchsorted(row_N, bounds).tolist()
    for tile, start in enumerate(range(0, num_rows, ROWS)):
        yield slice(start, min(start + ROWS, num_rows)), slice(cuts[tile], cuts[tile + 1])


def _column_tiles(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
    tile = TILE.get(weight.device.type, GPU_TILE)
    width = max(1, tile // max(1, min(len(hidden), ROWS)))
    for start in range(0, len(weight), width):
        yield slice(start, min(start + width, len(weight)))


def _targets(
    rows: slice, at: slice, columns: slice, row_N: torch.Tensor, token_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the indices of the tokens in a tile, with their rows and columns inside the tile."""
    token = token_N[at]
    here = torch.nonzero((token >= columns.start) & (token < columns.stop))[:, 0]
    return here + at.start, row_N[at][here] - rows.start, token[here] - columns.start
