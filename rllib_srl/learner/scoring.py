"""Run the policy's forward pass: micro-batch (numpy) -> tensors on the device -> log-probs.

The loss, the canary and the exactness check of prefix sharing all use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from rllib_srl.batch.layout import MicroBatch, bare_episode, micro_batch
from rllib_srl.learner.rl_module import CausalLMModule, autocast


def as_tensors(one: MicroBatch[np.ndarray], device: torch.device, temperature: float) -> MicroBatch[torch.Tensor]:
    """Return a micro-batch with tensors on a device in place of its arrays."""
    batch = {
        name: torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
        for name, value in one.items()
    }
    return cast("MicroBatch[torch.Tensor]", batch | {"temperature": temperature})


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
        self, policy: CausalLMModule, device: torch.device, compute_dtype: str, is_sharded: bool, sequence: Any = None
    ) -> None:
        """Set the policy.

        Args:
            policy: module in training.
            device: of the policy.
            compute_dtype: "float32" or "bfloat16".
            is_sharded: whether FSDP2 shards the weights.
            sequence: mesh of the learners over which the tokens of tries are split, see `fsdp.sequence_parallel`.
        """
        self._policy, self._device = policy, device
        self._compute_dtype, self._is_sharded, self._sequence = compute_dtype, is_sharded, sequence

    def tensors(self, one: MicroBatch[np.ndarray], temperature: float = 1.0) -> MicroBatch[torch.Tensor]:
        """Return a micro-batch with tensors on the device: what `rl_module.token_logps` and the loss read."""
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
        """Return the output of `rl_module.token_logps`, with gradients unless they are disabled.

        Args:
            batch: from `tensors`; `with_hidden` asks for hidden states.
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
