"""Start `srl train` again when it has lost a process that it cannot replace.

    srl train ARGS ...                  the parent: neither Ray nor torch, nothing of the run
      └─ srl train ARGS [--again DIR]   the child: the run; it writes its directory and `max_failures` into a pipe

    the child ends               the parent
    with LOST, or by a signal    starts it again with `--again DIR`, which is `--out DIR --resume auto`
    with anything else           ends with the same status

The parent gives up after `max_failures` new starts without a newer checkpoint. It passes SIGINT and SIGTERM on, and
starts nothing after them. The child has its own process group, so that Ctrl-C and signals to the parent's group reach
it once. If the parent is killed, so is the child. What a lost run leaves behind (a local Ray, hung workers of an
engine) is ended before the next start.

This file imports no third-party package before a run was lost.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType

from rllib_srl.envs.sandbox import kernel

LOST = 75  # exit status of a child that has lost a process; EX_TEMPFAIL of sysexits.h
DIRECT = ("-h", "--help", "--help-all", "--max-failures=0", "--max_failures=0")  # words that need no parent
PIPE = "RLLIB_SRL_SUPERVISOR"  # environment variable of the child: descriptor of the pipe
LEFT_S = 10.0  # for processes that were killed to be gone


# --- in the parent --------------------------------------------------------------------------------


def is_needed(argv: Sequence[str]) -> bool:
    """Return whether `srl train` with these arguments gets a parent: not for help, nor without new starts."""
    is_off = any(name in ("--max-failures", "--max_failures") and value == "0" for name, value in pairwise(argv))
    return PIPE not in os.environ and not is_off and not any(word in DIRECT for word in argv)


def supervise(command: Sequence[str]) -> int:
    """Run a program that calls `begin` and `report`, again after each loss; return the last exit status."""
    _prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # orphans of the child become ours
    child: subprocess.Popen[bytes] | None = None
    stopped_by, is_passed_on = 0, False  # the number of the last signal, and whether a child got it

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped_by, is_passed_on
        stopped_by, is_passed_on = number, child is not None and child.poll() is None
        if child is not None and is_passed_on:
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    directory, max_failures, num_failures, newest = "", 0, 0, ""
    while True:
        reads, writes = os.pipe()
        again = ["--again", directory] if directory else []
        environment = {**os.environ, PIPE: str(writes)}
        child = subprocess.Popen([*command, *again], env=environment, pass_fds=(writes,), process_group=0)
        os.close(writes)
        if stopped_by and not is_passed_on:  # it came while there was no child
            child.send_signal(stopped_by)
        status = child.wait()
        os.set_blocking(reads, False)
        with os.fdopen(reads, "rb") as pipe:
            for line in (pipe.read() or b"").splitlines():
                directory, max_failures = json.loads(line)
        if not directory or stopped_by or not (status == LOST or status < 0):
            return _exit_status(status)
        _end_what_is_left()
        if not Path(directory).is_dir():
            print(f"error: the run's directory {directory} no longer exists; start a new run", file=sys.stderr)
            return _exit_status(status)
        newest, before = _newest_checkpoint(directory), newest
        num_failures = num_failures + 1 if newest == before else 1
        why = f"the run was ended by {signal.Signals(-status).name}; " if status < 0 else ""
        if num_failures > max_failures:
            gave_up = f"gave up after {max_failures} new starts without a newer checkpoint (max_failures)"
            print(f"{why}{gave_up}; to continue, add --resume {directory}", file=sys.stderr)
            return _exit_status(status)
        of = f"new start {num_failures} of {max_failures} without a newer checkpoint"
        print(f"{why}starting again from {newest or 'the beginning'} ({of})", file=sys.stderr, flush=True)


def _end_what_is_left() -> None:
    """Kill all descendants, and wait until they are gone."""
    from rllib_srl.cli.shared.stopping import kill_descendants

    deadline = time.monotonic() + LEFT_S
    while kill_descendants() and time.monotonic() < deadline:
        time.sleep(0.05)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _newest_checkpoint(directory: str) -> str:
    """Return the path of the newest finished checkpoint, "" if there is none."""
    return max((str(manifest.parent) for manifest in Path(directory).glob("checkpoint_*/manifest.json")), default="")


def _exit_status(status: int) -> int:
    """Return the status with which the parent ends: 1 after a loss, 128 + n after signal n."""
    return 1 if status == LOST else 128 - status if status < 0 else status


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # Linux only
        kernel.prctl(option, value)


# --- in the child ---------------------------------------------------------------------------------

_pipe: int | None = None
_has_reported = False


def begin() -> None:
    """Take over the pipe, if this process has a parent that supervises it, and end with that parent."""
    global _pipe
    if PIPE in os.environ:
        _pipe = int(os.environ.pop(PIPE))  # the run's own processes must not get it
        os.set_inheritable(_pipe, False)
        _prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


def report(directory: Path, max_failures: int) -> None:
    """Tell the parent that the run has started; before that, nothing is started again."""
    global _has_reported
    if _pipe is not None:
        _has_reported = True
        os.write(_pipe, (json.dumps([str(directory), max_failures]) + "\n").encode())


def starts_again(error: BaseException) -> bool:
    """Return whether a parent starts this run again after an error: it has lost a process."""
    if not _has_reported:
        return False
    from rllib_srl.common.remote_calls import is_loss

    return is_loss(error)
