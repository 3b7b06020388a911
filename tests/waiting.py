"""Waiting for what other threads and processes bring about."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def wait_until(is_true: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_true()


def at_once(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what each task returns or raises; all of them run at the same time."""
    start = threading.Barrier(len(tasks))

    def run(task: Callable[[], Any]) -> Any:
        start.wait(60)
        try:
            return task()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks, timeout=60))
