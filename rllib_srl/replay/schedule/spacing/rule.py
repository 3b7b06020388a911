"""Base class of all spacing rules: their contract and shared code.

    state --review(grade, elapsed, trained)--> state        pure, vectorised: items are independent
    state --retrievability(elapsed)--> recall in [0, 1]     non-increasing in time; desired_retention at the interval
    log   --fit--> a rule with refitted parameters

Time is a float number of days; the caller converts iterations to days. A grade of 1 (Again) is a failure, 2 (Hard),
3 (Good) and 4 (Easy) are successes. A success never shortens the interval (except for `srl1` with `faithful`).

A rule is a frozen dataclass whose fields are its parameters. It must define `_next`, `_recall` and `_days`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from rllib_srl.common.setting_tables import setting
from rllib_srl.replay.schedule.calibration import ReviewLog
from rllib_srl.replay.schedule.spacing import fitting
from rllib_srl.replay.schedule.spacing.state import SpacingState

MIN_STABILITY, MAX_STABILITY = 1e-3, 1e12  # days; the upper bound keeps products finite


@dataclass(frozen=True)
class Visit:
    """Input of a review, one row an item. Invariant: rows match those of the reviewed state."""

    grade_N: np.ndarray  # int64, 1 to 4
    elapsed_N: np.ndarray  # float64 days since the last review; 0 for new items
    is_new_N: np.ndarray
    is_success_N: np.ndarray
    diversity_N: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class SpacingRule(ABC):
    """A rule that sets intervals. Invariant: immutable; every parameter is within its range in `RANGES`."""

    desired_retention: float = setting(0.9, "recall at which an item becomes due")
    untrained_gain: float = setting(1.0, "share of the log stability gain kept by a success that trained nothing")
    maximum_interval: float = setting(36_500.0, "days")

    name: ClassVar[str]
    # Parameter -> (low, high), both inclusive unless the range is open.
    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {
        "untrained_gain": (0.0, 1.0),
        "maximum_interval": (1e-3, math.inf),
    }

    def __post_init__(self) -> None:
        """Check every parameter.

        Raises:
            ValueError: naming all parameters out of range at once.
        """
        if faults := self._faults():
            raise ValueError("; ".join(faults))

    def review(
        self,
        state: SpacingState,
        grade_N: np.ndarray,
        elapsed_N: np.ndarray,
        trained_N: np.ndarray,
        diversity_N: np.ndarray | None = None,
    ) -> SpacingState:
        """Return the states after one visit of each item.

        A success that trained nothing gains less stability: S' = S (S_full / S)^untrained_gain. The memory takes equal
        rewards for that: no gradient with most settings.

        Args:
            state: before the visit.
            grade_N: 1 to 4.
            elapsed_N: days since the last review, at least 0; ignored for new items.
            trained_N: whether the visit was trained on; False: only a test.
            diversity_N: required by `srl1` with `faithful=True`; ignored by all other rules.

        Raises:
            ValueError: naming all arrays of a wrong shape or with invalid values.
        """
        arrays = _checked(state, grade_N, elapsed_N, trained_N, diversity_N)
        return self._after(state, *arrays)

    def retrievability(self, state: SpacingState, elapsed_N: np.ndarray) -> np.ndarray:
        """Return the probability of recall after `elapsed_N` days, in [0, 1]; 0 for items never reviewed."""
        is_new_N = state.reps_N == 0
        stability_N = np.where(is_new_N, 1.0, state.stability_N)
        recall_N = self._recall(stability_N, np.where(is_new_N, 0.0, np.maximum(elapsed_N, 0.0)))
        return np.where(is_new_N, 0.0, recall_N)

    def interval_of(self, stability_N: np.ndarray) -> np.ndarray:
        """Return the days after which recall has fallen to `desired_retention`, at most `maximum_interval`.

        After `fit`, use it to recompute the intervals of stored items.
        """
        interval_N: np.ndarray = np.minimum(self._days(stability_N), self.maximum_interval)
        return interval_N

    def fit(self, log: ReviewLog, min_reviews: int = 64) -> Self:
        """Return a copy with the parameters of least log loss on the log, under a prior centred on this rule's.

        The log is replayed from each item's first visit, so the fit also changes the states it passes through. The
        states of stored items are not recomputed; their intervals can be, with `interval_of`.

        Args:
            log: visits in chronological order.
            min_reviews: lowest number of visits with a prediction.

        Raises:
            ValueError: the log has too few reviews, or the rule has no parameter to fit.
        """
        return fitting.fit(self, log, min_reviews)

    def parameters(self) -> dict[str, Any]:
        """Return every parameter: `make_spacing(rule.name, **rule.parameters())` equals `rule`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def knobs(self) -> dict[str, fitting.Knob]:
        """Return the parameters that `fit` may change, by name; `turned` accepts the same names."""
        return {"untrained_gain": fitting.Knob(self.untrained_gain, 0.0, 1.0, is_log=False)}

    def turned(self, values: Mapping[str, float]) -> Self:
        """Return a copy with new values of the parameters in `knobs`."""
        return dataclasses.replace(self, **values)

    @abstractmethod
    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return stability and difficulty after a visit; `streak_N` is the streak after it."""

    @abstractmethod
    def _recall(self, stability_N: np.ndarray, elapsed_N: np.ndarray) -> np.ndarray:
        """Return the probability of recall; stability is positive."""

    @abstractmethod
    def _days(self, stability_N: np.ndarray) -> np.ndarray:
        """Return the days after which recall is `desired_retention`."""

    def _is_success(self, grade_N: np.ndarray) -> np.ndarray:
        return grade_N >= 2

    def _faults(self) -> list[str]:
        faults = []
        if not 0 < self.desired_retention < 1:
            faults.append(f"desired_retention = {self.desired_retention}; expected more than 0 and less than 1")
        for name, (low, high) in self.RANGES.items():
            if not low <= getattr(self, name) <= high:
                faults.append(f"{name} = {getattr(self, name)}; expected {low:g} to {high:g}")
        return faults

    def _after(
        self,
        state: SpacingState,
        grade_N: np.ndarray,
        elapsed_N: np.ndarray,
        trained_N: np.ndarray,
        diversity_N: np.ndarray | None = None,
    ) -> SpacingState:
        """Compute `review` on validated arrays."""
        is_new_N, is_success_N = state.reps_N == 0, self._is_success(grade_N)
        streak_N = np.where(is_success_N, np.maximum(state.streak_N, 0) + 1, np.minimum(state.streak_N, 0) - 1)
        visit = Visit(grade_N, np.where(is_new_N, 0.0, elapsed_N), is_new_N, is_success_N, diversity_N)
        stability_N, difficulty_N = self._next(state, visit, streak_N)
        if self.untrained_gain < 1:
            weak_N = is_success_N & ~is_new_N & ~trained_N
            old_N = np.where(weak_N, state.stability_N, 1.0)
            stability_N = np.where(weak_N, old_N * (stability_N / old_N) ** self.untrained_gain, stability_N)
        stability_N = np.minimum(stability_N, MAX_STABILITY)
        return SpacingState(
            stability_N=stability_N,
            difficulty_N=difficulty_N,
            interval_N=self.interval_of(stability_N),
            reps_N=state.reps_N + 1,
            lapses_N=state.lapses_N + (~is_success_N & (state.streak_N > 0)),
            streak_N=streak_N,
        )


def _checked(
    state: SpacingState, grade_N: Any, elapsed_N: Any, trained_N: Any, diversity_N: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Validate the arrays of a review, and return them in their types.

    Raises:
        ValueError: naming all invalid arrays.
    """
    grade_N, elapsed_N = np.asarray(grade_N), np.asarray(elapsed_N, np.float64)
    trained_N = np.asarray(trained_N, np.bool_)
    diversity_N = None if diversity_N is None else np.asarray(diversity_N, np.float64)
    arrays = {"grade_N": grade_N, "elapsed_N": elapsed_N, "trained_N": trained_N, "diversity_N": diversity_N}
    want = (len(state),)
    faults = [
        f"{name} has shape {array.shape}, the state has {len(state)} items"
        for name, array in arrays.items()
        if array is not None and array.shape != want
    ]
    if not ((grade_N >= 1) & (grade_N <= 4) & (grade_N % 1 == 0)).all():
        faults.append(f"grade_N holds {sorted(set(np.unique(grade_N).tolist()) - {1, 2, 3, 4})[:5]}; expected 1 to 4")
    if elapsed_N.shape == want:
        bad_N = (state.reps_N > 0) & ~((elapsed_N >= 0) & np.isfinite(elapsed_N))
        if bad_N.any():
            faults.append(f"elapsed_N holds {elapsed_N[bad_N][:5].tolist()}; expected finite days, at least 0")
    if diversity_N is not None and not (diversity_N >= 0).all():
        faults.append("diversity_N holds values below 0 or nan; expected at least 0")
    if faults:
        raise ValueError("; ".join(faults))
    return grade_N.astype(np.int64), elapsed_N, trained_N, diversity_N
