"""Start processes that the kernel kills when the process that started them ends, for whatever reason it ends.

    process = start_kept([sys.executable, "-m", "worker", str(os.getpid())])       in the owner
    end_with(int(sys.argv[1]))                                                     first thing in the worker

The kernel sends the worker SIGKILL when its owner is gone, even if the owner was killed or the worker is in a long
computation. To the kernel the owner is the *thread* that started the worker, so this thread lives as long as the
worker.

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

from rllib_srl.envs.sandbox import kernel

_START_S = 60.0  # timeout for creating a process


def start_kept(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process from a thread that lives as long as the process.

    Args:
        command: program and arguments
        options: of `subprocess.Popen`

    Raises:
        OSError: the process cannot be started.
        TimeoutError: the machine does not create the process in time.
    """
    started: Future[subprocess.Popen[bytes]] = Future()
    arguments = (command, options, started)
    threading.Thread(target=_keep, args=arguments, name=f"keeps {command[0]}", daemon=True).start()
    return started.result(timeout=_START_S)


def _keep(command: Sequence[str], options: dict[str, Any], started: Future[subprocess.Popen[bytes]]) -> None:
    try:
        process = subprocess.Popen(command, **options)
    except BaseException as error:  # re-raised in the caller, which waits for the future
        started.set_exception(error)
        return
    started.set_result(process)
    process.wait()  # keeps this thread, the kernel's "owner", alive as long as the process


def end_with(owner: int) -> None:
    """Have the kernel end this process when its owner ends.

    Args:
        owner: process id of the process that started this one; if it has already ended, this process exits at once
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(1)
