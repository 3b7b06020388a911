"""The metrics of a run as one column each, kept up to date while the run appends to metrics.jsonl.

    metrics.jsonl --refresh--> table --columns--> {"env_runners/episode_return_mean": [0.1, 0.2, nan], ...}

An iteration that was trained again after a resume has several lines; the last one counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rllib_srl.cli.shared.tail import Tail

SMALLEST = 64  # rows for which a new column has room


class MetricsTable:
    """The table of one file. Invariant: row n of every column is the same iteration; nan where it lacks a metric."""

    def __init__(self, path: Path) -> None:
        """Prepare the table of a file, which may not exist yet; `refresh` reads it."""
        self._tail = Tail(path)
        self._clear()

    def _clear(self) -> None:
        self._row_of: dict[int, int] = {}
        self._columns: dict[str, np.ndarray] = {}
        self._room = SMALLEST
        self.faults: list[str] = []  # of the first damaged line
        self.num_damaged = 0

    @property
    def num_iterations(self) -> int:
        """Return the number of finished iterations."""
        return len(self._row_of)

    def refresh(self) -> bool:
        """Read what was appended since; return whether that was anything."""
        has_changed = self._tail.has_restarted()
        if has_changed:
            self._clear()
        for _, line in self._tail.new_lines():
            has_changed = True
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                self.faults = self.faults or [str(error)]
                self.num_damaged += 1
        return has_changed

    def iterations(self) -> np.ndarray:
        """Return the number of each iteration, ascending."""
        return np.array(sorted(self._row_of), dtype=np.int64)

    def columns(self) -> Mapping[str, np.ndarray]:
        """Return the values of each metric in the order of `iterations`."""
        order = np.array([self._row_of[number] for number in sorted(self._row_of)], dtype=np.int64)
        return {name: column[order] for name, column in self._columns.items()}

    def _take(self, line: Mapping[str, float]) -> None:
        number = int(line["iteration"])
        values = {name: float(value) for name, value in line.items()}
        row = self._row_of.setdefault(number, len(self._row_of))
        if row >= self._room:
            self._room *= 2
            self._columns = {name: self._grown(column) for name, column in self._columns.items()}
        for column in self._columns.values() if row < len(self._row_of) - 1 else ():
            column[row] = math.nan  # trained again: nothing stays of the earlier line
        for name, value in values.items():
            if name not in self._columns:
                self._columns[name] = np.full(self._room, math.nan)
            self._columns[name][row] = value

    def _grown(self, column: np.ndarray) -> np.ndarray:
        return np.concatenate([column, np.full(self._room - len(column), math.nan)])
