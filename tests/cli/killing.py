"""Processes with all that they have started: killed as by a machine that goes down, and whether they are gone."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

from tests.conftest import ROOT
from tests.waiting import wait_until


def family(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the processes below one, none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def end(process: subprocess.Popen) -> None:
    """Kill a process and all below it."""
    for one in [*family(process), process]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(timeout=60)


def are_gone(pids: Iterable[int], timeout_s: float = 60.0) -> bool:
    """Return whether processes end in time; nobody may wait for a zombie, which is gone, too."""

    def is_running(pid: int) -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        return False

    return wait_until(lambda: not any(map(is_running, pids)), timeout_s)


def killed_when(arguments: list[str], is_time: Callable[[], bool], patience_s: float) -> None:
    """Run Python with some arguments, and kill it and what it has started as soon as it is time."""
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT)
    try:
        wait_until(lambda: process.poll() is not None or is_time(), patience_s)
        assert process.poll() is None and is_time(), f"it was never time to kill {' '.join(arguments)}"
    finally:
        end(process)
