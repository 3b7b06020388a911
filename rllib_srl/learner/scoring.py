"""Run the policy's forward pass: micro-batch (numpy) -> tensors on the device -> body -> head -> log-probs.

The loss, the canary and the exactness check of prefix sharing all use it. Nothing here needs Ray.

The head computes log-probs of given tokens and entropies from hidden states, one tile of [rows, V] logits at a time:

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from rllib_srl.batch.layout import MicroBatch, bare_episode, micro_batch
from rllib_srl.engine.models import local_model
from rllib_srl.learner.trie_attention import register

ROWS = 2048  # maximum rows of a tile; each tile of rows makes one pass over the whole gradient of the weight
TILE = {"cpu": 2**21}  # logits of a tile; 8 MiB in fp32 fit a CPU's cache
GPU_TILE = 2**26
KEPT_BYTES = 64 * 2**20  # logits are kept for the backward pass up to this size


def as_tensors(arrays: MicroBatch[np.ndarray], device: torch.device, temperature: float) -> MicroBatch[torch.Tensor]:
    """Return a micro-batch with tensors on a device in place of its arrays."""
    batch = {
        name: torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }
    return cast("MicroBatch[torch.Tensor]", batch | {"temperature": temperature})


def load_causal_lm(name_or_path: str) -> torch.nn.Module:
    """Load a causal language model, as `local_model` finds it, in fp32 with dropout off."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        local_model(name_or_path), dtype=torch.float32, attn_implementation=register()
    )
    return model.eval()


