"""The nouns of the sandbox: what a call may use, what it asks for, and what came of it.

`stop` says how a call ended:

    ok        the code ran to its end, or left by sys.exit(0)
    error     an exception, or another exit status
    timeout   the time limit passed
    memory    an allocation beyond the limit raised MemoryError
    output    it wrote more than the limit to stdout and stderr, or returned more
    crashed   a signal ended it, or it left without saying how it ended (os._exit)
    too_long  code, standard input and files together are longer than the limit: nothing was run

"ok", "error" and "memory" are what the code's own process said, so the code can lie about them, as it can about any
value it returns. Whoever pays for a right answer compares the value outside, with what never was inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STOPS = ("ok", "error", "timeout", "memory", "output", "crashed", "too_long")
SAID_INSIDE = ("ok", "error", "memory")


class SandboxError(RuntimeError):
    """The sandbox itself failed; the code is not to blame."""


class LostWorkerError(SandboxError):
    """The worker of a call did not start, or was lost with the process that forks workers; another may do."""


class WeakSandboxError(RuntimeError):
    """This machine cannot give a guarantee that a world which runs code needs."""


@dataclass(frozen=True)
class Limits:
    """What one call may use. Invariant: `faults` is empty for the limits of a sandbox that exists."""

    timeout_s: float = 5.0  # from the moment the code runs, by the wall clock
    memory_bytes: int = 512 << 20  # address space, the interpreter's own included
    scratch_bytes: int = 16 << 20  # files in the current directory; without mounts of its own it is read-only
    output_bytes: int = 64 << 10  # stdout and stderr together
    value_bytes: int = 1 << 20  # what the code returns, as JSON
    code_bytes: int = 1 << 20  # code, stdin, files and arguments together
    packages: tuple[str, ...] = ()  # imported before the code runs; without any, there is the standard library only

    def faults(self) -> list[str]:
        """Return one line for each limit out of its range."""
        ranges = (
            ("timeout_s", 0.01, 3600),
            ("memory_bytes", 64 << 20, 1 << 40),
            ("scratch_bytes", 1 << 16, 1 << 34),
            ("output_bytes", 0, 1 << 28),
            ("value_bytes", 1 << 10, 1 << 28),
            ("code_bytes", 1, 1 << 28),
        )
        return [
            f"{name} = {getattr(self, name)}; expected {least} to {most}"
            for name, least, most in ranges
            if not least <= getattr(self, name) <= most
        ]


@dataclass(frozen=True)
class Call:
    """A function that the code defines, to be called after it has run. `args` are JSON values."""

    function: str
    args: Sequence[Any] = ()


@dataclass(frozen=True)
class Returned:
    """What one `Call` came to: a JSON value, or the error it raised (never both)."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class SandboxResult:
    """What came of a call. Invariant: `stop` is one of `STOPS`; `returned` is empty or one for each `Call`."""

    stop: str
    stdout: str = ""
    stderr: str = ""
    value: str | None = None  # repr of the last statement, if it is an expression and not None
    returned: tuple[Returned, ...] = ()
    error: str = ""  # the last line of the traceback, or why nothing was run
    exit_code: int = 0  # of the process; -9 for signal 9
    duration_s: float = 0.0  # while the code ran
    start_s: float = 0.0  # from the call until the code ran, waiting for a free worker left out
    is_leaking: bool = False  # a process of the call outlived it; only where the probe says so
