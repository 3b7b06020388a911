"""Call a user's function, plain or async, with a timeout, and read a list of values from what it returns.

    called_within(8.0, f, {"prompt": "2 + 2?", "answer": "4", "row": row})      what f returned, or its exception

All async functions of a process share one event loop. A plain function runs in its own thread (`run_within`).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import cache
from typing import Any

from rllib_srl.envs.posting import seconds_left
from rllib_srl.envs.tools.calls import ToolTimeoutError
from rllib_srl.envs.tools.deadline import run_within

TIMEOUTS = (ToolTimeoutError, TimeoutError, FutureTimeoutError)  # of `called_within`


class NoReward(Exception):
    """Why a function gave no reward; `Rewards` adds function, row and answer."""


def called_within(timeout_s: float, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return what a function returns, or raise its exception.

    Args:
        timeout_s: seconds, more than 0
        function: plain or async
        arguments: by name

    Raises:
        ToolTimeoutError, TimeoutError, FutureTimeoutError: it has not ended after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    value = function(**arguments) if _is_async(function) else run_within(timeout_s, function, arguments)
    return _awaited(value, seconds_left(deadline)) if inspect.iscoroutine(value) else value


def error_of_call(function: Callable[..., Any], names: Collection[str]) -> str:
    """Return why a function cannot be called with arguments of these names, "" if it can or nobody knows."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions that are written in C
        return ""
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        return f"{error}; it takes {signature}"
    return ""


def parameters_of(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Return the parameters of a function, by name whether it needs them, and whether it takes any others."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some functions that are written in C
        return {}, True
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {p.name: p.default is inspect.Parameter.empty for p in parameters if p.kind in kinds}
    return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def listed(value: Any, num: int, what: str) -> list[Any]:
    """Return the entries of a list, a tuple, an array or a tensor.

    Args:
        value: returned by a function
        num: of the entries that are expected
        what: they are for, for the message, such as "completion"

    Raises:
        NoReward: it is something else, or has another length.
    """
    if hasattr(value, "tolist"):  # an array or a tensor
        value = value.tolist()
    several = "" if num == 1 else "s"
    if not isinstance(value, list | tuple):
        shown = cut(repr(value), 60)
        raise NoReward(f"returned {shown}, a {type(value).__name__}; expected a list of {num} number{several}")
    if len(value) != num:
        raise NoReward(f"returned a list of {len(value)}; expected one number for each of {num} {what}{several}")
    return list(value)


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters, with three dots for what is left out."""
    return text if len(text) <= most else f"{text[:most]}..."


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _awaited(coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    future = asyncio.run_coroutine_threadsafe(coroutine, _event_loop())
    try:
        return future.result(timeout_s)
    except FutureTimeoutError:
        future.cancel()
        raise


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="reward-functions").start()
    return loop
