"""Covariance clip: tokens whose covariance of advantage and log-prob is high lose their gradient, some at random.

    cov_t = (A_t - mean A) (logp_t - mean logp)       means over the whole batch
    eligible: lower < cov < upper, and the clip rule left the token its gradient
    chosen: floor(cov_clip_ratio * N) of them, those of the lowest key

A token's key is a hash of its group, episode and place, so the same tokens are chosen whatever the sharding.

Source: Cui et al. 2025 (Clip-Cov), arXiv 2505.22617 section 4; the values are those of SPEAR, arXiv 2509.22601.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

_MIX = np.uint64(0x9E3779B97F4A7C15)


def key_of_episode(group_id: str, g: int) -> int:
    """Return 62 bits that name an episode, the same in every process; a group's id names its iteration."""
    digest = hashlib.blake2b(f"{group_id}/{g}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def keys_of(episode_key_N: np.ndarray, place_N: np.ndarray) -> np.ndarray:
    """Return a key for each token, int64 below 2^62, from that of its episode and its place in it."""
    with np.errstate(over="ignore"):  # the wrap around is the hash
        x = episode_key_N.astype(np.uint64) + _MIX * (place_N.astype(np.uint64) + np.uint64(1))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(2)).astype(np.int64)


def eligible(
    advantage_N: torch.Tensor,
    logp_N: torch.Tensor,
    means: tuple[float, float],
    window: tuple[float, float],
    weight_N: torch.Tensor,
) -> torch.Tensor:
    """Say which tokens may be chosen.

    Args:
        advantage_N: of each token.
        logp_N: log-probs under the policy in training, nats.
        means: of advantages and of log-probs over the whole batch.
        window: lower and upper covariance, both outside.
        weight_N: of the clip rule; 0 where it took the gradient away.
    """
    covariance_N = (advantage_N - means[0]) * (logp_N - means[1])
    return (covariance_N > window[0]) & (covariance_N < window[1]) & (weight_N != 0)


def threshold(eligible_key_N: np.ndarray, num: int) -> int:
    """Return the key below which `num` of the eligible tokens lie, or all where there are fewer."""
    if num >= len(eligible_key_N):
        return 1 << 62
    return int(np.partition(eligible_key_N, num)[num]) if num > 0 else -1
