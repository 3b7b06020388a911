"""Run the policy's forward pass: micro-batch (numpy) -> tensors on the device -> log-probs.

The loss, the canary and the exactness check of prefix sharing all use it. Nothing here needs Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from rllib_srl.batch.layout import MicroBatch, bare_episode, micro_batch
from rllib_srl.engine.models import local_model
from rllib_srl.learner.fsdp.sequence_parallel import of_all, own_range, own_tokens
from rllib_srl.learner.head import Scale, token_scores, top_tokens
from rllib_srl.learner.trie_attention import register


def as_tensors(one: MicroBatch[np.ndarray], device: torch.device, temperature: float) -> MicroBatch[torch.Tensor]:
    """Return a micro-batch with tensors on a device in place of its arrays."""
    batch = {
        name: torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
        for name, value in one.items()
    }
    return cast("MicroBatch[torch.Tensor]", batch | {"temperature": temperature})


def load_causal_lm(name_or_path: str) -> torch.nn.Module:
    """Load a causal language model in fp32 with dropout off.

    Args:
        name_or_path: a Hugging Face id, a local directory or a packaged model (`models.local_model`).
    """
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
            (> 0); `num_top` asks for the likeliest tokens where `top_at` [M] says, `stored_tokens` [N, k] for the
            log-probs of given ones.

    Returns:
        `logp` and `entropy`, fp32 [N], nats, of softmax(logits / temperature), with gradients. With `num_top` also
        `top_tokens` and `top_logp` [M, k], without gradient; with `stored_tokens` also `stored_logp` [N, k], with
        gradient.

    Raises:
        ValueError: the head has a bias.
    """
    hidden_RTD = _body(model, batch)
    predictor_N, target_N, mesh = batch["predictor"], batch["target"], batch.get("sequence")
    if mesh is not None:
        start, stop = own_range(batch["token_ids"].shape[1], mesh)
        is_own_N = (predictor_N >= start) & (predictor_N < stop)
        # One more token, which `of_all` leaves out: a learner without loss tokens takes part, too.
        predictor_N = torch.cat([predictor_N[is_own_N] - start, predictor_N.new_zeros(1)])
        target_N = torch.cat([target_N[is_own_N], target_N.new_zeros(1)])
    rows_U, row_N = torch.unique(predictor_N, return_inverse=True)
    hidden_UD = hidden_RTD.flatten(0, 1)[rows_U]
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"the head of {type(model).__name__} has a bias; expected one without")
    scale = Scale(float(batch["temperature"]), getattr(model.config, "final_logit_softcapping", None))
    weight_VD: Any = head.weight
    # A head that is split by vocabulary has its own function (`fsdp.tensor_parallel`).
    score: Callable[..., tuple[torch.Tensor, torch.Tensor]] = getattr(head, "token_scores", token_scores)
    out = {}
    if "stored_tokens" in batch:  # one pass of the head for all of them
        stored_Nk = batch["stored_tokens"]
        rows = torch.cat([row_N, row_N.repeat_interleave(stored_Nk.shape[1])])
        tokens = torch.cat([target_N, stored_Nk.flatten()])
        logp, entropy = score(hidden_UD, weight_VD, rows, tokens, scale)
        logp_N, entropy_N = logp[: len(row_N)], entropy[: len(row_N)]
        out["stored_logp"] = logp[len(row_N) :].view(stored_Nk.shape)
    else:
        logp_N, entropy_N = score(hidden_UD, weight_VD, row_N, target_N, scale)
    if "num_top" in batch:
        wanted_U, at_M = torch.unique(row_N[batch["top_at"]], return_inverse=True)
        tokens_Uk, logp_Uk = top_tokens(hidden_UD[wanted_U], weight_VD, batch["num_top"], scale)
        out |= {"top_tokens": tokens_Uk[at_M], "top_logp": logp_Uk[at_M]}
    if mesh is not None:
        logp_N, entropy_N = (of_all(one, is_own_N, mesh) for one in (logp_N, entropy_N))
    return out | {"logp": logp_N, "entropy": entropy_N}


