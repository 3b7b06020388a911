"""Scheduling state of items, common to all spacing rules: six numbers, one array each.

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

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


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
