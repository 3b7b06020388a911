"""Run environment calls in threads, each with a timeout, so that a hanging call ends only its own episode.

    submit(call_id, function, *args) --> queue --> worker threads --> poll(timeout_s) -> [FinishedCall, ...]
                                                        | timeout
                                                        +--> the thread is abandoned, a new one replaces it

The timeout of a call starts when a worker takes it, not when it is queued. A queued call is taken in
bounded time because every call before it ends or is abandoned within `timeout_s`.

An abandoned thread cannot be killed. An exception is raised in it from outside, which ends endless
loops written in Python; a thread blocked in C (a sleep, a socket) remains as a daemon until it
returns by itself. `max_abandoned` bounds the number of such threads.

`EnvPool` keeps idle environment instances between episodes.

Group-level rewards depend on all episodes of a group and are computed once all have ended (`settle`):

    play -> G episodes of a prompt -> env.settle_group(prompt_id, turns) -> G rewards, which replace those of the turns

`settle_group` is an optional method of an environment. `turns` holds, for each valid episode of one group, the
policy's texts in order. It returns the reward of each whole episode, which is assigned to its last turn. Evaluation
does not settle: it uses the environment's own rewards. If `settle_group` fails or times out, the episodes of the group
end as if the environment had failed during play.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.rollout.episodes import turns_of, valid_of
from rllib_srl.rollout.replies import BadReplyError, Constructed, attribute, construct
from rllib_srl.types import StopReason

logger = logging.getLogger(__name__)

_REAP_EVERY_S = 0.5
_GRACE_S = 0.5  # time for an abandoned Python loop to react to the exception raised in it


class EnvPool:
    """Idle environment instances of episodes without an error, kept because construction may be expensive.

    Invariant: an instance is either in the pool or held by exactly one episode.
    """

    def __init__(self) -> None:
        self._idle: dict[Callable[[], Any], list[Constructed]] = {}  # by creator

    def take(self, creator: Callable[[], Any]) -> Constructed | None:
        """Remove and return an idle instance made by `creator`, or None; the caller then owns it."""
        idle = self._idle.get(creator)
        return idle.pop() if idle else None

    def put(self, instance: Constructed) -> None:
        """Return an instance to the pool; it must not have failed, and no thread may be executing in it."""
        self._idle.setdefault(instance.creator, []).append(instance)

    def drain(self) -> list[Constructed]:
        instances = [instance for idle in self._idle.values() for instance in idle]
        self._idle.clear()
        return instances

    @property
    def num_idle(self) -> int:
        return sum(len(idle) for idle in self._idle.values())


class RunEndedError(ValueError):
    """An environment raised an exception with `ends_run`: the run ends with its message."""


class TooManyHangingCallsError(RuntimeError):
    """More than `max_abandoned` environment calls hang and cannot be ended."""


class _AbandonedError(BaseException):
    """Raised inside an abandoned thread; not an Exception, so that `except Exception` in a loop does not keep it."""


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """The outcome of one call: a value, an error or a timeout.

    Invariant: `error` is empty exactly when `value` is the function's return value.
    """

    call_id: Hashable
    value: Any = None
    error: str = ""  # one line
    timed_out: bool = False
    ends_run: bool = False  # the exception has `ends_run`: without its cause being fixed, no run makes sense


class _Job:
    """One call and its two races, each decided by the first thread to acquire a lock (never released).

    Invariant: the owner of `begin` decides whether the function runs at all; the owner of `end`
    decides whether its result counts or its thread is abandoned.
    """

    __slots__ = ("args", "begin", "call_id", "end", "function", "started", "worker")

    def __init__(self, call_id: Hashable, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.call_id, self.function, self.args = call_id, function, args
        self.begin, self.end = threading.Lock(), threading.Lock()
        self.started = 0.0
        self.worker: _Worker | None = None

    def run(self) -> FinishedCall:
        try:
            return FinishedCall(self.call_id, value=self.function(*self.args))
        except BaseException as error:  # SystemExit from an environment must not end the worker either
            return FinishedCall(self.call_id, error=one_line(error), ends_run=getattr(error, "ends_run", False) is True)


class _Worker(threading.Thread):
    """A thread that runs jobs until it gets None or its job is abandoned."""

    def __init__(self, jobs: queue.SimpleQueue[_Job | None], done: queue.SimpleQueue[FinishedCall]) -> None:
        super().__init__(daemon=True, name="environment-call")
        self.jobs, self.done = jobs, done
        self.job: _Job | None = None

    def run(self) -> None:
        try:
            while (job := self.jobs.get()) is not None:
                job.worker, job.started = self, time.monotonic()
                if not job.begin.acquire(blocking=False):
                    continue  # abandoned while it was queued
                self.job = job
                finished = job.run()
                if not job.end.acquire(blocking=False):
                    return  # abandoned: another worker has replaced this one
                self.job = None
                self.done.put(finished)
        except _AbandonedError:
            return

    def interrupt(self) -> None:
        """Raise `_AbandonedError` in this thread at its next Python instruction.

        Must be called only after the thread was abandoned: it then never runs another job, so
        the exception cannot hit another job.
        """
        if self.is_alive() and self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(_AbandonedError))


class EnvCalls:
    """Runs functions in `num_workers` threads and returns each result, error or timeout exactly once.

    Invariant: there are always `num_workers` threads that can take a call; abandoned ones do not
    count. All methods are called from one thread. Above `max_abandoned` living abandoned threads `poll` raises.
    """

    def __init__(self, num_workers: int, timeout_s: float, *, max_abandoned: int = 64) -> None:
        self.timeout_s, self.max_abandoned = timeout_s, max_abandoned
        self.num_abandoned = 0
        self.pool = EnvPool()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[FinishedCall] = queue.SimpleQueue()
        self._open: dict[Hashable, _Job] = {}
        self._workers: list[_Worker] = []
        self._abandoned: list[_Worker] = []
        self._reaped_at = 0.0
        self._is_closed = False
        for _ in range(num_workers):
            self._add_worker()

    def submit(self, call_id: Hashable, function: Callable[..., Any], *args: Any) -> None:
        """Queue `function(*args)`; `poll` returns its outcome with `call_id`.

        Raises:
            ValueError: if a call with this id is still open, or after `close`.
        """
        if self._is_closed or call_id in self._open:
            state = "already open" if call_id in self._open else "submitted after close()"
            raise ValueError(f"environment call {call_id!r} is {state}; expected a new id and open workers")
        job = _Job(call_id, function, args)
        self._open[call_id] = job
        self._jobs.put(job)

    def discard(self, instance: Constructed) -> None:
        """Close an environment in a worker, without waiting for it; it must not be used again."""
        if not self._is_closed:
            self.submit(_Discarded(), instance.close)

    def abandon_instance(self, instance: Constructed) -> None:
        """Call the `abandon` of an environment in which a call hangs, in a worker, without waiting for it."""
        if not self._is_closed and instance.abandon is not None:
            self.submit(_Discarded(), instance.abandon)

    def poll(self, timeout_s: float) -> list[FinishedCall]:
        """Return the calls that ended; wait up to `timeout_s` for the first one if a call is open.

        Raises:
            TooManyHangingCallsError: if more than `max_abandoned` abandoned threads are alive.
        """
        wait_until = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            finished = self._take_done() + self._expire(now)
            self._reap(now)
            if finished or not self._open or now >= wait_until:
                return finished
            try:
                first = self._done.get(timeout=max(min(wait_until, self._next_deadline(now)) - now, 0.0))
            except queue.Empty:
                continue
            finished = self._close_calls([first]) + self._take_done()
            if finished:
                return finished

    def abandon(self, call_ids: Iterable[Hashable]) -> set[Hashable]:
        """Abandon calls, so that `poll` never returns them; return the ids of those that are still running."""
        jobs = [job for call_id in call_ids if (job := self._open.pop(call_id, None)) is not None]
        # Cancel all queued calls before any thread is replaced: a new thread would start them.
        begun = [job for job in jobs if not job.begin.acquire(blocking=False)]
        running = [job for job in begun if job.end.acquire(blocking=False)]
        for job in running:
            self._replace(job)
        return {job.call_id for job in running}

    @property
    def num_open(self) -> int:
        """Return the number of submitted calls that `poll` has not returned."""
        return len(self._open)

    @property
    def num_hanging(self) -> int:
        """Return the number of abandoned threads that are still alive."""
        self._abandoned = [worker for worker in self._abandoned if worker.is_alive()]
        return len(self._abandoned)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close idle environments and end the threads; those that do not end within `timeout_s` remain as daemons."""
        if self._is_closed:
            return
        self.abandon(list(self._open))
        for instance in self.pool.drain():
            self.discard(instance)
        deadline = time.monotonic() + timeout_s
        with suppress(TooManyHangingCallsError):  # they are daemons, and nothing runs after this
            while self._open and (left := deadline - time.monotonic()) > 0:
                self.poll(left)
        self._is_closed = True
        self.abandon(list(self._open))
        for _ in self._workers:
            self._jobs.put(None)
        for worker in [*self._workers, *self._abandoned]:
            worker.join(max(min(deadline - time.monotonic(), _GRACE_S), 0.0))

    def _add_worker(self) -> None:
        worker = _Worker(self._jobs, self._done)
        self._workers.append(worker)
        worker.start()

    def _take_done(self) -> list[FinishedCall]:
        finished = []
        while not self._done.empty():
            finished.append(self._done.get())
        return self._close_calls(finished)

    def _close_calls(self, finished: list[FinishedCall]) -> list[FinishedCall]:
        """Remove the calls from the open ones; omit abandoned calls and calls to `close`."""
        awaited = []
        for call in finished:
            if self._open.pop(call.call_id, None) is None:
                continue
            if not isinstance(call.call_id, _Discarded):
                awaited.append(call)
            elif call.error:
                logger.warning("closing an environment failed: %s", call.error)
        return awaited

    def _expire(self, now: float) -> list[FinishedCall]:
        """Abandon every call that has run longer than `timeout_s`."""
        expired = []
        for worker in list(self._workers):
            job = worker.job
            if job is not None and now >= job.started + self.timeout_s and job.end.acquire(blocking=False):
                self._replace(job)
                error = f"did not return within {self.timeout_s:g} s (env_timeout_s)"
                logger.warning("an environment call %s; %d were abandoned so far", error, self.num_abandoned)
                expired.append(FinishedCall(job.call_id, error=error, timed_out=True))
        return self._close_calls(expired)

    def _next_deadline(self, now: float) -> float:
        """Return the time of the next timeout; a call that starts after `now` expires later than that."""
        started = [job.started for worker in self._workers if (job := worker.job) is not None]
        return min(started, default=now) + self.timeout_s

    def _replace(self, job: _Job) -> None:
        """Abandon the thread of `job`; the caller holds the job's `end` lock."""
        worker = job.worker
        assert worker is not None  # set before `begin` is taken
        self._workers.remove(worker)
        self._abandoned.append(worker)
        self.num_abandoned += 1
        worker.interrupt()
        self._add_worker()

    def _reap(self, now: float) -> None:
        """Interrupt living abandoned threads again (they may swallow the exception); enforce `max_abandoned`."""
        is_due = now >= self._reaped_at + _REAP_EVERY_S or len(self._abandoned) > self.max_abandoned
        if not self._abandoned or not is_due:
            return
        self._reaped_at = now
        for worker in self._abandoned:
            worker.interrupt()
        if self.num_hanging > self.max_abandoned:
            grace_ends = time.monotonic() + _GRACE_S
            for worker in self._abandoned:
                worker.join(max(grace_ends - time.monotonic(), 0.0))
        if self.num_hanging > self.max_abandoned:
            raise TooManyHangingCallsError(
                f"{self.num_hanging} environment calls timed out and are still running; expected at most "
                f"{self.max_abandoned} (max_abandoned): fix the environment, or raise env_timeout_s"
            )


