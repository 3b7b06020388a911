"""Base class of all spacing rules: their contract and shared code.

    state --review(grade, elapsed)--> state                 pure, vectorised: items are independent
    state --retrievability(elapsed)--> recall in [0, 1]     non-increasing in time; desired_retention at the interval

Time is a float number of days; the caller converts iterations to days. A grade of 1 (Again) is a failure, 2 (Hard),
3 (Good) and 4 (Easy) are successes. A success never shortens the interval.

A rule is a frozen dataclass whose fields are its parameters. It must define `_next`, `_recall` and `_days`.

The scheduling state of items is common to all rules: six numbers, one array each.

| column | means | new item |
|---|---|---|
| stability | days after which recall has fallen to 0.9 (expanding, leitner, fixed: the rule's own interval) | 0 |
| difficulty | the rule's second number: FSRS's difficulty, 1 to 10; easiness for sm2; else 0 | 0 |
| interval | days from the last review to the next: the *base* interval, before diversity | 0 |
| reps | reviews | 0 |
| lapses | failures that followed a success | 0 |
| streak | successes in a row; below 0: failures in a row | 0 |
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from rllib_srl.common.setting_tables import setting

MIN_STABILITY, MAX_STABILITY = 1e-3, 1e12  # days; the upper bound keeps products finite


@dataclass(frozen=True)
class SpacingState:
    """Scheduling state of N items. Invariant: equal lengths, finite values; reps 0 means never reviewed."""

    stability_N: np.ndarray  # float64
    difficulty_N: np.ndarray  # float64
    interval_N: np.ndarray  # float64
    reps_N: np.ndarray  # int64
    lapses_N: np.ndarray  # int64
    streak_N: np.ndarray  # int64

    @classmethod
    def new(cls, num: int) -> SpacingState:
        """Return `num` items that were never reviewed."""
        floats, ints = (np.zeros(num) for _ in range(3)), (np.zeros(num, np.int64) for _ in range(3))
        return cls(*floats, *ints)

    @classmethod
    def of(cls, table: Mapping[str, np.ndarray] | np.ndarray) -> SpacingState:
        """Copy the state out of a table's columns "stability", "difficulty", ...: a dict or a structured array."""
        columns: Any = table
        return cls(
            **{
                field.name: np.array(columns[field.name[:-2]], np.float64 if n < 3 else np.int64)
                for n, field in enumerate(fields(cls))
            }
        )

    def columns(self) -> dict[str, np.ndarray]:
        """Return the arrays by column name; the inverse of `of`."""
        return {field.name[:-2]: getattr(self, field.name) for field in fields(self)}

    def __len__(self) -> int:
        """Return N."""
        return len(self.reps_N)

    def __getitem__(self, index: np.ndarray | slice) -> SpacingState:
        """Return the chosen items, by mask, indices or slice."""
        return SpacingState(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


@dataclass(frozen=True)
class Visit:
    """Input of a review, one row an item. Invariant: rows match those of the reviewed state."""

    grade_N: np.ndarray  # int64, 1 to 4
    elapsed_N: np.ndarray  # float64 days since the last review; 0 for new items
    is_new_N: np.ndarray
    is_success_N: np.ndarray


@dataclass(frozen=True, kw_only=True)
class SpacingRule(ABC):
    """A rule that sets intervals. Invariant: immutable; every parameter is within its range in `RANGES`."""

    desired_retention: float = setting(0.9, "recall at which an item becomes due")
    maximum_interval: float = setting(36_500.0, "days")

    name: ClassVar[str]
    # Parameter -> (low, high), both inclusive unless the range is open.
    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {"maximum_interval": (1e-3, math.inf)}

    def __post_init__(self) -> None:
        """Check every parameter.

        Raises:
            ValueError: naming all parameters out of range at once.
        """
        if faults := self._faults():
            raise ValueError("; ".join(faults))

    def review(self, state: SpacingState, grade_N: Any, elapsed_N: Any) -> SpacingState:
        """Return the states after one visit of each item.

        Args:
            state: before the visit.
            grade_N: 1 to 4.
            elapsed_N: days since the last review, at least 0; ignored for new items.

        Raises:
            ValueError: naming all arrays of a wrong shape or with invalid values.
        """
        grade_N, elapsed_N = _checked(state, grade_N, elapsed_N)
        is_new_N, is_success_N = state.reps_N == 0, grade_N >= 2
        streak_N = np.where(is_success_N, np.maximum(state.streak_N, 0) + 1, np.minimum(state.streak_N, 0) - 1)
        visit = Visit(grade_N, np.where(is_new_N, 0.0, elapsed_N), is_new_N, is_success_N)
        stability_N, difficulty_N = self._next(state, visit, streak_N)
        stability_N = np.minimum(stability_N, MAX_STABILITY)
        return SpacingState(
            stability_N=stability_N,
            difficulty_N=difficulty_N,
            interval_N=np.minimum(self._days(stability_N), self.maximum_interval),
            reps_N=state.reps_N + 1,
            lapses_N=state.lapses_N + (~is_success_N & (state.streak_N > 0)),
            streak_N=streak_N,
        )

    def retrievability(self, state: SpacingState, elapsed_N: np.ndarray) -> np.ndarray:
        """Return the probability of recall after `elapsed_N` days, in [0, 1]; 0 for items never reviewed."""
        is_new_N = state.reps_N == 0
        stability_N = np.where(is_new_N, 1.0, state.stability_N)
        recall_N = self._recall(stability_N, np.where(is_new_N, 0.0, np.maximum(elapsed_N, 0.0)))
        return np.where(is_new_N, 0.0, recall_N)

    def parameters(self) -> dict[str, Any]:
        """Return every parameter: `make_spacing(rule.name, **rule.parameters())` equals `rule`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @abstractmethod
    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return stability and difficulty after a visit; `streak_N` is the streak after it."""

    @abstractmethod
    def _recall(self, stability_N: np.ndarray, elapsed_N: np.ndarray) -> np.ndarray:
        """Return the probability of recall; stability is positive."""

    @abstractmethod
    def _days(self, stability_N: np.ndarray) -> np.ndarray:
        """Return the days after which recall is `desired_retention`."""

    def _faults(self) -> list[str]:
        faults = []
        if not 0 < self.desired_retention < 1:
            faults.append(f"desired_retention = {self.desired_retention}; expected more than 0 and less than 1")
        for name, (low, high) in self.RANGES.items():
            if not low <= getattr(self, name) <= high:
                faults.append(f"{name} = {getattr(self, name)}; expected {low:g} to {high:g}")
        return faults


def _checked(state: SpacingState, grade_N: Any, elapsed_N: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays of a review in their types.

    Raises:
        ValueError: naming all invalid arrays.
    """
    grade_N, elapsed_N = np.asarray(grade_N), np.asarray(elapsed_N, np.float64)
    want = (len(state),)
    faults = [
        f"{name} has shape {array.shape}, the state has {len(state)} items"
        for name, array in (("grade_N", grade_N), ("elapsed_N", elapsed_N))
        if array.shape != want
    ]
    if not ((grade_N >= 1) & (grade_N <= 4) & (grade_N % 1 == 0)).all():
        faults.append(f"grade_N holds {sorted(set(np.unique(grade_N).tolist()) - {1, 2, 3, 4})[:5]}; expected 1 to 4")
    if elapsed_N.shape == want:
        bad_N = (state.reps_N > 0) & ~((elapsed_N >= 0) & np.isfinite(elapsed_N))
        if bad_N.any():
            faults.append(f"elapsed_N holds {elapsed_N[bad_N][:5].tolist()}; expected finite days, at least 0")
    if faults:
        raise ValueError("; ".join(faults))
    return grade_N.astype(np.int64), elapsed_N
