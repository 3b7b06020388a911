"""Terminal output of a run: a progress line, tables, sparklines. Plain text, standard library only.

    starting Ray ... 20s                                        current action, every 10 s in a log
    iteration 3/10  reward 0.53  812 tokens/s  2m 10s left      rewritten on a terminal, a new line each elsewhere
"""

from __future__ import annotations

import logging
import math
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

BARS = "▁▂▃▄▅▆▇█"
NUM_TIMED = 5  # iterations in the estimate of the time left
BEAT_S = 10.0  # seconds between two updates of the current action in a log; 1 on a terminal
_JOIN_S = 5.0
STAGES = "rllib_srl.stages"  # the package's logger for the ends of a stream's stages
STARTING = "rllib_srl.start"  # the package's logger for its actions during start-up


class Progress:
    """The progress line of a run.

    Invariant: on a terminal at most one line is unfinished, and `note` never writes into it.
    """

    def __init__(self, last: int, stream: TextIO | None = None, beat_s: float | None = None) -> None:
        """Show progress towards iteration `last` on `stream`, standard output by default.

        Args:
            last: iteration.
            stream: output stream.
            beat_s: seconds between updates of the action of `begin`; None: 1 on a terminal, else `BEAT_S`.
        """
        self._last, self._stream = last, stream or sys.stdout
        self._is_live = self._stream.isatty()
        self._beat_s = beat_s if beat_s is not None else 1.0 if self._is_live else BEAT_S
        self._seconds: deque[float] = deque(maxlen=NUM_TIMED)
        self._line = ""
        self._lock = threading.RLock()  # a signal's handler may write while this thread does
        self._heart: threading.Thread | None = None  # updates the duration of the current action
        self._is_over = threading.Event()  # stops `_heart`

    def begin(self, text: str) -> None:
        """Show the current action and its duration until the next output."""
        with self._lock:
            self._stop_heart()
            self._put(text)
            self._is_over = threading.Event()
            args = (text, self._is_over, time.monotonic())
            self._heart = threading.Thread(target=self._beat, args=args, daemon=True)
            self._heart.start()

    def _beat(self, text: str, over: threading.Event, start: float) -> None:
        while not over.wait(self._beat_s):
            with self._lock:
                if not over.is_set():
                    self._put(f"{text} {duration(time.monotonic() - start)}")

    def _stop_heart(self) -> threading.Thread | None:
        """Stop the updates: none is written after this; return the thread, which is about to end."""
        self._is_over.set()
        heart, self._heart = self._heart, None
        return heart

    def iteration(
        self, number: int, reward: float, tokens_per_s: float, seconds: float, num_resampled: int = 0
    ) -> None:
        """Show a finished iteration.

        Args:
            number: of the iteration, the first is 1.
            reward: mean over its episodes; nan if there are none.
            tokens_per_s: generated tokens per second of rollout.
            seconds: duration of the iteration.
            num_resampled: prompts that dynamic sampling played in place of others.
        """
        self._seconds.append(seconds)
        left = (self._last - number) * sum(self._seconds) / len(self._seconds)
        text = f"iteration {number}/{self._last}  reward {rounded(reward)}  {tokens_per_s:.0f} tokens/s"
        text += f"  {num_resampled} resampled" if num_resampled else ""
        text += f"  {duration(left)} left" if number < self._last else "  done"
        with self._lock:
            self._stop_heart()
            self._put(text)

    def note(self, text: str) -> None:
        """Write a permanent line above the progress line."""
        with self._lock:
            if self._is_live and self._line:
                self._write("\r\x1b[K" + text + "\n")
                self._show(self._line)
            else:
                self._write(text + "\n")

    def end(self) -> None:
        """Finish the progress line, so that the next output begins on a new line, and end the thread of `begin`."""
        with self._lock:
            heart = self._stop_heart()
            if self._is_live and self._line:
                self._write("\n")
            self._line = ""
        if heart is not None:  # without the lock, for which it may be waiting
            heart.join(_JOIN_S)

    def _put(self, text: str) -> None:
        if self._is_live:
            self._show(text)
        else:
            self._write(text + "\n")

    def _show(self, text: str) -> None:
        self._line = text
        self._write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1])

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class NoteHandler(logging.Handler):
    """Shows the package's warnings above the progress line, and its start-up messages as the progress line."""

    def __init__(self, progress: Progress) -> None:
        """Write to `progress`."""
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        """Show one warning or start-up message."""
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
    levels = [one.level for one in shown]
    logger.handlers, logger.propagate = [NoteHandler(progress)], False
    for one in shown:
        one.setLevel(logging.INFO)
    try:
        yield progress
    finally:
        logger.handlers, logger.propagate = before
        for one, level in zip(shown, levels, strict=True):
            one.setLevel(level)
        progress.end()


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Return rows as text, columns aligned; every row has as many cells as the first."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(indent + line for line in lines)


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> str:
    """Return one bar per value, the lowest for `low` and the highest for `high`; a space for nan."""

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
    """Return a number with two decimals, "0.53", and "-" for a missing one."""
    return "-" if value is None or math.isnan(value) else f"{value:.2f}"


def with_interval(accuracy: float, low: float, high: float) -> str:
    """Return accuracy and 95 % interval as "0.53  [0.47, 0.59]"."""
    return f"{accuracy:.3f}  [{low:.3f}, {high:.3f}]"


def counted(number: float, unit: str) -> str:
    """Return "1 iteration" or "2.5 iterations"."""
    text = figure(number)
    return f"{text} {unit}" if text == "1" else f"{text} {unit}s"


def figure(value: float) -> str:
    """Return a number with one decimal below 100 and none from there on, without a trailing ".0"."""
    return f"{float(value):.1f}".removesuffix(".0") if abs(value) < 100 else f"{float(value):.0f}"
