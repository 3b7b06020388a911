"""What a run shows on a screen: a progress line, tables, sparklines. Plain text, no packages.

    iteration 3/10  reward 0.53  812 tokens/s  2m 10s left      one line, rewritten on a terminal, one a line elsewhere
"""

from __future__ import annotations

import logging
import math
import shutil
import sys
from collections import deque
from collections.abc import Sequence
from typing import TextIO

BARS = "▁▂▃▄▅▆▇█"
NUM_TIMED = 5  # iterations that the time left is judged by


class Progress:
    """The progress line of a run.

    Invariant: on a terminal at most one line is unfinished, and `note` never writes into it.
    """

    def __init__(self, last: int, stream: TextIO | None = None) -> None:
        """Show progress towards iteration `last` on `stream`, standard output by default."""
        self._last, self._stream = last, stream or sys.stdout
        self._is_live = self._stream.isatty()
        self._seconds: deque[float] = deque(maxlen=NUM_TIMED)
        self._line = ""

    def begin(self, text: str) -> None:
        """Say what is being done now; on a terminal the next line takes its place."""
        if self._is_live:
            self._show(text)
        else:
            self._write(text + "\n")

    def iteration(self, number: int, reward: float, tokens_per_s: float, seconds: float) -> None:
        """Show an iteration that is done.

        Args:
            number: of the iteration, the first is 1.
            reward: mean of its episodes; nan if there are none.
            tokens_per_s: generated, while playing.
            seconds: that the iteration took.
        """
        self._seconds.append(seconds)
        left = (self._last - number) * sum(self._seconds) / len(self._seconds)
        text = f"iteration {number}/{self._last}  reward {rounded(reward)}  {tokens_per_s:.0f} tokens/s"
        text += f"  {duration(left)} left" if number < self._last else "  done"
        if self._is_live:
            self._show(text)
        else:
            self._write(text + "\n")

    def note(self, text: str) -> None:
        """Write a line that stays, above the progress line."""
        if self._is_live and self._line:
            self._write("\r\x1b[K" + text + "\n")
            self._show(self._line)
        else:
            self._write(text + "\n")

    def end(self) -> None:
        """Finish the line, so that what follows begins a new one."""
        if self._is_live and self._line:
            self._write("\n")
        self._line = ""

    def _show(self, text: str) -> None:
        self._line = text
        self._write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1])

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class NoteHandler(logging.Handler):
    """Shows the package's warnings above the progress line instead of through it."""

    def __init__(self, progress: Progress) -> None:
        """Write to `progress`."""
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        """Show one warning."""
        self._progress.note(f"warning: {record.getMessage()}")


def show_warnings(progress: Progress) -> None:
    """Send the warnings of `rllib_srl` to `progress`, in place of an earlier one."""
    logger = logging.getLogger("rllib_srl")
    logger.handlers = [NoteHandler(progress)]
    logger.propagate = False


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Return rows as text, columns aligned; every row has as many cells as the first."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(indent + line for line in lines)


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> str:
    """Return one bar a value, the lowest for `low` and the highest for `high`; a space for nan."""

    def bar(value: float) -> str:
        if math.isnan(value):
            return " "
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return BARS[min(len(BARS) - 1, int(share * len(BARS)))]

    return "".join(map(bar, values))


def duration(seconds: float) -> str:
    """Return "45s", "2m 05s" or "3h 07m"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def rounded(value: float | None) -> str:
    """Return ".53"-style figures as "0.53", and "-" where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:.2f}"


def with_interval(accuracy: float, low: float, high: float) -> str:
    """Return "0.53  [0.47, 0.59]", the brackets holding the 95 % interval."""
    return f"{accuracy:.3f}  [{low:.3f}, {high:.3f}]"
