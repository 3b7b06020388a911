"""Processes that end with the one that started them, however that one ends.

    process = start_kept([sys.executable, "-m", "worker", str(os.getpid())])       in the owner
    end_with(int(sys.argv[1]))                                                     first thing in the worker

The kernel sends the worker SIGKILL when its owner is gone, also where the owner was killed and the worker is deep in a
computation. For the kernel the owner is the *thread* that started the worker, so that thread lives as long as it.

Source: man page prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from envs.sandbox import kernel

_START_S = 60.0  # until the machine has made a process


def start_kept(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process by a thread that lives as long as it.

    Args:
        command: program and arguments
        options: of `subprocess.Popen`

    Raises:
        OSError: it cannot be started.
        TimeoutError: the machine makes no process in time.
    """
    started: Future[subprocess.Popen[bytes]] = Future()
    arguments = (command, options, started)
    threading.Thread(target=_keep, args=arguments, name=f"keeps {command[0]}", daemon=True).start()
    return started.result(timeout=_START_S)


def _keep(command: Sequence[str], options: dict[str, Any], started: Future[subprocess.Popen[bytes]]) -> None:
    try:
        process = subprocess.Popen(command, **options)
    except BaseException as error:  # for the caller, who waits
        started.set_exception(error)
        return
    started.set_result(process)
    process.wait()  # for its whole life, which its owner ends


def end_with(owner: int) -> None:
    """Have the kernel end this process when its owner ends.

    Args:
        owner: process id of the one that started it; if that is gone already, this process exits at once
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(1)
