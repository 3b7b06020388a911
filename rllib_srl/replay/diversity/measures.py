"""Measure the diversity of an item: how much its rewards vary, and how far it lies from all other items.

    variance    min(1, 4 S), S the variance of the rewards of its last visit: 1 if half of the episodes succeed
    novelty     mean cosine distance to the `NEIGHBOURS` nearest items, at most 1
    diversity   the mean of the two, in [0, 1] ──> shorter intervals, more draws by `srl`, eviction by `least_diverse`

Source: Jiang et al. 2025, arXiv 2509.04575, section on prioritisation (variance and distance).
"""

from __future__ import annotations

import numpy as np

NEIGHBOURS = 8


def diversity(variance_N: np.ndarray, novelty_N: np.ndarray) -> np.ndarray:
    """Return the mean of min(1, 4 S) and the novelty of each item, [N] in [0, 1].

    4 S = 4 p (1 - p) for rewards of 0 and 1; other rewards may have a larger variance, hence the minimum. Where the
    novelty is nan, not known yet, the first part counts alone.
    """
    part_N = np.minimum(1.0, 4.0 * np.asarray(variance_N, np.float64))
    return np.where(np.isnan(novelty_N), part_N, (part_N + novelty_N) / 2)


def novelty(similarity_NK: np.ndarray) -> np.ndarray:
    """Return the mean cosine distance of each item to its neighbours, at most 1, [N].

    Similarities are nan where there were fewer than K neighbours. Without neighbours novelty is 1, the distance of
    orthogonal vectors.
    """
    is_there_NK = np.isfinite(similarity_NK)
    num_N = is_there_NK.sum(axis=1)
    total_N = np.where(is_there_NK, 1.0 - similarity_NK, 0.0).sum(axis=1)
    return np.where(num_N > 0, np.minimum(1.0, total_N / np.maximum(num_N, 1)), 1.0)


def interval_factor(diversity_N: np.ndarray, coeff: float) -> np.ndarray:
    """Return 1 / (1 + coeff D) in [1 / (1 + coeff), 1], the factor of an *effective* interval, never of a base one."""
    return 1.0 / (1.0 + coeff * np.asarray(diversity_N, np.float64))
