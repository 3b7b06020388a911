"""The data types of the sandbox: limits, calls and results.

`stop` is the reason why a call ended:

    ok        the code ran to its end, or left by sys.exit(0)
    error     an exception, or another exit status
    timeout   the time limit passed
    memory    an allocation beyond the limit raised MemoryError
    output    it wrote more than the limit to stdout and stderr, or returned more
    crashed   a signal ended it, it left without a report (os._exit), or it ended the process that forks workers,
              in a call and again alone
    too_long  code, standard input and files together are longer than the limit: nothing was run

"ok", "error" and "memory" are reported by the code's own process, so the code can forge them, and any value it
returns. To reward a right answer, compare the value outside with data that was never inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STOPS = ("ok", "error", "timeout", "memory", "output", "crashed", "too_long")
SAID_INSIDE = ("ok", "error", "memory")


class SandboxError(RuntimeError):
    """The sandbox itself failed, not the code."""


class LostWorkerError(SandboxError):
    """The worker of a call did not start, or was lost with the process that forks workers; a retry may succeed.

    `has_begun`: the code was running by then, so it may have ended that process.
    """

    def __init__(self, message: str, has_begun: bool = False):
        super().__init__(message)
        self.has_begun = has_begun


class WeakSandboxError(RuntimeError):
    """This machine cannot give a guarantee that an environment which runs code needs."""


@dataclass(frozen=True)
class Limits:
    """The limits of one call. Invariant: `errors` is empty for the limits of a sandbox that was built."""

    timeout_s: float = 5.0  # from the moment the code runs, by the wall clock
    memory_bytes: int = 512 << 20  # address space, the interpreter's own included
    scratch_bytes: int = 16 << 20  # files in the current directory; where it is not a mount it is read-only
    output_bytes: int = 64 << 10  # stdout and stderr together
    value_bytes: int = 1 << 20  # what the code returns, as JSON
    code_bytes: int = 1 << 20  # code, stdin, files and arguments together
    packages: tuple[str, ...] = ()  # imported before the code runs; without any, there is the standard library only

    def errors(self) -> list[str]:
        """Return one error message for each limit out of its range."""
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
    """A call of a function that the code defines, made after the code has run. `args` are JSON values."""

    function: str
    args: Sequence[Any] = ()


@dataclass(frozen=True)
class Returned:
    """The result of one `Call`: a JSON value, or the error it raised (never both)."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class SandboxResult:
    """The result of a call. Invariant: `stop` is one of `STOPS`; `returned` is empty or has one entry per `Call`."""

    stop: str
    stdout: str = ""
    stderr: str = ""
    value: str | None = None  # repr of the last statement, if it is an expression and not None
    returned: tuple[Returned, ...] = ()
    error: str = ""  # the last line of the traceback, or why nothing was run
    exit_code: int = 0  # of the process; -9 for signal 9
    duration_s: float = 0.0  # while the code ran
    start_s: float = 0.0  # from the call until the code ran, waiting for a free worker left out
    is_leaking: bool = False  # a process of the call outlived it; possible only if the probe reports so
