"""Killing a script in the middle, as a machine that goes down would."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


def killed_when(arguments: list[str], is_time: Callable[[], bool], patience_s: float) -> None:
    """Run a script in a process, and kill it and what it has started as soon as it is time.

    Args:
        arguments: the script, relative to the repository, and its arguments.
        is_time: asked again and again.
        patience_s: until when it must be time.

    Raises:
        AssertionError: it ended before it was time, or it never was.
    """
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + patience_s
    try:
        while time.monotonic() < deadline and process.poll() is None:
            if is_time():
                return
            time.sleep(0.05)
        output = process.communicate(timeout=60)[0] if process.poll() is not None else "it is still running"
        raise AssertionError(f"it was never time to kill {' '.join(arguments)}:\n{output}")
    finally:
        if process.poll() is None:
            script = psutil.Process(process.pid)
            family = [*script.children(recursive=True), script]
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(family[:-1], timeout=60)
        process.wait(timeout=60)
