"""Typed remote calls with a timeout.

    Call.of(LLMEnvRunner.load_noise)         a method of the remote class and its arguments, checked by mypy
    call.submit(actor) -> reference          runs in the actor's process; call.run(instance) runs here
    gather(references) -> (id, value) as each arrives, (id, Failure) for processes that died, broke or timed out

One class per kind of process makes the calls: `RunnerGroup`, `Learners`, `BufferProcess`. An exception raised by the
callee itself (bad input, a failed weight check) is raised unchanged, without Ray's wrappers; after a
`ProcessBrokenError` the process has to be replaced like a dead one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import psutil
import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from rllib_srl.types import ProcessBrokenError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class Call(Generic[Result]):
    """A method and its arguments, to be run on an actor or on an object of this process.

    Invariant: the method is found by its name on the target, so an override of a subclass runs.
    """

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @staticmethod
    def of(
        method: Callable[Concatenate[Any, Parameters], Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Call[Result]:
        return Call(method.__name__, args, kwargs)

    def run(self, target: Any) -> Result:
        """Run on an object of this process."""
        result: Result = getattr(target, self.method)(*self.args, **self.kwargs)
        return result

    def submit(self, actor: Any) -> ray.ObjectRef[Result]:
        reference: ray.ObjectRef[Result] = getattr(actor, self.method).remote(*self.args, **self.kwargs)
        return reference

    def submit_both(self, actor: Any) -> list[ray.ObjectRef[Any]]:
        """Start a method that returns two values on an actor; return a reference of each."""
        method = getattr(actor, self.method).options(num_returns=2)
        references: list[ray.ObjectRef[Any]] = method.remote(*self.args, **self.kwargs)
        return references


class Place(NamedTuple):
    """Where a process runs: Ray's id of its node ("" without Ray), and its process id there."""

    node: str
    pid: int

    @staticmethod
    def here() -> Place:
        return Place(str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else "", os.getpid())


def family_of(place: Place) -> list[psutil.Process]:
    """Return a Ray worker process of this node and its descendants, [] if it runs elsewhere or has ended."""
    if place.node != ray.get_runtime_context().get_node_id():
        return []
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        worker = psutil.Process(place.pid)
        if worker.cmdline()[:1] and worker.cmdline()[0].startswith("ray::"):
            return [worker, *worker.children(recursive=True)]
    return []


def end_family(family: Iterable[psutil.Process]) -> None:
    """Kill processes: `ray.kill` leaves stopped ones (SIGSTOP) and engines' workers alive."""
    for process in family:
        with suppress(psutil.NoSuchProcess):  # psutil compares the time at which a process was started
            process.kill()


@dataclass(frozen=True)
class Failure:
    """Why a process returned no value.

    Invariant: `is_hung` (a timeout, a broken process) means that the process may still run and must be killed before
    it is replaced.
    """

    reason: str
    is_hung: bool


class ActorFailure(RuntimeError):
    """A process that training needs died or timed out."""


class ProcessLost(ActorFailure):
    """The run lost a process that it cannot replace, and must be restarted from its newest checkpoint."""

    def __init__(self, reason: str, checkpoint: str | None) -> None:
        """Say which process was lost, and how; `checkpoint` is the path of the newest one."""
        super().__init__(reason, checkpoint)
        self.reason, self.checkpoint = reason, checkpoint

    def __str__(self) -> str:
        if self.checkpoint is None:
            return f"{self.reason}; no checkpoint was written yet (checkpoint_every): start the run again"
        return f"{self.reason}; stop this algorithm and resume with SRL.from_checkpoint({self.checkpoint!r})"


class RunnerFailure(ActorFailure):
    """A runner died or timed out; `failure` says which, so that the caller can restart it."""

    def __init__(self, runner_id: int, failure: Failure, what: str) -> None:
        """Say why the runner returned no value; `what` is the task it was called for."""
        super().__init__(f"runner {runner_id} {failure.reason} while {what}")
        self.runner_id, self.failure, self._what = runner_id, failure, what

    def __reduce__(self) -> tuple[type[RunnerFailure], tuple[int, Failure, str]]:
        """Support pickling: a Tune trial raises the error in another process."""
        return type(self), (self.runner_id, self.failure, self._what)


# Ray's exceptions for a lost process or node; other errors would recur after a restart.
LOSSES = (
    *(ActorFailure, ProcessBrokenError, RayActorError, WorkerCrashedError, NodeDiedError),
    *(ObjectLostError, GetTimeoutError, OutOfMemoryError),
)


def cause_of(error: BaseException) -> BaseException:
    """Return the exception that a remote process raised, unwrapped from Ray's exceptions."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    return error


def is_loss(error: BaseException) -> bool:
    """Return whether an exception reports a lost process, so that restarting the run may help."""
    return isinstance(cause_of(error), LOSSES)


def gather(calls: Mapping[int, ray.ObjectRef[Result]], timeout_s: float) -> Iterator[tuple[int, Result | Failure]]:
    """Yield (id, value or `Failure`) of pending calls in order of arrival; the timeout is for all together.

    Raises:
        Exception: any exception raised by a callee except `ProcessBrokenError`, which is a `Failure`.
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
        yield actor_id, Failure(f"gave no answer within {timeout_s:g} s", is_hung=True)


def _value(ref: ray.ObjectRef[Any]) -> Any:
    try:
        return ray.get(ref, timeout=60)
    except RayActorError as error:
        return Failure(f"died ({first_line(error)})", is_hung=False)
    except RayTaskError as error:
        if isinstance(error.cause, ProcessBrokenError):
            return Failure(f"cannot continue ({first_line(error.cause)})", is_hung=True)
        raise (error.cause if isinstance(error.cause, Exception) else error) from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty, else the error's type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
