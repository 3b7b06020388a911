"""The memory of a run that may be going on, read from a copy that is made anew when the run has changed it.

A copy takes as long as the database is large, so a new one is made at most every `PAUSE_S`, and at most a tenth of the
time goes into copying. The run does not wait for it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from rllib_srl.cli.dashboard.pages import SHARE
from rllib_srl.replay.reading import PLACES, Reading, reading

PAUSE_S = 3.0  # shortest time between two copies


class MemoryView:
    """The newest copy of a memory. Invariant: `reading` is open until the next one; used by one thread."""

    def __init__(self, directory: Path) -> None:
        """Prepare the reading of a run's memory; `reading` reads."""
        self._directory = directory
        self._stack = ExitStack()
        self._reading: Reading | None = None
        self._seen: tuple[tuple[int, int], ...] = ()
        self._next_at = 0.0
        self.version = 0  # of the copy

    @property
    def exists(self) -> bool:
        """Return whether the run has a memory."""
        return (self._directory / PLACES[0]).is_file()

    def reading(self) -> Reading:
        """Return the content of the memory, as of a moment ago.

        Raises:
            StoreError, ValueError: it cannot be read.
        """
        now, seen = time.monotonic(), self._marks()
        if self._reading and (seen == self._seen or now < self._next_at):
            return self._reading
        with ExitStack() as stack:
            found = stack.enter_context(reading(self._directory))
            self._stack.close()
            self._stack, self._reading, self._seen = stack.pop_all(), found, seen
        self.version += 1
        spent = time.monotonic() - now
        self._next_at = time.monotonic() + max(PAUSE_S, spent / SHARE)
        return self._reading

    def _marks(self) -> tuple[tuple[int, int], ...]:
        """Return size and time of each file of the database: another commit changes them."""
        paths = sorted(self._directory.glob(PLACES[0] + "*"))
        stats = [path.stat() for path in paths if path.suffix in (".db", ".db-wal")]
        return tuple((one.st_size, one.st_mtime_ns) for one in stats)

    def close(self) -> None:
        """Close and delete the copy."""
        self._stack.close()
        self._reading = None
