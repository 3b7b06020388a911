"""Compute the whole-batch statistics that BAPO and the covariance clip need before the gradient.

    for each micro-batch: log-probs without gradient ──> sums ──> all-reduce over learners ──> set on each micro-batch
        BAPO        masses for every pair of bounds                                          batch["bapo_bounds"]
        cov clip    means; then the keys of eligible tokens                                  batch["is_cov_clipped"]

Cost: one more forward pass per step. It is skipped if the settings use neither
(`LossSettings.needs_batch_statistics`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.learner.gradients import summed
from rllib_srl.learner.objective import anchor_of, surrogate_of
from rllib_srl.losses.bapo import bounds_of, masses
from rllib_srl.losses.covariance import eligible, key_of_episode, keys_of, threshold
from rllib_srl.losses.ratio import ratio_of
from rllib_srl.losses.settings import LossSettings
from rllib_srl.types import Group

Scored = Sequence[tuple[MicroBatch[torch.Tensor], torch.Tensor]]  # micro-batches and their log-probs


def set_batch_statistics(
    scored: Scored, settings: LossSettings, episode_keys: Sequence[int], num_learners: int, device: torch.device
) -> dict[str, float]:
    """Set `bapo_bounds` and `is_cov_clipped` on each micro-batch and return metrics by name; a collective.

    Args:
        scored: micro-batches after their first pass, with log-probs under the policy in training (nats, no gradient);
            a learner without micro-batches must call this too.
        settings: loss settings.
        episode_keys: from `keys_of_episodes`.
        num_learners: number of learners.
        device: device on which they communicate.
    """
    metrics: dict[str, float] = {}
    if settings.clip_rule == "bapo":
        metrics |= _set_bounds(scored, settings, num_learners, device)
    if settings.cov_clip_ratio:
        metrics |= _set_clipped_tokens(scored, settings, episode_keys, num_learners, device)
    return metrics


def _set_bounds(
    scored: Scored, settings: LossSettings, num_learners: int, device: torch.device
) -> dict[str, float]:
    total_K2 = masses(settings, *(torch.zeros(0) for _ in range(3)))
    for batch, logp_N in scored:
        anchor_logp_N, _ = anchor_of(batch, settings)
        ratio_N = ratio_of(settings.ratio_level, logp_N, anchor_logp_N, batch["episode"])
        total_K2 = total_K2.to(ratio_N.device)
        total_K2 = total_K2 + masses(settings, ratio_N, batch["advantage"], batch["behaviour_logp"])
    bounds, num_steps = bounds_of(settings, _sum_over_learners(total_K2, num_learners, device))
    for batch, _ in scored:
        batch["bapo_bounds"] = bounds
    return {"bapo_low": bounds[0], "bapo_high": bounds[1], "bapo_steps": float(num_steps)}


def _set_clipped_tokens(
    scored: Scored, settings: LossSettings, episode_keys: Sequence[int], num_learners: int, device: torch.device
) -> dict[str, float]:
    played = [(batch, logp_N) for batch, logp_N in scored if not batch["is_reused"]]
    sums = torch.zeros(3, dtype=torch.float64)
    for batch, logp_N in played:
        own = [len(logp_N), float(batch["advantage"].double().sum()), float(logp_N.double().sum())]
        sums = sums + torch.tensor(own, dtype=torch.float64)
    num, advantage, logp = _sum_over_learners(sums, num_learners, device).tolist()
    means = (advantage / max(1.0, num), logp / max(1.0, num))
    is_eligible, keys = [], []
    for batch, logp_N in played:
        _, weight_N = surrogate_of(batch, logp_N, anchor_of(batch, settings)[0], settings)
        is_eligible.append(eligible(batch["advantage"], logp_N, means, settings.cov_clip_window, weight_N))
        keys.append(_token_keys(batch["episode"], episode_keys))
    own_keys = [key_N[is_eligible_N].cpu() for key_N, is_eligible_N in zip(keys, is_eligible, strict=True)]
    own_keys_N = torch.cat([torch.zeros(0, dtype=torch.int64), *own_keys])
    all_keys = _gather_over_learners(own_keys_N, num_learners, device).cpu()
    last = threshold(all_keys.numpy(), int(settings.cov_clip_ratio * num + 1e-9))
    for (batch, _), key_N, is_eligible_N in zip(played, keys, is_eligible, strict=True):
        batch["is_cov_clipped"] = is_eligible_N & (key_N < last)
    num_clipped = float((all_keys < last).sum())
    return {"cov_clipped": num_clipped / max(1.0, num), "cov_eligible": len(all_keys) / max(1.0, num)}


def keys_of_episodes(groups: Iterable[Group]) -> list[int]:
    """Return a key per episode, in the order of `batch.layout.episodes_of`: equal on any learner that holds it."""
    return [key_of_episode(group.group_id, g) for group in groups for g in range(group.size)]


def _token_keys(episode_N: torch.Tensor, episode_keys: Sequence[int]) -> torch.Tensor:
    """Return a key per token, int64 [N], hashed from its episode's key and its position among the episode's tokens.

    Args:
        episode_N: episode of each token; the tokens of an episode are contiguous.
        episode_keys: by episode.
    """
    episode = episode_N.cpu().numpy()
    begins = np.flatnonzero(np.diff(episode, prepend=-1))
    place_N = np.arange(len(episode)) - np.repeat(begins, np.diff(begins, append=len(episode)))
    keys_N = keys_of(np.asarray(episode_keys)[episode], place_N)
    return torch.from_numpy(keys_N).to(episode_N.device)


def _sum_over_learners(own: torch.Tensor, num_learners: int, device: torch.device) -> torch.Tensor:
    return summed([own.to(device)], num_learners)[0].cpu()


def _gather_over_learners(own_N: torch.Tensor, num_learners: int, device: torch.device) -> torch.Tensor:
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
