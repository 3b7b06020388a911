"""Weights of domains' losses by how they progress (RECAP): slow and unstable ones weigh more.

    loss of a domain, one value an iteration it was played: 1 - mean reward
    c = mean of the newer half / mean of the older half        convergence: 1 is a flat loss, above 1 a rising one
    i = std of all / (sum of the two means)                    instability
    weight = K softmax((mix c + (1 - mix) i) / T)              the sum is K; 1 until 2W values are known

1. The weight multiplies advantages after they were normalised: before it, a group's own normalisation cancels it.
2. The formula is the published one, softmax of the mixed score; the released code mixes two softmaxes.
3. At the published T = 5 weights stay within about 0.93 to 1.2.

Source: Dynamic objective reweighting (RECAP) 2025, arXiv 2510.21978; github.com/VietHoang1512/recap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

LEAST_MEAN = 1e-6  # a loss of 0 has converged: below this two means are taken to be equal


def convergence(loss_N: Sequence[float]) -> float:
    """Return the mean of the newer half over that of the older one, 1 where both are nearly 0."""
    half = len(loss_N) // 2
    old, new = float(np.mean(loss_N[:half])), float(np.mean(loss_N[half:]))
    return (new + LEAST_MEAN) / (old + LEAST_MEAN)


def instability(loss_N: Sequence[float]) -> float:
    """Return the standard deviation over the sum of the two halves' means, 0 where these are nearly 0."""
    half = len(loss_N) // 2
    return float(np.std(loss_N) / (np.mean(loss_N[:half]) + np.mean(loss_N[half:]) + LEAST_MEAN))


def recap_weights(
    losses: Mapping[str, Sequence[float]], window: int, temperature: float, mix: float
) -> dict[str, float]:
    """Return domain -> weight; 1 for a domain with fewer than 2 `window` losses, the sum is the number of domains.

    Args:
        losses: of each domain, oldest first, >= 0; the last 2 `window` count.
        window: W, iterations of each half.
        temperature: of the softmax, > 0.
        mix: weight of convergence in the score, in [0, 1]; 1 ignores instability.
    """
    known = {domain: list(loss_N)[-2 * window :] for domain, loss_N in losses.items() if len(loss_N) >= 2 * window}
    weights = dict.fromkeys(losses, 1.0)
    if not known:
        return weights
    score_K = np.array([mix * convergence(loss_N) + (1 - mix) * instability(loss_N) for loss_N in known.values()])
    return weights | dict(zip(known, scaled_softmax(score_K, temperature).tolist(), strict=True))


def scaled_softmax(score_K: np.ndarray, temperature: float) -> np.ndarray:
    """Return K softmax(score / temperature): weights whose mean is 1."""
    weight_K = np.exp((score_K - score_K.max()) / temperature)
    return len(score_K) * weight_K / weight_K.sum()
