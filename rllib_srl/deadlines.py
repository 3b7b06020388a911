"""Calls to other processes that end: with an answer, or in time with the name of who did not answer.

    calls -> gather(...) -> (id, value) as each arrives, (id, Failure) for the dead and the silent

An error that the callee raised itself (bad input, a failed weight check) is raised here as it is,
without the layers in between.
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
    """Why a process gave no answer.

    Invariant: `is_silent` means it may still be running, and must be ended before it is replaced.
    """

    reason: str
    is_silent: bool


class ActorFailure(RuntimeError):
    """A process died or did not answer in time, and training cannot go on without it."""


def gather(calls: Mapping[int, ray.ObjectRef], timeout_s: float) -> Iterator[tuple[int, Any]]:
    """Yield (id, value or `Failure`) in order of arrival.

    Args:
        calls: id -> reference of the pending call.
        timeout_s: for all calls together, in seconds.

    Raises:
        Exception: whatever a callee raised itself.
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
