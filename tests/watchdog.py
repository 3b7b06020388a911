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

import pytest

GRACE_S = 120.0  # for what the exception of the timeout sets going, such as the end of a run
STDERR = pytest.StashKey[int]()


def watch(item: pytest.Item) -> None:
    """Give the process of a test as long as its timeout and `GRACE_S`, from now on."""
    marker = item.get_closest_marker("timeout")
    limit_s = marker.args[0] if marker and marker.args else float(item.config.getini("timeout") or 0.0)
    if limit_s and not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=item.config.stash[STDERR])


def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error that tests do not capture."""
    assert sys.__stderr__ is not None
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Watch a test, with its fixtures."""
    watch(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Watch a test that failed again, for its fixtures may hang: pytest's own hook has ended the watch."""
    if isinstance(node, pytest.Item):
        watch(node)
