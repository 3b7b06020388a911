"""Ends the process of a test that goes on after its timeout, and prints where each of its threads is.

pytest-timeout raises an exception in the main thread by a signal. While that thread waits in `ray.get` Ray drops the
exception, and while it waits in other native code no signal is handled. The end of a process is a failure of its test
for xdist, which runs the other tests in a new process.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

GRACE_S = 120.0  # for what the exception of the timeout sets going, such as the end of a run
STDERR = pytest.StashKey[int]()
LIMIT_S = pytest.StashKey[float]()


def watch(item: pytest.Item) -> None:
    """Give the process of a test as long as its timeout and `GRACE_S`, from now on."""
    if not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(item.stash[LIMIT_S] + GRACE_S, exit=True, file=item.config.stash[STDERR])


def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error that tests do not capture."""
    assert sys.__stderr__ is not None
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno())


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """Watch a test for which pytest-timeout sets its timer, with the same limit."""
    item.stash[LIMIT_S] = settings.timeout
    watch(item)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Generator[None, object, object]:
    """End the watch with the timer."""
    faulthandler.cancel_dump_traceback_later()
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Watch a test that failed again, for its fixtures may hang: the failure has ended timer and watch."""
    if isinstance(node, pytest.Item) and LIMIT_S in node.stash:
        watch(node)
