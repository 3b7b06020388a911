"""Stop a script on Ctrl-C, and on the SIGTERM of Kubernetes, Slurm, `docker stop` and `ray job stop`.

    SIGTERM   during training   the iteration is finished, a checkpoint is written
              otherwise         the script ends at once, with all processes that it started
    exit status 143 in each case; 130 after Ctrl-C

Whoever sends SIGTERM sends SIGKILL after a while. An iteration that takes longer is lost; the last checkpoint remains.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import psutil

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass
class Ending:
    """What happens before SIGTERM ends this process; commands set it for the time in which it holds."""

    errors: int = 2  # descriptor of standard error, which may point elsewhere while libraries start
    clean_up: Callable[[], object] = bool
    last_words: Callable[[], str] = str


ENDING = Ending()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process and all below it at once; do nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ENDING.errors = os.dup(2)
    usual = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)
        os.close(ENDING.errors)
        ENDING.errors = 2


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one changes nothing
    lines = [f"\nstopped by {signal.Signals(number).name}"]
    with suppress(Exception):  # any: the process must end now
        lines.append(ENDING.last_words())
    words = "\n".join(filter(None, lines)) + "\n"
    os.write(ENDING.errors, words.encode())  # a stream may be in the middle of a write
    leave(STATUS[signal.SIGTERM], ENDING.clean_up)


def leave(status: int, clean_up: Callable[[], object] = bool) -> None:
    """End this process and all its descendants at once: a local Ray, engines, environments."""
    kill_descendants()
    with suppress(Exception):
        clean_up()
    os._exit(status)


def kill_descendants() -> int:
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with suppress(psutil.Error):
            process.kill()
    return len(descendants)


@dataclass
class StopRequest:
    """Whether a stop was requested. Invariant: once `is_made`, the next Ctrl-C interrupts at once."""

    is_made: bool = False
    status: int = 0  # exit status of a script that stopped on request


@contextmanager
def stop_between_iterations(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request: a run stops between iterations and can resume exactly."""
    request = StopRequest()
    usual = {number: signal.getsignal(number) for number in STATUS}

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a group and its parent may send it twice
        request.is_made, request.status = True, STATUS[signal.Signals(number)]
        name = "press Ctrl-C again to stop now" if number == signal.SIGINT else "SIGTERM"
        with suppress(RuntimeError):  # reentrant write: the signal arrived while a line was being written
            say(f"stopping after this iteration ({name})")

    for number in STATUS:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextmanager
def spared_from_sigterm() -> Iterator[None]:
    """Block SIGTERM for processes started in the block (they inherit the mask), and restore our signal handlers.

    Kubernetes signals one process; Slurm, systemd and `timeout` signal a whole group. Ray's processes and the actors
    must survive the signal, or the iteration cannot be finished; they end with the process that started them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {number: signal.getsignal(number) for number in STATUS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    except SystemExit:  # another thread received the signal, and Ray's handler ran
        _end(signal.SIGTERM, None)
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
