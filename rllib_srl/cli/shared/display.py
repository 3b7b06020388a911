"""What commands print: the progress of a run, tables, numbers, and text of models that cannot steer the terminal.

    starting Ray ... 20s                                        current action, every 5 s in a log
    iteration 3/10  reward 0.53  812 tokens/s  2m 10s left      one live line on a terminal, a line each elsewhere

The terminal is rich's, imported with the first progress line: commands that only print tables start without it.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rllib_srl.studies.report.page import Block, Notice, Table, Text

NUM_TIMED = 5  # iterations in the estimate of the time left
BEAT_S = 5.0  # between two lines about the current action in a log
STAGES = "rllib_srl.stages"  # the package's logger for the ends of a stream's stages
STARTING = "rllib_srl.start"  # the package's logger for its actions during start-up


class Progress:
    """The progress of a run. Invariant: after `end` nothing is written."""

    def __init__(self, last: int, stream: TextIO | None = None, beat_s: float = BEAT_S) -> None:
        """Show progress towards iteration `last` on `stream`, standard output by default."""
        from rich.console import Console
        from rich.progress import Progress as Live
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        self._last, self._beat_s = last, beat_s
        self._console = Console(file=stream or sys.stdout, markup=False, highlight=False, emoji=False)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._live = Live(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._live.add_task("")
        self._seconds: deque[float] = deque(maxlen=NUM_TIMED)
        self._heart: threading.Thread | None = None  # writes a line about the current action now and then
        self._is_over = threading.Event()  # ends `_heart`

    def begin(self, text: str) -> None:
        """Show the current action and its duration until the next output."""
        self._show(text)
        if not self._console.is_terminal:
            self._is_over = threading.Event()
            args = (text, self._is_over, time.monotonic())
            self._heart = threading.Thread(target=self._beat, args=args, daemon=True)
            self._heart.start()

    def iteration(
        self, number: int, reward: float, tokens_per_s: float, seconds: float, num_resampled: int = 0
    ) -> None:
        """Show a finished iteration; `num_resampled` prompts were played by dynamic sampling in place of others."""
        self._seconds.append(seconds)
        left = (self._last - number) * sum(self._seconds) / len(self._seconds)
        text = f"iteration {number}/{self._last}  reward {rounded(reward)}  {tokens_per_s:.0f} tokens/s"
        text += f"  {num_resampled} resampled" if num_resampled else ""
        self._show(text + (f"  {duration(left)} left" if number < self._last else "  done"))

    def note(self, text: str) -> None:
        """Write a permanent line."""
        self._console.print(text, soft_wrap=True)
        self._console.file.flush()

    def end(self) -> None:
        """Finish the live line; a terminal keeps the last one."""
        self._stop_heart()
        if self._console.is_terminal and self._live.live.is_started:
            self._live.stop()
            self.note(self._live.tasks[self._task].description)

    def _show(self, text: str) -> None:
        self._stop_heart()
        if self._console.is_terminal:
            self._live.start()
            self._live.reset(self._task, description=text)
        else:
            self.note(text)

    def _beat(self, text: str, is_over: threading.Event, start: float) -> None:
        while not is_over.wait(self._beat_s):
            self.note(f"{text} {duration(time.monotonic() - start)}")

    def _stop_heart(self) -> None:
        self._is_over.set()
        if self._heart is not None:
            self._heart.join()
            self._heart = None


class NoteHandler(logging.Handler):
    """Shows the package's warnings as notes, and its start-up messages as the current action."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self._progress.note(f"warning: {record.getMessage()}")
        elif record.name == STAGES:
            self._progress.note(record.getMessage())
        elif record.name == STARTING:
            self._progress.begin(f"{record.getMessage()} ...")


@contextmanager
def showing_progress(last: int, stream: TextIO | None = None) -> Iterator[Progress]:
    """Show progress, with the package's warnings and start-up messages, until the block ends; arguments as `Progress`.

    Nothing is written after the block: the stream may be closed then.
    """
    progress = Progress(last, stream)
    logger, shown = logging.getLogger("rllib_srl"), [logging.getLogger(name) for name in (STARTING, STAGES)]
    before = logger.handlers, logger.propagate
    levels = [source.level for source in shown]
    logger.handlers, logger.propagate = [NoteHandler(progress)], False
    for source in shown:
        source.setLevel(logging.INFO)
    try:
        yield progress
    finally:
        logger.handlers, logger.propagate = before
        for source, level in zip(shown, levels, strict=True):
            source.setLevel(level)
        progress.end()


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Return rows as text, columns aligned; every row has as many cells as the first."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(indent + line for line in lines)


def text_of(blocks: Iterable[Block]) -> str:
    """Return the paragraphs, boxes and tables of a report as text."""
    lines = []
    for block in blocks:
        if isinstance(block, Text):
            lines.append(block.text)
        elif isinstance(block, Notice):
            lines += [block.title, *(f"  {line}" for line in block.lines)]
        elif isinstance(block, Table):
            lines.append(table([block.header, *block.rows]))
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Return "45s", "2m 05s" or "3h 07m"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def rounded(value: float | None) -> str:
    """Return a number with two decimals, "0.53", and "-" for a missing one."""
    return "-" if value is None or math.isnan(value) else f"{value:.2f}"


def with_interval(evaluation: Mapping[str, float]) -> str:
    """Return the accuracy of an evaluation and its 95 % interval as "0.530  [0.470, 0.590]"."""
    return f"{evaluation['accuracy']:.3f}  [{evaluation['accuracy_low']:.3f}, {evaluation['accuracy_high']:.3f}]"


def counted(number: float, unit: str) -> str:
    """Return "1 iteration" or "2.5 iterations"."""
    text = figure(number)
    return f"{text} {unit}" if text == "1" else f"{text} {unit}s"


def figure(value: float) -> str:
    """Return a number with one decimal below 100 and none from there on, without a trailing ".0"."""
    return f"{float(value):.1f}".removesuffix(".0") if abs(value) < 100 else f"{float(value):.0f}"


def printable(text: str) -> str:
    """Return text without control characters, so that model output cannot control the terminal."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str, most: int) -> str:
    """Return `printable` text on one line, cut to `most` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 1]}…"


def printable_lines(text: str) -> str:
    """Return `printable` text with its line breaks kept."""
    return "\n".join(printable(line) for line in text.split("\n"))