def _body(model: Any, batch: MicroBatch[torch.Tensor]) -> torch.Tensor:
    """Return the last hidden states [R, T, D]; with `sequence` those of this learner's tokens."""
    token_ids, position_ids = batch["token_ids"], batch["position_ids"]
    if batch.get("trie") is None:
        shape: dict[str, Any] = {"attention_mask": batch["attention_mask"]}
    else:
        # Transformers passes a 4-D mask through unchanged; without one it would build a [T, T] mask.
        no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch["token_ids"].device)
        shape = {"attention_mask": no_mask, "trie": batch["trie"]}
        if (mesh := batch.get("sequence")) is not None:
            shape["sequence"] = mesh
            token_ids, position_ids = own_tokens(token_ids, mesh), own_tokens(position_ids, mesh)
    hidden_RTD: torch.Tensor = model.base_model(
        input_ids=token_ids, position_ids=position_ids, use_cache=False, **shape
    ).last_hidden_state
    return hidden_RTD


class Widened(TorchFunctionMode):
    """Computes linear layers in fp32 whose weights were gathered in bfloat16, which torch refuses without autocast."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, a linear layer with all its tensors in fp32."""
        if func is torch.nn.functional.linear:
            args = tuple(one.float() if isinstance(one, torch.Tensor) else one for one in args)
        return func(*args, **(kwargs or {}))


class Scorer:
    """Forward passes of the policy in the compute dtype of training. Invariant: no method changes a weight."""

    def __init__(
        self, policy: Any, device: torch.device, compute_dtype: str, is_sharded: bool, sequence: Any = None
    ) -> None:
        """Set the policy.

        Args:
            policy: the `CausalLMModule` in training.
            device: of the policy.
            compute_dtype: "float32" or "bfloat16".
            is_sharded: whether FSDP2 shards the weights.
            sequence: mesh of the learners over which the tokens of tries are split, see `fsdp.sequence_parallel`.
        """
        self._policy, self._device = policy, device
        self._compute_dtype, self._is_sharded, self._sequence = compute_dtype, is_sharded, sequence

    def tensors(self, one: MicroBatch[np.ndarray], temperature: float = 1.0) -> MicroBatch[torch.Tensor]:
        """Return a micro-batch with tensors on the device: what `token_logps` and the loss read."""
        batch = as_tensors(one, self._device, temperature)
        if self._sequence is not None and batch["trie"] is not None:
            batch["sequence"] = self._sequence
        return batch

    def forward(
        self,
        batch: MicroBatch[torch.Tensor],
        is_exact: bool = False,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the output of `token_logps`, with gradients unless they are disabled.

        Args:
            batch: from `tensors`.
            is_exact: compute in fp32, whatever the compute dtype is.
            weights: by name of a parameter of the policy's model, in place of that parameter in this pass.
        """
        swapped = {f"model.{name}": one for name, one in (weights or {}).items()}
        dtype = "float32" if is_exact else self._compute_dtype
        with Widened() if is_exact else nullcontext(), autocast(self._device, dtype):
            fwd_out: dict[str, torch.Tensor] = (
                functional_call(self._policy, swapped, (batch,), tie_weights=False) if swapped else self._policy(batch)
            )
            return fwd_out

    def reshard(self) -> None:
        """Free gathered weights after passes without gradient: FSDP2 keeps them until a backward pass."""
        if self._is_sharded:
            self._policy.reshard()

    def score(
        self,
        sequences: list[list[int]],
        share_prefixes: bool = False,
        is_exact: bool = False,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> list[np.ndarray]:
        """Return for each sequence the log-probs of its tokens 1..T-1 at temperature 1, float32 [T - 1].

        Args:
            sequences: token ids, at least 2 per sequence.
            share_prefixes: use a trie layout instead of padding.
            is_exact: as in `forward`.
            weights: as in `forward`.
        """
        episodes = [bare_episode(ids, index) for index, ids in enumerate(sequences)]
        batch = self.tensors(micro_batch(episodes, share_prefixes))
        with torch.no_grad():
            logp_N = self.forward(batch, is_exact, weights)["logp"].float().cpu().numpy()
        self.reshard()
        return np.split(logp_N, np.cumsum([len(ids) - 1 for ids in sequences])[:-1])
