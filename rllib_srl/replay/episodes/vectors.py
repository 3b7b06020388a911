"""Embed a segment as the mean of its observations, each coordinate in deviations from the running mean.

    observation -> flat numbers -> (x - mean) / deviation -> [random projection above 64 numbers] -> mean over steps

A discrete observation becomes a one-hot vector. The projection keeps distances up to a small error; its matrix is drawn
from the seed.

Sources: Welford 1962, Technometrics 4(3) (running variance); Johnson and Lindenstrauss 1984 (random projection).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

MOST_NUMBERS = 64  # of a vector


def flat(observation: Any, space: gymnasium.Space[Any] | None = None) -> np.ndarray:
    """Return the numbers of an observation in a fixed order, float64 [D]."""
    if isinstance(space, gymnasium.spaces.Discrete) and np.ndim(observation) == 0:
        return np.asarray(gymnasium.spaces.flatten(space, int(observation)), np.float64)
    if isinstance(observation, Mapping):
        parts = [flat(observation[name]) for name in sorted(observation)]
    elif isinstance(observation, tuple | list):
        parts = [flat(part) for part in observation]
    else:
        return np.asarray(observation, np.float64).reshape(-1)
    return np.concatenate(parts) if parts else np.zeros(0)


class SegmentVectors:
    """Computes the vectors. Invariant: `get_state` holds all that later vectors depend on."""

    def __init__(self, seed: int) -> None:
        """Start without observations; `seed` is that of the projection."""
        self._seed = seed
        self._num = 0
        self._mean_D = self._square_D = np.zeros(0)
        self._projection_DK: np.ndarray | None = None

    def of(self, observations: Sequence[Any], space: gymnasium.Space[Any] | None = None) -> np.ndarray:
        """Return the vector of a segment, float32 [K], K = min(D, 64); its observations enter the running mean.

        Raises:
            ValueError: observations of another size than before.
        """
        flat_TD = np.stack([flat(observation, space) for observation in observations])
        if self._num and flat_TD.shape[1] != len(self._mean_D):
            raise ValueError(
                f"an observation has {flat_TD.shape[1]} numbers; expected {len(self._mean_D)}, as before"
            )
        self._note(flat_TD)
        deviation_D = np.sqrt(self._square_D / self._num)
        # A coordinate that never changes holds rounding errors only.
        scale_D = np.where(deviation_D > 1e-9, deviation_D, np.inf)
        vector_D = (flat_TD.mean(axis=0) - self._mean_D) / scale_D
        return self._projected(vector_D).astype(np.float32)

    def _note(self, flat_TD: np.ndarray) -> None:
        if not self._num:
            self._mean_D = self._square_D = np.zeros(flat_TD.shape[1])
        num, mean_D = len(flat_TD), flat_TD.mean(axis=0)
        total, gap_D = self._num + num, mean_D - self._mean_D
        within_D = ((flat_TD - mean_D) ** 2).sum(axis=0)
        self._square_D = self._square_D + within_D + gap_D**2 * (self._num * num / total)
        self._mean_D, self._num = self._mean_D + gap_D * (num / total), total

    def _projected(self, vector_D: np.ndarray) -> np.ndarray:
        if len(vector_D) <= MOST_NUMBERS:
            return vector_D
        if self._projection_DK is None:
            generator = np.random.default_rng([self._seed, len(vector_D)])
            self._projection_DK = generator.standard_normal((len(vector_D), MOST_NUMBERS)) / np.sqrt(MOST_NUMBERS)
        projected_K: np.ndarray = vector_D @ self._projection_DK
        return projected_K

    def get_state(self) -> dict[str, Any]:
        """Return the running mean and variance."""
        return {"num": self._num, "mean": self._mean_D.copy(), "square": self._square_D.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._num = int(state["num"])
        self._mean_D, self._square_D = np.array(state["mean"]), np.array(state["square"])
        self._projection_DK = None
