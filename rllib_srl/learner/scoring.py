"""Learner mixin that turns micro-batches into tensors and computes log-probs without gradient.

    micro-batch (numpy) -> tensors on the device -> log-probs

It serves the loss, the canary, the KL to the reference and the exactness check of prefix sharing.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl.batch.layout import MicroBatch, bare_episode, episodes_of, micro_batch, micro_batches
from rllib_srl.batch.shard import TrainingShard
from rllib_srl.learner.model_setup import adapters_off, has_adapters
from rllib_srl.learner.rl_module import load_causal_lm, token_logps

logger = logging.getLogger(__name__)

SHARING_TOLERANCE = 1e-3  # largest allowed |log-prob difference| of trie and padded layout in fp32, nats
CHECK_TOKENS = 192  # the check's longest stream has this many tokens beyond the sliding window


class Scorer:
    """Forward passes of the learner's model and reference model (mixin).

    Invariant: no method changes a weight or a gradient.
    """

    model: Any
    module: Any
    config: Any
    _device: torch.device
    _reference: torch.nn.Module | None
    _can_share: bool

    def score(
        self, sequences: list[list[int]], share_prefixes: bool = False, is_exact: bool = False
    ) -> list[np.ndarray]:
        """Return for each sequence the log-probs of its tokens 1..T-1 at temperature 1, float32 [T - 1].

        Args:
            sequences: token ids, at least 2 per sequence.
            share_prefixes: use a trie layout instead of padding.
            is_exact: compute in fp32, whatever `compute_dtype` is.
        """
        episodes = [bare_episode(ids, index) for index, ids in enumerate(sequences)]
        one = self._tensors(micro_batch(episodes, share_prefixes), with_reference=False)
        module = self.module[DEFAULT_MODULE_ID]
        with torch.no_grad(), nullcontext() if is_exact else self._autocast():
            logp_N = module({**one, "temperature": 1.0})["logp"].float().cpu().numpy()
        if self.config.fsdp:
            module.reshard()  # FSDP2 keeps gathered weights until a backward pass
        return np.split(logp_N, np.cumsum([len(ids) - 1 for ids in sequences])[:-1])

    def episode_kl(self, shard: TrainingShard) -> list[list[float]]:
        """Return for each group the k1 KL to the reference of each episode, summed over its tokens, nats.

        The KL in the reward needs it before advantages are computed. k1 = behaviour_logp - ref_logp.
        """
        groups = shard.groups()
        episodes = episodes_of(groups, [np.zeros(group.size) for group in groups])
        sums = np.zeros(len(episodes))
        for part in micro_batches(episodes, self.config.micro_batch_tokens, self._can_share):
            batch = self._tensors(part)
            kl_N = batch["behaviour_logp"] - batch["ref_logp"]
            np.add.at(sums, part.episode_N, kl_N.float().cpu().numpy())
        bounds = np.cumsum([0] + [group.size for group in groups])
        return [sums[a:b].tolist() for a, b in pairwise(bounds)]

    def _tensors(self, one: MicroBatch, with_reference: bool = True) -> dict[str, Any]:
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
        batch["temperature"] = self.config.temperature
        if self._reference is not None and with_reference:
            is_base = self._reference is self.model
            with torch.no_grad(), self._autocast(), adapters_off(self.model) if is_base else nullcontext():
                batch["ref_logp"] = token_logps(self._reference, batch)["logp"]
        return batch

    def _autocast(self) -> AbstractContextManager:
        if self.config.compute_dtype == "bfloat16":
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _load_reference(self) -> torch.nn.Module:
        if has_adapters(self.model):
            return self.model  # with its adapters off
        # From the model's own files, so that a restored run keeps the reference of the first run.
        name = self.module[DEFAULT_MODULE_ID].model_config["model"]
        return load_causal_lm(name).requires_grad_(False).to(self._device)

    def _sharing_is_exact(self) -> bool:
        """Return whether trie and padded log-probs agree on the real weights; log a warning if not."""
        config = self.model.config.get_text_config()
        streams = check_streams(int(config.vocab_size), _window(config), self.config.max_episode_tokens)
        try:
            shared = self.score(streams, share_prefixes=True, is_exact=True)
            padded = [self.score([stream], is_exact=True)[0] for stream in streams]
            gap = max(float(np.abs(a - b).max()) for a, b in zip(shared, padded, strict=True))
            reason = f"its log-probs differ by {gap:.3g} nats"
        except (TypeError, ValueError, RuntimeError) as error:  # the architecture does not support a trie
            gap, reason = float("inf"), f"{type(error).__name__}: {error}"
        if gap <= SHARING_TOLERANCE:
            return True
        logger.warning(
            "prefix sharing is off for %s: %s; training goes on with padding, slower and correct",
            type(self.model).__name__,
            reason,
        )
        return False


def check_streams(vocab_size: int, window: int | None, longest: int) -> list[list[int]]:
    """Return random token streams that exercise every kind of rectangle of a trie and exceed the sliding window.

    Args:
        vocab_size: token ids are in [0, vocab_size).
        window: window of the widest sliding layer, tokens; None if there is none.
        longest: maximum tokens of an episode, and of a stream.
    """
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
