"""Measure the diversity of an item: raw parts, calibrated to [0, 1] by rank, then averaged.

    rewards_G            -> group_variance      largest if the policy both succeeds and fails
    neighbours           -> novelty             mean cosine distance to the k nearest items
    centroid             -> centroid_distance   cosine distance to the mean of all items
    cluster_share        -> rarity              share of the items that lie in other coarse clusters
    turns, novelty       -> episodic_novelty    distance between the turns of an episode, scaled by novelty
                each -> Calibrator.rank -> combine -> diversity D in [0, 1] -> interval_factor, draws

Calibration by rank does not divide by a range, so nearly equal values (two items, identical items, the distances of 256
random vectors) are not inflated; a value equal to all others has rank 0.5. Values are compared up to rounding.

`bonus` is independent of this: it returns factors for the advantages of one group, from the distance of each episode to
the group's centre. Differences from the paper:
1. Equation 6 as printed divides by a range that may vanish, which makes it unbounded; groups whose distances differ
   by at most 1/1000 of the largest get ones.
2. "minmax" and "mean1" are additions; "paper" is equation 6 and multiplies the effective learning rate.

Sources: Jiang et al. 2025, arXiv 2509.04575 (ExIt) equation 6 and section on prioritisation; Badia et al. 2020,
arXiv 2002.06038 (episodic times lifelong novelty); Aggarwal 2006, "On biased reservoir sampling in the presence of
stream evolution", VLDB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

PARTS: dict[str, str] = {
    "variance": "of the rewards of the last visit",
    "novelty": "mean distance to the k nearest items",
    "centroid": "distance to the mean of all items",
    "rarity": "share of the items in other coarse clusters",
    "episodic": "distance between the turns of an episode, times novelty",
}
LEAST_RANGE = 1e-3  # of the distances in a group, relative to the largest


def group_variance(rewards_G: np.ndarray) -> float:
    """Return min(1, 4 S), in [0, 1], where S is the population variance of a group's rewards.

    4 p (1 - p) for rewards of 0 and 1. Rewards outside [0, 1] may have a larger variance, hence the minimum.

    Source: Jiang et al. 2025, arXiv 2509.04575 section 3 (S, at most 0.25).
    """
    return min(1.0, 4.0 * float(np.var(np.asarray(rewards_G, np.float64))))


def episode_spread(vectors_GD: np.ndarray) -> np.ndarray:
    """Return the Euclidean distance of each episode's vector to the mean of its group, [G].

    Source: Jiang et al. 2025, arXiv 2509.04575 equation 6, ||e_i - mean e||.
    """
    vectors_GD = np.asarray(vectors_GD, np.float64)
    distance_G: np.ndarray = np.linalg.norm(vectors_GD - vectors_GD.mean(axis=0), axis=1)
    return distance_G


def novelty(distance_NK: np.ndarray) -> np.ndarray:
    """Return the mean distance of each item to its neighbours, [N] in [0, 2].

    Args:
        distance_NK: cosine distances, nan where there were fewer than K neighbours. Without neighbours, novelty is 1,
            the distance of orthogonal vectors.
    """
    is_there_NK = np.isfinite(distance_NK)
    num_N = is_there_NK.sum(axis=1)
    total_N = np.where(is_there_NK, distance_NK, 0.0).sum(axis=1)
    return np.where(num_N > 0, total_N / np.maximum(num_N, 1), 1.0)


def centroid_distance(vectors_ND: np.ndarray, centroid_D: np.ndarray) -> np.ndarray:
    """Return the cosine distance of unit vectors to the centroid, [N] in [0, 2].

    A zero centroid (nothing stored, or vectors that cancel out) is at distance 1 from everything.
    """
    length = float(np.linalg.norm(np.asarray(centroid_D, np.float64)))
    if length < 1e-6:
        return np.ones(len(vectors_ND))
    return 1.0 - np.clip(np.asarray(vectors_ND, np.float64) @ (centroid_D / length), -1.0, 1.0)


def rarity(share_N: np.ndarray) -> np.ndarray:
    """Return 1 - share: the share of items in other coarse clusters, [N] in [0, 1]."""
    return 1.0 - np.asarray(share_N, np.float64)


def episodic_novelty(turns_TD: np.ndarray, item_novelty: float, num_neighbours: int = 3) -> float:
    """Return the mean distance between the turns of an episode, scaled by the item's novelty.

    mean over t > 1 of (mean cosine distance of turn t to its nearest earlier turns)  x  (1 + novelty)

    As in the source, lifelong novelty scales episodic novelty by at least 1. Differences:
    1. A mean distance instead of an inverse kernel sum.
    2. The scale is 1 + novelty, in [1, 3], instead of a normalised prediction error clipped to [1, 5].

    Args:
        turns_TD: unit vectors of the turns in order. For fewer than two turns, the mean distance counts as 1.
        item_novelty: of the item in the memory, in [0, 2].
        num_neighbours: maximum number of earlier turns to compare with.

    Source: Badia et al. 2020, arXiv 2002.06038 section 2.
    """
    scale = 1.0 + item_novelty
    if len(turns_TD) < 2:
        return scale
    turns_TD = np.asarray(turns_TD, np.float64)
    distance_TT = 1.0 - np.clip(turns_TD @ turns_TD.T, -1.0, 1.0)
    nearest = [np.sort(distance_TT[t, :t])[:num_neighbours].mean() for t in range(1, len(turns_TD))]
    return scale * float(np.mean(nearest))


class Calibrator:
    """Rank values among a reservoir of recent ones.

    rank(x) = (number below x + half the number equal to x) / number        0.5 while the reservoir is empty

    Invariant: holds at most `capacity` values. Once full, a new value replaces a random one, so the probability that a
    value is still held falls by a factor e every `capacity` values, and the ranks follow drift.
    """

    def __init__(self, seed: int, capacity: int = 1024, resolution: float = 1e-6) -> None:
        """Create an empty reservoir.

        Args:
            seed: of the random replacements.
            capacity: maximum number of values held.
            resolution: values are rounded to multiples of it before comparison.

        Raises:
            ValueError: naming every value out of its range.
        """
        faults = [] if capacity >= 1 else [f"capacity = {capacity}; expected at least 1"]
        if not resolution > 0:
            faults.append(f"resolution = {resolution}; expected above 0")
        if faults:
            raise ValueError("Calibrator: " + "; ".join(faults))
        self._generator = np.random.default_rng(np.random.SeedSequence([seed]))
        self._capacity, self._resolution = capacity, resolution
        self._values = np.empty(0, np.float64)
        self._sorted: np.ndarray | None = None

    def __len__(self) -> int:
        """Return the number of values held."""
        return len(self._values)

    def add(self, values_N: np.ndarray) -> None:
        """Add values; one call with N values is equivalent to N calls.

        Raises:
            ValueError: a value is not finite.
        """
        values_N = self._rounded(values_N)
        if not np.isfinite(values_N).all():
            raise ValueError(f"{int((~np.isfinite(values_N)).sum())} of {len(values_N)} values are not finite")
        room = self._capacity - len(self._values)
        self._values = np.concatenate([self._values, values_N[:room]])
        for value in values_N[room:]:
            self._values[self._generator.integers(self._capacity)] = value
        self._sorted = None

    def rank(self, values_N: np.ndarray) -> np.ndarray:
        """Return the rank of each value among those held, [N] in [0, 1]: monotone, 0.5 if all values are equal."""
        values_N = self._rounded(values_N)
        if len(self._values) == 0:
            return np.full(len(values_N), 0.5)
        if self._sorted is None:
            self._sorted = np.sort(self._values)
        num_below = np.searchsorted(self._sorted, values_N, "left")
        num_not_above = np.searchsorted(self._sorted, values_N, "right")
        return (num_below + num_not_above) / (2.0 * len(self._sorted))

    def get_state(self) -> dict[str, Any]:
        """Return all state that later ranks depend on, as JSON types."""
        # Hex text: a list of numbers would take a hundred times as long, and every commit writes it.
        return {"values": self._values.astype("<f8").tobytes().hex(), "generator": self._generator.bit_generator.state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned.

        Raises:
            ValueError: the state holds more than `capacity` values.
        """
        values_N = np.frombuffer(bytes.fromhex(state["values"]), "<f8").astype(np.float64)
        if len(values_N) > self._capacity:
            raise ValueError(f"capacity = {self._capacity}; expected at least {len(values_N)}, as in the state")
        self._values = values_N
        self._generator.bit_generator.state = state["generator"]
        self._sorted = None

    def _rounded(self, values_N: np.ndarray) -> np.ndarray:
        return np.round(np.asarray(values_N, np.float64).reshape(-1) / self._resolution) * self._resolution


