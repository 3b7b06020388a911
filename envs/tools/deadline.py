"""Call a Python function with a timeout.

    run_within(5.0, tool, {"a": 2})      its value, its exception, or ToolTimeoutError after 5 seconds

The call runs in its own thread. A thread cannot be killed: an exception is raised in a late one, which ends loops
written in Python, and threads are daemons, so a thread that hangs in C does not keep the process alive. Work whose
length depends on a policy's text belongs in a process (a sandbox), whose tool raises `ToolTimeoutError` itself.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rllib_srl.envs.tools.calls import ToolTimeoutError


class _LateError(BaseException):
    """Raised in a late thread; not an Exception, so that `except Exception` in a loop does not catch it."""


class _Run(threading.Thread):
    """One call; `outcome` is (value, None) or (None, error) once it has ended."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        super().__init__(daemon=True, name="tool-call")
        self._function, self._arguments = function, arguments
        self.outcome: tuple[Any, BaseException | None] | None = None

    def run(self) -> None:
        try:
            self.outcome = (self._function(**self._arguments), None)
        except _LateError:
            return
        except BaseException as error:  # also SystemExit: re-raised in the caller
            self.outcome = (None, error)

    def interrupt(self) -> None:
        """Raise `_LateError` in this thread at its next Python instruction."""
        if self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(_LateError))


def run_within(timeout_s: float, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return `function(**arguments)`, or raise its exception.

    Args:
        timeout_s: seconds, more than 0
        function: to call
        arguments: by name

    Raises:
        ToolTimeoutError: the call has not ended after `timeout_s`.
    """
    call = _Run(function, arguments)
    call.start()
    call.join(timeout_s)
    if call.outcome is None:
        call.interrupt()
        raise ToolTimeoutError(f"no result after {timeout_s:g} s")
    value, error = call.outcome
    if error is not None:
        raise error
    return value
