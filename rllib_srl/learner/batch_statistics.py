"""Compute the whole-batch statistics that BAPO and the covariance clip need before the gradient.

    for each micro-batch: log-probs without gradient ──> sums ──> all-reduce over learners ──> set on each micro-batch
        BAPO        masses for every pair of bounds                                          batch["bapo_bounds"]
        cov clip    means; then the keys of eligible tokens                                  batch["is_cov_clipped"]

Cost: one more forward pass per step. It is skipped if the settings use neither
(`LossSettings.needs_batch_statistics`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rllib_srl.learner.objective import anchor_of, surrogate_of
from rllib_srl.losses.bapo import bounds_of, masses
from rllib_srl.losses.covariance import eligible, keys_of, threshold
from rllib_srl.losses.ratio import ratio_of
from rllib_srl.losses.settings import LossSettings

Looked = list[tuple[dict[str, Any], torch.Tensor]]  # micro-batches and their log-probs


def survey(
    looked: Looked,
    settings: LossSettings,
    add_up: Callable[[torch.Tensor], torch.Tensor],
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, float]:
    """Set `bapo_bounds` and `is_cov_clipped` on each micro-batch and return metrics by name; a collective.

    Args:
        looked: micro-batches after their first pass, with log-probs under the policy in training (nats, no gradient);
            a learner without micro-batches must call this too.
        settings: loss settings.
        add_up: sums a tensor over learners.
        gather: concatenates the int64 vectors of all learners.
    """
    stats: dict[str, float] = {}
    if settings.clip_rule == "bapo":
        stats |= _bound(looked, settings, add_up)
    if settings.cov_clip_ratio:
        stats |= _clip_covariance(looked, settings, add_up, gather)
    return stats


def _bound(looked: Looked, settings: LossSettings, add_up: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
    total_K2 = masses(settings, *(torch.zeros(0) for _ in range(3)))
    for batch, logp_N in looked:
        anchor_logp_N, _ = anchor_of(batch, settings)
        ratio_N = ratio_of(settings.ratio_level, logp_N, anchor_logp_N, batch["episode"])
        total_K2 = total_K2.to(ratio_N.device)
        total_K2 = total_K2 + masses(settings, ratio_N, batch["advantage"], batch["behaviour_logp"])
    bounds, num_steps = bounds_of(settings, add_up(total_K2))
    for batch, _ in looked:
        batch["bapo_bounds"] = bounds
    return {"bapo_low": bounds[0], "bapo_high": bounds[1], "bapo_steps": float(num_steps)}


def _clip_covariance(
    looked: Looked,
    settings: LossSettings,
    add_up: Callable[[torch.Tensor], torch.Tensor],
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, float]:
    played = [(batch, logp_N) for batch, logp_N in looked if not batch["is_reused"]]
    sums = torch.zeros(3, dtype=torch.float64)
    for batch, logp_N in played:
        own = [len(logp_N), batch["advantage"].double().sum(), logp_N.double().sum()]
        sums = sums + torch.tensor([float(value) for value in own], dtype=torch.float64)
    num, advantage, logp = add_up(sums).tolist()
    means = (advantage / max(1.0, num), logp / max(1.0, num))
    chances, keys = [], []
    for batch, logp_N in played:
        _, weight_N = surrogate_of(batch, logp_N, anchor_of(batch, settings)[0], settings)
        chances.append(eligible(batch["advantage"], logp_N, means, settings.cov_clip_window, weight_N))
        keys.append(token_keys(batch))
    own_keys = [key_N[chance_N] for key_N, chance_N in zip(keys, chances, strict=True)]
    all_keys = gather(torch.cat([torch.zeros(0, dtype=torch.int64), *(key.cpu() for key in own_keys)]))
    last = threshold(all_keys.cpu().numpy(), int(settings.cov_clip_ratio * num + 1e-9))
    for (batch, _), key_N, chance_N in zip(played, keys, chances, strict=True):
        batch["is_cov_clipped"] = chance_N & (key_N < last)
    num_clipped = float((all_keys < last).sum())
    return {"cov_clipped": num_clipped / max(1.0, num), "cov_eligible": len(all_keys) / max(1.0, num)}


def token_keys(batch: dict[str, Any]) -> torch.Tensor:
    """Return a key per token, int64 [N], hashed from its episode's key and its position among the episode's tokens.

    Args:
        batch: `episode` [N], with the tokens of an episode contiguous; `episode_keys`, by episode index.
    """
    episode_N = batch["episode"].cpu().numpy()
    begins_N = np.flatnonzero(np.diff(episode_N, prepend=-1))
    place_N = np.arange(len(episode_N)) - np.repeat(begins_N, np.diff(begins_N, append=len(episode_N)))
    keys_N = keys_of(np.asarray(batch["episode_keys"])[episode_N], place_N)
    return torch.from_numpy(keys_N).to(batch["episode"].device)


def gathered(own_N: torch.Tensor, num_learners: int, device: Any) -> torch.Tensor:
    """Return the int64 vectors of all learners, concatenated in the order of the learners; a collective."""
    if num_learners < 2:
        return own_N
    size = torch.tensor([len(own_N)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(num_learners)]
    torch.distributed.all_gather(sizes, size)
    longest = max(1, *(int(one) for one in sizes))
    padded = torch.zeros(longest, dtype=torch.int64, device=device)
    padded[: len(own_N)] = own_N.to(device)
    parts = [torch.zeros_like(padded) for _ in range(num_learners)]
    torch.distributed.all_gather(parts, padded)
    return torch.cat([part[: int(one)] for part, one in zip(parts, sizes, strict=True)])


def looked_at(
    micro_batches: Sequence[dict[str, Any]], look: Callable[[dict[str, Any]], torch.Tensor]
) -> Looked:
    """Return each micro-batch with its detached log-probs, computed by `look`."""
    return [(batch, look(batch).detach()) for batch in micro_batches]
