"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_true: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_true()
