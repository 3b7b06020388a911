"""A call of a Python function that ends in time, or is left behind.

    run_within(5.0, tool, {"a": 2})      its value, its exception, or ToolTimeoutError after 5 seconds

The call runs in a thread of its own. A thread cannot be killed: one that is late gets an exception raised in it, which
ends loops written in Python, and is a daemon, so that one which is stuck in C keeps no process alive. What model text
makes run long belongs into a process (a sandbox), whose tool raises `ToolTimeoutError` itself.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from typing import Any

from envs.tools.calls import ToolTimeoutError


class _LateError(BaseException):
    """Raised in a late thread; not an Exception, so that `except Exception` in a loop does not keep it."""


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
        except BaseException as error:  # also SystemExit: it is the caller who decides
            self.outcome = (None, error)

    def interrupt(self) -> None:
        """Raise `_LateError` in this thread at its next Python instruction."""
        if self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(_LateError))


def run_within(timeout_s: float, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return `function(**arguments)`, or raise what it raises.

    Args:
        timeout_s: seconds, more than 0
        function: what to call
        arguments: by name

    Raises:
        ToolTimeoutError: it has not ended after `timeout_s`.
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
