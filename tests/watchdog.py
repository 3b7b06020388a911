"""Ends the process of a test that goes on after its timeout, prints where its threads are, and goes on in another one.

pytest-timeout raises an exception in the main thread by a signal. While that thread waits in `ray.get` Ray drops the
exception, and while it waits in other native code no signal is handled. The end of a process is a failure of its test
for xdist, which runs the other tests in a new process.
"""

import faulthandler
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

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


class FilesInTurn(LoadFileScheduling):
    """Gives each process whole files, also after one has died.

    xdist's own (3.8) hands out the finished files of a dead process again, as work without a test, and waits for its
    end; a process, for its part, keeps its last test back until it knows the next one. So both wait for good.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a process away; return the test in which it died, which is not run again, None if it had ended."""
        work = self.assigned_work.pop(node)
        died_in = next((test for unit in work.values() for test, is_done in unit.items() if not is_done), None)
        if died_in is None:
            return None
        for scope, unit in work.items():
            if died_in in unit:
                unit[died_in] = True
            if not all(unit.values()):
                self.workqueue[scope] = unit
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process files until it has a test to run and a next one, or send it home."""
        if node not in self.registered_collections:
            return  # a new process that has not collected yet
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            if self.workqueue:
                self._assign_work_unit(node)
            else:
                node.shutdown()


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesInTurn | None:
    """Use it for `--dist loadfile`."""
    return FilesInTurn(config, log) if config.getvalue("dist") == "loadfile" else None