class _Discarded:
    """The id of a call to `close` whose outcome `poll` does not return."""


def one_line(error: BaseException) -> str:
    """Return type and message of `error` on one line of at most 500 characters, even if its `__str__` raises."""
    try:
        message = " ".join(str(error).split())
    except Exception as nested:
        message = f"(its message cannot be printed: {type(nested).__name__})"
    return f"{type(error).__name__}: {message}"[:500]


def settle(
    episodes: Sequence[SingleAgentEpisode],
    *,
    envs: Mapping[str, Callable[[], Any]],
    calls: EnvCalls,
    deadline_s: float,
) -> None:
    """Replace, in place, the rewards of every group whose environment has `settle_group`; leave the others unchanged.

    All episodes of the groups have ended, and no call is open. Groups that are not settled `deadline_s` seconds from
    now end as ENV_TIMEOUT.
    """
    end = time.monotonic() + deadline_s
    groups: dict[str, list[SingleAgentEpisode]] = {}
    for episode in valid_of(episodes):
        groups.setdefault(episode.custom_data["group_id"], []).append(episode)
    without: set[str] = set()  # environments that do not settle
    for group in groups.values():
        prompt = group[0].custom_data["prompt"]
        if prompt.env_id in without:
            continue
        instance = calls.pool.take(envs[prompt.env_id])
        if instance is None:
            made = _answer(calls, end, construct, envs[prompt.env_id])
            if made.error:
                _fail(group, made)
                continue
            instance = made.value
        if attribute(instance.env, "settle_group", None) is None:
            without.add(prompt.env_id)
        else:
            texts = [turns_of(episode) for episode in group]
            settled = _answer(calls, end, settled_rewards, instance.env, prompt.prompt_id, texts)
            if settled.error:
                _fail(group, settled)
                if not settled.timed_out:  # after a timeout a hung thread may still be executing in the instance
                    calls.discard(instance)
                continue
            for episode, reward in zip(group, settled.value, strict=True):
                if num := len(episode):
                    episode.set_rewards(new_data=[0.0] * (num - 1) + [reward], at_indices=slice(0, num))
        calls.pool.put(instance)


