"""Spacing rules without a forgetting curve of their own: Leitner boxes, fixed and expanding intervals, no spacing.

Their recall follows the simplest curve that agrees with their intervals, the exponential:

    R = desired_retention^(elapsed / interval)

A rule's stability S is taken as the days until recall is 0.9. Other retentions stretch the interval,
interval = scale S ln(desired_retention) / ln(0.9), which is scale S at 0.9. `fit` changes `scale` and `untrained_gain`.

Sources: Leitner 1972, "So lernt man lernen"; Bhattacharya et al. 2025, arXiv 2507.21109 (expanding, "TFC-SR").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rllib_srl.common.setting_tables import setting
from rllib_srl.replay.schedule.spacing.fitting import Knob
from rllib_srl.replay.schedule.spacing.rule import SpacingRule, Visit
from rllib_srl.replay.schedule.spacing.state import SpacingState

NATURAL_RETENTION = 0.9  # recall after scale * S days, by definition of S in these rules


@dataclass(frozen=True, kw_only=True)
class ExponentialRule(SpacingRule):
    """Base class of rules that set intervals and model no forgetting. Invariant: R is 0.9 after scale * S days."""

    scale: float = setting(1.0, "factor of every interval, fitted by `fit`")

    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {**SpacingRule.RANGES, "scale": (1e-3, 1e6)}

    def knobs(self) -> dict[str, Knob]:
        """Return `scale` and the parameters common to all rules; the prior on `scale` is wide (uninformative)."""
        return {"scale": Knob(self.scale, *self.RANGES["scale"], width=3.0)} | super().knobs()

    def _recall(self, stability_N: np.ndarray, elapsed_N: np.ndarray) -> np.ndarray:
        return NATURAL_RETENTION ** (elapsed_N / (self.scale * stability_N))

    def _days(self, stability_N: np.ndarray) -> np.ndarray:
        return self.scale * stability_N * (math.log(self.desired_retention) / math.log(NATURAL_RETENTION))


@dataclass(frozen=True, kw_only=True)
class Leitner(ExponentialRule):
    """Boxes of growing intervals: a success moves an item to the next box, a failure back to the first.

    New items are in the first box. If `untrained_gain` has left an item between two boxes, a success moves it to the
    next longer one.

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
        return self.desired_retention ** (elapsed_N / (self.scale * stability_N))

    def _days(self, stability_N: np.ndarray) -> np.ndarray:
        return self.scale * stability_N

    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(state), self.interval), np.zeros(len(state))


@dataclass(frozen=True, kw_only=True)
class Expanding(ExponentialRule):
    """A gap that grows by `factor` with each success and is reset to `first` after a failure.

    Differences from the source:
    1. Gaps are not rounded; `whole_days=True` rounds intervals (never the gap), halves to even, as the source does.
    2. A failure resets the gap. The source's code waits one epoch and keeps the gap, and resets it with each new task.
    3. An item is one prompt; the source has one gap for the whole buffer.

    Source: Bhattacharya et al. 2025, arXiv 2507.21109, and the notebook of github.com/pritalb/tfc-sr.
    """

    first: float = setting(1.0, "days")
    factor: float = setting(1.5, "factor of the gap after a success")
    whole_days: bool = setting(False, "round intervals to whole days")

    name: ClassVar[str] = "expanding"
    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {
        **ExponentialRule.RANGES,
        "first": (1e-3, 1e6),
        "factor": (1.0, 100.0),
    }

    def _days(self, stability_N: np.ndarray) -> np.ndarray:
        days_N = super()._days(stability_N)
        return np.maximum(np.rint(days_N), 1.0) if self.whole_days else days_N

    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        old_N = np.where(visit.is_new_N, self.first, state.stability_N)
        return np.where(visit.is_success_N, old_N * self.factor, self.first), np.zeros(len(state))


@dataclass(frozen=True, kw_only=True)
class NoSpacing(SpacingRule):
    """Items are always due; recall is `desired_retention` at any time, and there is nothing to fit."""

    name: ClassVar[str] = "none"

    def knobs(self) -> dict[str, Knob]:
        """Return no parameters."""
        return {}

    def _recall(self, stability_N: np.ndarray, elapsed_N: np.ndarray) -> np.ndarray:
        return np.full(len(stability_N), self.desired_retention)

    def _days(self, stability_N: np.ndarray) -> np.ndarray:
        return np.zeros(len(stability_N))

    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(len(state)), np.zeros(len(state))
