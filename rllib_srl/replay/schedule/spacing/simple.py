"""Spacing rules without a forgetting curve: SM-2, Leitner boxes, fixed and expanding intervals, no spacing.

Their recall follows the simplest curve that agrees with their intervals, the exponential:

    R = desired_retention^(elapsed / interval)

A rule's stability S is taken as the days until recall is 0.9. Other retentions stretch the interval,
interval = S ln(desired_retention) / ln(0.9).

Sources: Wozniak 1990, "Optimization of learning", master's thesis, section 3.2 (SM-2); Leitner 1972, "So lernt man
lernen"; Bhattacharya et al. 2025, arXiv 2507.21109 (expanding, "TFC-SR").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rllib_srl.common.setting_tables import setting
from rllib_srl.replay.schedule.spacing.rule import SpacingRule, SpacingState, Visit

NATURAL_RETENTION = 0.9  # recall after S days, by definition of S in these rules
FIRST, SECOND = 1.0, 6.0  # days, of SM-2
FIRST_EASINESS, LEAST_EASINESS = 2.5, 1.3


@dataclass(frozen=True, kw_only=True)
class ExponentialRule(SpacingRule):
    """Base class of rules that set intervals and model no forgetting. Invariant: R is 0.9 after S days."""

    def _recall(self, stability_N: np.ndarray, elapsed_N: np.ndarray) -> np.ndarray:
        recall_N: np.ndarray = NATURAL_RETENTION ** (elapsed_N / stability_N)
        return recall_N

    def _days(self, stability_N: np.ndarray) -> np.ndarray:
        return stability_N * (math.log(self.desired_retention) / math.log(NATURAL_RETENTION))


@dataclass(frozen=True, kw_only=True)
class SM2(ExponentialRule):
    """The rule of 1987: intervals of 1 day, 6 days, then the last interval times the item's easiness factor EF.

        I(1) = 1, I(2) = 6, I(n) = I(n-1) EF      n: successes in a row; a failure starts again at I(1), EF unchanged
        EF' = EF + 0.1 - (5-q) (0.08 + 0.02 (5-q)), at least 1.3; EF = 2.5 at first; q = grade + 1

    I(n) uses the EF from before the update. Differences from the source: intervals are not rounded up; items graded
    below q = 4 are not repeated at the end of a session; qualities 0 and 1 do not occur.

    Invariant: difficulty holds EF, at least 1.3; stability holds I(n).
    """

    name: ClassVar[str] = "sm2"

    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        easiness_N = np.where(visit.is_new_N, FIRST_EASINESS, state.difficulty_N)
        grown_N = state.stability_N * easiness_N
        success_N = np.where(streak_N == 1, FIRST, np.where(streak_N == 2, SECOND, grown_N))
        missed_N = 4 - visit.grade_N  # 5 - q
        eased_N = easiness_N + 0.1 - missed_N * (0.08 + 0.02 * missed_N)
        return (
            np.where(visit.is_success_N, success_N, FIRST),
            np.where(visit.is_success_N, np.maximum(eased_N, LEAST_EASINESS), easiness_N),
        )


@dataclass(frozen=True, kw_only=True)
class Leitner(ExponentialRule):
    """Boxes of growing intervals: a success moves an item to the next box, a failure back to the first.

    New items are in the first box.

    Source: Leitner 1972.
    """

    boxes: tuple[float, ...] = setting((1.0, 2.0, 4.0, 8.0, 16.0), "days, growing")

    name: ClassVar[str] = "leitner"

    def __post_init__(self) -> None:
        """Convert `boxes` from any sequence to a tuple, and check all parameters."""
        object.__setattr__(self, "boxes", tuple(float(x) for x in self.boxes))
        super().__post_init__()

    def _faults(self) -> list[str]:
        grows = all(a < b for a, b in zip((0.0, *self.boxes), self.boxes)) and self.boxes
        fault = f"boxes = {self.boxes}; expected days > 0, each more than the last"
        return super()._faults() + ([] if grows else [fault])

    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        boxes = np.array(self.boxes)
        old_N = np.where(visit.is_new_N, boxes[0], state.stability_N)
        next_N = boxes[np.minimum(np.searchsorted(boxes, old_N, side="right"), len(boxes) - 1)]
        # An item beyond the last box (the boxes were changed) stays where it is: success never shortens.
        return np.where(visit.is_success_N, np.maximum(next_N, old_N), boxes[0]), np.zeros(len(state))


@dataclass(frozen=True, kw_only=True)
class Fixed(ExponentialRule):
    """The same interval after every review; `desired_retention` sets only the predicted recall after it."""

    interval: float = setting(4.0, "days")

    name: ClassVar[str] = "fixed"
    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {**ExponentialRule.RANGES, "interval": (1e-3, 1e6)}

    def _recall(self, stability_N: np.ndarray, elapsed_N: np.ndarray) -> np.ndarray:
        recall_N: np.ndarray = self.desired_retention ** (elapsed_N / stability_N)
        return recall_N

    def _days(self, stability_N: np.ndarray) -> np.ndarray:
        return stability_N

    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(state), self.interval), np.zeros(len(state))


@dataclass(frozen=True, kw_only=True)
class Expanding(ExponentialRule):
    """A gap that grows by `factor` with each success and is reset to `first` after a failure.

    Differences from the source:
    1. Gaps and intervals are not rounded.
    2. A failure resets the gap. The source's code waits one epoch and keeps the gap, and resets it with each new task.
    3. An item is one prompt; the source has one gap for the whole buffer.

    Source: Bhattacharya et al. 2025, arXiv 2507.21109, and the notebook of github.com/pritalb/tfc-sr.
    """

    first: float = setting(1.0, "days")
    factor: float = setting(1.5, "factor of the gap after a success")

    name: ClassVar[str] = "expanding"
    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {
        **ExponentialRule.RANGES,
        "first": (1e-3, 1e6),
        "factor": (1.0, 100.0),
    }

    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        old_N = np.where(visit.is_new_N, self.first, state.stability_N)
        return np.where(visit.is_success_N, old_N * self.factor, self.first), np.zeros(len(state))


@dataclass(frozen=True, kw_only=True)
class NoSpacing(SpacingRule):
    """Items are always due; recall is `desired_retention` at any time."""

    name: ClassVar[str] = "none"

    def _recall(self, stability_N: np.ndarray, elapsed_N: np.ndarray) -> np.ndarray:
        return np.full(len(stability_N), self.desired_retention)

    def _days(self, stability_N: np.ndarray) -> np.ndarray:
        return np.zeros(len(stability_N))

    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(len(state)), np.zeros(len(state))