def autocast(device: torch.device, compute_dtype: str) -> AbstractContextManager[Any]:
    """Return the context of a forward pass in "float32" or "bfloat16"; the weights stay fp32."""
    if compute_dtype == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def token_logps(model: Any, batch: MicroBatch[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute the log-probs of the target tokens; the head runs only on rows that predict a target.

    Args:
        model: a Hugging Face causal language model.
        batch: `token_ids`, `position_ids`, `trie` (R is 1) or `attention_mask`, `predictor`, `target`, `temperature`
            (> 0); `num_top` asks for the k likeliest tokens, `given_tokens` [N, k] for the log-probs of given ones.

    Returns:
        `logp` and `entropy`, fp32 [N], nats, of softmax(logits / temperature), with gradients. With `num_top` also
        `top_tokens` and `top_logp` [N, k], without gradient; with `given_tokens` also `given_logp` [N, k], with
        gradient.

    Raises:
        ValueError: the head has a bias.
    """
    hidden_RTD = _body(model, batch)
    target_N = batch["target"]
    rows_U, row_N = torch.unique(batch["predictor"], return_inverse=True)
    hidden_UD = hidden_RTD.flatten(0, 1)[rows_U]
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"the head of {type(model).__name__} has a bias; expected one without")
    scale = Scale(float(batch["temperature"]), getattr(model.config, "final_logit_softcapping", None))
    weight_VD: Any = head.weight
    out = {}
    if "given_tokens" in batch:  # one pass of the head for all of them
        given_Nk = batch["given_tokens"]
        rows = torch.cat([row_N, row_N.repeat_interleave(given_Nk.shape[1])])
        tokens = torch.cat([target_N, given_Nk.flatten()])
        logp, entropy = token_scores(hidden_UD, weight_VD, rows, tokens, scale)
        logp_N, entropy_N = logp[: len(row_N)], entropy[: len(row_N)]
        out["given_logp"] = logp[len(row_N) :].view(given_Nk.shape)
    else:
        logp_N, entropy_N = token_scores(hidden_UD, weight_VD, row_N, target_N, scale)
    if "num_top" in batch:
        tokens_Uk, logp_Uk = top_tokens(hidden_UD, weight_VD, batch["num_top"], scale)
        out |= {"top_tokens": tokens_Uk[row_N], "top_logp": logp_Uk[row_N]}
    return out | {"logp": logp_N, "entropy": entropy_N}


def _body(model: Any, batch: MicroBatch[torch.Tensor]) -> torch.Tensor:
    """Return the last hidden states [R, T, D]."""
    if batch.get("trie") is None:
        shape: dict[str, Any] = {"attention_mask": batch["attention_mask"]}
    else:
        # Transformers passes a 4-D mask through unchanged; without one it would build a [T, T] mask.
        no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch["token_ids"].device)
        shape = {"attention_mask": no_mask, "trie": batch["trie"]}
    hidden_RTD: torch.Tensor = model.base_model(
        input_ids=batch["token_ids"], position_ids=batch["position_ids"], use_cache=False, **shape
    ).last_hidden_state
    return hidden_RTD


class Widened(TorchFunctionMode):
    """Computes linear layers in fp32 whose weights were gathered in bfloat16, which torch refuses without autocast."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, a linear layer with all its tensors in fp32."""
        if func is torch.nn.functional.linear:
            args = tuple(arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args)
        return func(*args, **(kwargs or {}))


class Scorer:
    """Forward passes of the policy in the compute dtype of training. Invariant: no method changes a weight."""

    def __init__(self, policy: Any, device: torch.device, compute_dtype: str, is_sharded: bool) -> None:
        """Set the `CausalLMModule` in training, and whether FSDP2 shards its weights."""
        self._policy, self._device = policy, device
        self._compute_dtype, self._is_sharded = compute_dtype, is_sharded

    def tensors(self, arrays: MicroBatch[np.ndarray], temperature: float = 1.0) -> MicroBatch[torch.Tensor]:
        """Return a micro-batch with tensors on the device: what `token_logps` and the loss read."""
        return as_tensors(arrays, self._device, temperature)

    def forward(self, batch: MicroBatch[torch.Tensor], is_exact: bool = False) -> dict[str, torch.Tensor]:
        """Return the output of `token_logps` for what `tensors` returned; `is_exact` computes in fp32."""
        dtype = "float32" if is_exact else self._compute_dtype
        with Widened() if is_exact else nullcontext(), autocast(self._device, dtype):
            fwd_out: dict[str, torch.Tensor] = self._policy(batch)
            return fwd_out

    def reshard(self) -> None:
        """Free gathered weights after passes without gradient: FSDP2 keeps them until a backward pass."""
        if self._is_sharded:
            self._policy.reshard()

    def score(
        self, sequences: list[list[int]], share_prefixes: bool = False, is_exact: bool = False
    ) -> list[np.ndarray]:
        """Return the log-probs of tokens 1..T-1 of each sequence of at least 2, at temperature 1, float32 [T - 1]."""
        episodes = [bare_episode(ids, index) for index, ids in enumerate(sequences)]
        batch = self.tensors(micro_batch(episodes, share_prefixes))
        with torch.no_grad():
            logp_N = self.forward(batch, is_exact)["logp"].float().cpu().numpy()
        self.reshard()
        return np.split(logp_N, np.cumsum([len(ids) - 1 for ids in sequences])[:-1])


# --- head -----------------------------------------------------------------------------------------


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
    """Return the log-prob of each token and the entropy of its row, both fp32 [N], nats, with gradients."""
    order = torch.argsort(row_N, stable=True)
    dtype = _compute_dtype(hidden_UD)
    scores: Callable[..., tuple[torch.Tensor, ...]] = _Scores.apply
    lse_U, entropy_U, target_N = scores(hidden_UD, weight_VD, row_N[order], token_N[order], scale, dtype)
    return target_N[torch.argsort(order)] - lse_U[row_N], entropy_U[row_N]


def top_tokens(
    hidden_UD: torch.Tensor, weight_VD: torch.Tensor, num: int, scale: Scale
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k likeliest tokens of each row, int64 [U, k], and their log-probs, fp32 [U, k], without gradient."""
    tokens, logps, dtype = [], [], _compute_dtype(hidden_UD)
    with torch.no_grad():
        weight = weight_VD.to(dtype)
        for rows in hidden_UD.split(max(1, TILE.get(weight.device.type, GPU_TILE) // len(weight))):
            top = scale.logits(rows.to(dtype) @ weight.T).log_softmax(-1).topk(num)
            tokens.append(top.indices)
            logps.append(top.values)
    return torch.cat(tokens), torch.cat(logps)


def _compute_dtype(hidden_UD: torch.Tensor) -> torch.dtype:
    device = hidden_UD.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_UD.dtype


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
