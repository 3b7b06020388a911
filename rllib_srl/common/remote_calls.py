"""Remote calls with a timeout: `gather` yields a value or a `Failure` for every call.

    calls -> gather(...) -> (id, value) as each arrives, (id, Failure) for processes that died or timed out

An exception raised by the callee itself (bad input, a failed weight check) is raised unchanged, without Ray's
wrappers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError


@dataclass(frozen=True)
class Failure:
    """Why a process returned no value.

    Invariant: `is_silent` (a timeout) means that the process may still run and must be killed before it is replaced.
    """

    reason: str
    is_silent: bool


class ActorFailure(RuntimeError):
    """A process that training needs died or timed out."""


class RunnerFailure(ActorFailure):
    """A runner died or timed out; `failure` tells which, so that the caller can restart it."""

    def __init__(self, runner_id: int, failure: Failure, what: str) -> None:
        """Create the error.

        Args:
            runner_id: the runner.
            failure: why it returned no value.
            what: the task it was called for.
        """
        super().__init__(f"runner {runner_id} {failure.reason} while {what}")
        self.runner_id, self.failure, self._what = runner_id, failure, what

    def __reduce__(self) -> tuple[type[RunnerFailure], tuple[int, Failure, str]]:
        """Support pickling: a Tune trial raises the error in another process."""
        return type(self), (self.runner_id, self.failure, self._what)


def gather(calls: Mapping[int, ray.ObjectRef], timeout_s: float) -> Iterator[tuple[int, Any]]:
    """Yield (id, value or `Failure`) in order of arrival.

    Args:
        calls: id -> reference of the pending call.
        timeout_s: timeout for all calls together, in seconds.

    Raises:
        Exception: any exception raised by a callee.
    """
    pending = {ref: actor_id for actor_id, ref in calls.items()}
    deadline = time.monotonic() + timeout_s
    while pending:
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        for ref in ready:
            yield pending.pop(ref), _value(ref)
        if not ready:
            break
    for actor_id in pending.values():
        yield actor_id, Failure(f"gave no answer within {timeout_s:g} s", is_silent=True)


def _value(ref: ray.ObjectRef) -> Any:
    try:
        return ray.get(ref, timeout=60)
    except RayActorError as error:
        return Failure(f"died ({_first_line(error)})", is_silent=False)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
