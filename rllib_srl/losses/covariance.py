"""Covariance clip: remove the gradient of random tokens among those with a high covariance of advantage and log-prob.

    cov_t = (A_t - mean A) (logp_t - mean logp)       means over the whole batch
    eligible: lower < cov < upper, and the clip rule has not removed the token's gradient
    chosen: the floor(cov_clip_ratio * N) eligible tokens with the lowest keys

A token's key is a hash of its group, episode and position, so the choice does not depend on the sharding.

Source: Cui et al. 2025 (Clip-Cov), arXiv 2505.22617 section 4; the values are those of SPEAR, arXiv 2509.22601.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

_MIX = np.uint64(0x9E3779B97F4A7C15)


def key_of_episode(group_id: str, g: int) -> int:
    """Return a 62-bit hash of an episode, equal in every process; group ids differ between iterations."""
    digest = hashlib.blake2b(f"{group_id}/{g}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def keys_of(episode_key_N: np.ndarray, place_N: np.ndarray) -> np.ndarray:
    """Return a key per token, int64 in [0, 2^62), hashed from its episode's key and its position in the episode."""
    with np.errstate(over="ignore"):  # the hash relies on wrap-around
        x = episode_key_N.astype(np.uint64) + _MIX * (place_N.astype(np.uint64) + np.uint64(1))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    key_N: np.ndarray = ((x ^ (x >> np.uint64(31))) >> np.uint64(2)).astype(np.int64)
    return key_N


def eligible(
    advantage_N: torch.Tensor,
    logp_N: torch.Tensor,
    means: tuple[float, float],
    window: tuple[float, float],
    weight_N: torch.Tensor,
) -> torch.Tensor:
    """Return which tokens may be chosen, bool [N].

    Args:
        advantage_N: advantage of each token.
        logp_N: log-probs under the policy in training, nats.
        means: mean advantage and mean log-prob over the whole batch.
        window: open interval of covariances.
        weight_N: gradient weight of the clip rule; 0 where it removed the gradient.
    """
    covariance_N = (advantage_N - means[0]) * (logp_N - means[1])
    return (covariance_N > window[0]) & (covariance_N < window[1]) & (weight_N != 0)


def threshold(eligible_key_N: np.ndarray, num: int) -> int:
    """Return the key below which `num` of the eligible keys lie, or all of them if there are fewer."""
    if num >= len(eligible_key_N):
        return 1 << 62
    return int(np.partition(eligible_key_N, num)[num]) if num > 0 else -1
