"""Run the policy's forward pass: micro-batch (numpy) -> tensors on the device -> log-probs.

The loss, the canary and the exactness check of prefix sharing all use it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import MicroBatch, bare_episode, micro_batch
from rllib_srl.learner.rl_module import CausalLMModule, autocast


class Scorer:
    """Forward passes of the policy in the compute dtype of training. Invariant: no method changes a weight."""

    def __init__(self, policy: CausalLMModule, device: torch.device, compute_dtype: str, is_sharded: bool) -> None:
        """Set the policy, its device, "float32" or "bfloat16", and whether FSDP2 shards the weights."""
        self._policy, self._device = policy, device
        self._compute_dtype, self._is_sharded = compute_dtype, is_sharded

    def tensors(self, one: MicroBatch, temperature: float = 1.0) -> dict[str, Any]:
        """Return a micro-batch as tensors on the device: what `rl_module.token_logps` and the loss read."""
        arrays = {
            "token_ids": one.layout.token_ids_RT,
            "position_ids": one.layout.position_ids_RT,
            "predictor": one.predictor_N,
            "target": one.target_N,
            "advantage": one.advantage_N,
            "scale": one.scale_N,
            "behaviour_logp": one.behaviour_logp_N,
            "episode": one.episode_N,
        }
        batch: dict[str, Any] = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        if one.layout.attention_mask is not None:
            batch["attention_mask"] = torch.from_numpy(one.layout.attention_mask).to(self._device)
        batch["trie"] = one.layout.trie
        batch["temperature"] = temperature
        return batch

    def forward(self, batch: dict[str, Any], is_exact: bool = False) -> dict[str, torch.Tensor]:
        """Return the output of `rl_module.token_logps`, with gradients unless they are disabled.

        Args:
            batch: from `tensors`; `with_hidden` asks for hidden states.
            is_exact: compute in fp32, whatever the compute dtype is.
        """
        with autocast(self._device, "float32" if is_exact else self._compute_dtype):
            fwd_out: dict[str, torch.Tensor] = self._policy(batch)
            return fwd_out

    def score(
        self, sequences: list[list[int]], share_prefixes: bool = False, is_exact: bool = False
    ) -> list[np.ndarray]:
        """Return for each sequence the log-probs of its tokens 1..T-1 at temperature 1, float32 [T - 1].

        Args:
            sequences: token ids, at least 2 per sequence.
            share_prefixes: use a trie layout instead of padding.
            is_exact: as in `forward`.
        """
        episodes = [bare_episode(ids, index) for index, ids in enumerate(sequences)]
        batch = self.tensors(micro_batch(episodes, share_prefixes))
        with torch.no_grad():
            logp_N = self.forward(batch, is_exact)["logp"].float().cpu().numpy()
        if self._is_sharded:
            self._policy.reshard()  # FSDP2 keeps gathered weights until a backward pass
        return np.split(logp_N, np.cumsum([len(ids) - 1 for ids in sequences])[:-1])
