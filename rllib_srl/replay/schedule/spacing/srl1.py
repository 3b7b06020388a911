"""Spacing rule of the hybrid SRL replay buffer that this project replaces, corrected or in its original form.

    success   e <- min(2.5, e + 0.1),  interval <- interval max(1, 1.5 (e - 1))
    failure   e <- max(1.3, e - 0.2),  interval <- 1                               e = 2, interval = 1 at first

Faults of the source's rule, and their corrections:
1. Its diversity D divides by a range that may vanish: calibrated in rllib_srl/replay/diversity/measures.py.
2. D divides the stored interval at every update, so it compounds: here the stored interval is the base interval, and
   the buffer applies diversity to the due date only.
3. With an easiness below 1.667 a success shortened the interval: the factor is at least 1.
4. Items that never succeed take every slot: the buffer detects and caps leeches.
5. Batches are short or empty if few items are due: filled by rllib_srl/replay/selection/rules.py.
6. Variance set only once, first-in-first-out eviction, no ids, no checkpoints: see the memory's tables.

`faithful=True` is the source's rule without corrections 2 and 3: interval <- interval 1.5 (e - 1) / (1 + alpha D) after
a success, 1 / (1 + alpha D) after a failure; `maximum_interval` and `desired_retention` do not affect its intervals.
The source's success is a score of at least 0.9: grade by the mean reward and set `success_grade=4` to reproduce it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rllib_srl.common.setting_tables import setting
from rllib_srl.replay.schedule.spacing.fitting import Knob
from rllib_srl.replay.schedule.spacing.rule import Visit
from rllib_srl.replay.schedule.spacing.simple import ExponentialRule
from rllib_srl.replay.schedule.spacing.state import SpacingState

FIRST_EASINESS, LEAST_EASINESS, MOST_EASINESS = 2.0, 1.3, 2.5
SHORTEST = np.finfo(np.float64).tiny  # lower bound: the faithful rule can shrink intervals without limit


@dataclass(frozen=True, kw_only=True)
class SRL1(ExponentialRule):
    """The source's rule. Invariant: difficulty holds the easiness, in [1.3, 2.5]; stability holds the interval."""

    faithful: bool = setting(False, "the rule as published, without the corrections of this project")
    alpha: float = setting(1.0, "weight of diversity, with `faithful` only")
    success_grade: int = setting(2, "lowest grade that counts as a success")

    name: ClassVar[str] = "srl1"
    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {
        **ExponentialRule.RANGES,
        "alpha": (0.0, 1e6),
        "success_grade": (2, 4),
    }

    def knobs(self) -> dict[str, Knob]:
        """Return the parameters to fit; none with `faithful`, whose intervals depend on unlogged diversity."""
        return {} if self.faithful else super().knobs()

    def interval_of(self, stability_N: np.ndarray) -> np.ndarray:
        """Return the days until an item is due; the faithful rule ignores `maximum_interval`."""
        return stability_N if self.faithful else super().interval_of(stability_N)

    def _recall(self, stability_N: np.ndarray, elapsed_N: np.ndarray) -> np.ndarray:
        if not self.faithful:
            return super()._recall(stability_N, elapsed_N)
        with np.errstate(over="ignore"):  # a vanishing interval: recall 0
            recall_N: np.ndarray = self.desired_retention ** (elapsed_N / stability_N)
            return recall_N

    def _is_success(self, grade_N: np.ndarray) -> np.ndarray:
        return grade_N >= self.success_grade

    def _faults(self) -> list[str]:
        faults = super()._faults()
        if self.faithful and (self.untrained_gain, self.scale) != (1.0, 1.0):
            given = f"untrained_gain = {self.untrained_gain}, scale = {self.scale}"
            faults.append(f"faithful = True with {given}; expected 1 for both")
        return faults

    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        easiness_N = np.where(visit.is_new_N, FIRST_EASINESS, state.difficulty_N)
        easiness_N = np.where(
            visit.is_success_N,
            np.minimum(easiness_N + 0.1, MOST_EASINESS),
            np.maximum(easiness_N - 0.2, LEAST_EASINESS),
        )
        old_N = np.where(visit.is_new_N, 1.0, state.stability_N)
        factor_N = 1.5 * (easiness_N - 1)
        if not self.faithful:
            return np.where(visit.is_success_N, old_N * np.maximum(factor_N, 1.0), 1.0), easiness_N
        if visit.diversity_N is None:
            raise ValueError("srl1 with faithful = True divides by the diversity; expected diversity_N (zeros: none)")
        interval_N = np.where(visit.is_success_N, old_N * factor_N, 1.0) / (1 + self.alpha * visit.diversity_N)
        return np.maximum(interval_N, SHORTEST), easiness_N


def source_diversity(variance_N: np.ndarray, distance_N: np.ndarray, beta: float = 0.5) -> np.ndarray:
    """Return the source's uncorrected D = beta variance + (1 - beta) distance / (max - min + 1e-6).

    Args:
        variance_N: reward variance of each item's group.
        distance_N: distance of each item's embedding from the centroid of the buffer.
        beta: in [0, 1].
    """
    spread = float(np.ptp(distance_N)) if len(distance_N) else 0.0
    return beta * variance_N + (1 - beta) * distance_N / (spread + 1e-6)
