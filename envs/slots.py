"""A first-in, first-out semaphore.

`threading.Semaphore` lets the thread that releases a slot take it again before a thread that has waited for seconds.
"""

from __future__ import annotations

import threading
from collections import deque


class Slots:
    """A number of slots, handed out in the order of the requests. Invariant: no slot is free while a thread waits."""

    def __init__(self, count: int):
        self._num_free = count
        self._waiting: deque[threading.Event] = deque()
        self._lock = threading.Lock()

    def acquire(self, timeout_s: float) -> bool:
        """Take a slot after all threads that already wait; return False if none became free in time."""
        with self._lock:
            if self._num_free:
                self._num_free -= 1
                return True
            turn = threading.Event()
            self._waiting.append(turn)
        if turn.wait(timeout_s):
            return True
        with self._lock:
            if turn.is_set():  # the slot arrived between the end of the wait and the lock
                return True
            self._waiting.remove(turn)
            return False

    def release(self) -> None:
        """Hand the slot to the thread that has waited longest, or free it."""
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._num_free += 1