def settled_rewards(env: Any, prompt_id: str, turns: Sequence[Sequence[str]]) -> list[float]:
    """Return the environment's group-level rewards, one for each episode of the group.

    Raises:
        BadReplyError: they are not one finite number per episode.
    """
    rewards = np.asarray(attribute(env, "settle_group", None)(prompt_id, [list(texts) for texts in turns]), np.float64)
    if rewards.shape != (len(turns),) or not np.isfinite(rewards).all():
        raise BadReplyError(
            f"settle_group returned rewards of shape {rewards.shape}; expected {len(turns)} finite numbers, one for "
            "each episode"
        )
    return [float(reward) for reward in rewards]


def _answer(calls: EnvCalls, end: float, function: Callable[..., Any], *args: Any) -> FinishedCall:
    """Run one call until it ends or until the time `end`."""
    call_id = object()
    calls.submit(call_id, function, *args)
    while (left := end - time.monotonic()) > 0:
        for finished in calls.poll(left):
            if finished.call_id is call_id:
                return finished
    calls.abandon([call_id])
    return FinishedCall(call_id, error="did not return before the runner's deadline", timed_out=True)


def _fail(episodes: Sequence[SingleAgentEpisode], call: FinishedCall) -> None:
    reason = StopReason.ENV_TIMEOUT if call.timed_out else StopReason.ENV_CRASHED
    for episode in episodes:
        prompt = episode.custom_data["prompt"]
        where = f"environment {prompt.env_id!r}, prompt {prompt.prompt_id!r}, settle_group"
        episode.custom_data.update(stop_reason=reason, error=f"{where}: {call.error}")