def combine(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of calibrated parts, [N] in [0, 1].

    Raises:
        ValueError: no part, or a part outside [0, 1].
    """
    if len(parts) == 0:
        raise ValueError(f"parts = {parts!r}; expected at least one of {', '.join(PARTS)}")
    parts_MN = np.asarray(parts, np.float64)
    if not ((parts_MN >= 0) & (parts_MN <= 1)).all():
        raise ValueError(f"parts lie in [{parts_MN.min()}, {parts_MN.max()}]; expected [0, 1]: calibrate them first")
    mean_N: np.ndarray = parts_MN.mean(axis=0)
    return mean_N


def interval_factor(diversity_N: np.ndarray, coeff: float) -> np.ndarray:
    """Return 1 / (1 + coeff D) in [1 / (1 + coeff), 1], the factor of an *effective* interval.

    Do not apply it to base intervals.

    Args:
        diversity_N: calibrated diversity D, in [0, 1].
        coeff: at least 0; 0 gives 1.
    """
    return 1.0 / (1.0 + coeff * np.asarray(diversity_N, np.float64))


def _paper(distance_G: np.ndarray) -> np.ndarray:
    bonus_G: np.ndarray = distance_G / np.ptp(distance_G)
    return bonus_G


def _minmax(distance_G: np.ndarray) -> np.ndarray:
    bonus_G: np.ndarray = (distance_G - distance_G.min()) / np.ptp(distance_G)
    return bonus_G


def _mean1(distance_G: np.ndarray) -> np.ndarray:
    bonus_G: np.ndarray = distance_G / distance_G.mean()
    return bonus_G


BONUSES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"paper": _paper, "minmax": _minmax, "mean1": _mean1}


def bonus(distance_G: np.ndarray, mode: str) -> np.ndarray:
    """Return the factor of each episode's advantage, [G], at least 0.

    "paper"    distance / (max - min)             at least 1 for the farthest; mean d is large where ranges are small
    "minmax"   (distance - min) / (max - min)     in [0, 1]; gives the most central episode a factor of 0
    "mean1"    distance / mean                    has mean 1, which keeps the scale of the advantages

    Args:
        distance_G: distance of each episode's vector to the centre of its group, at least 0.
        mode: a key of `BONUSES`. If the range of the distances is at most 1/1000 of the largest, every mode gives ones.

    Raises:
        ValueError: an unknown mode, or distances that are negative or not finite.

    Source: Jiang et al. 2025, arXiv 2509.04575 equation 6.
    """
    distance_G = np.asarray(distance_G, np.float64)
    if mode not in BONUSES:
        raise ValueError(f"diversity_bonus = {mode!r}; expected one of {', '.join(BONUSES)}")
    if not np.isfinite(distance_G).all() or (distance_G < 0).any():
        raise ValueError(f"distance_G = {distance_G.tolist()}; expected finite distances of at least 0")
    if len(distance_G) == 0 or np.ptp(distance_G) <= LEAST_RANGE * distance_G.max():
        return np.ones(len(distance_G))
    return BONUSES[mode](distance_G)
