"""Places for those that run at once, given in the order they were asked for.

`threading.Semaphore` lets the thread that gives a place back take it again before one that has waited for seconds.
"""

from __future__ import annotations

import threading
from collections import deque


class Slots:
    """A number of places. Invariant: none is free while somebody waits."""

    def __init__(self, count: int):
        self._num_free = count
        self._waiting: deque[threading.Event] = deque()
        self._lock = threading.Lock()

    def acquire(self, timeout_s: float) -> bool:
        """Take a place, behind all who wait already; return False if none came in time."""
        with self._lock:
            if self._num_free:
                self._num_free -= 1
                return True
            turn = threading.Event()
            self._waiting.append(turn)
        if turn.wait(timeout_s):
            return True
        with self._lock:
            if turn.is_set():  # it came between the end of the wait and the lock
                return True
            self._waiting.remove(turn)
            return False

    def release(self) -> None:
        """Give a place to who has waited longest, or back."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._num_free += 1
