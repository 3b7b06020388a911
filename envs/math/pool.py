"""A pool of killable processes for symbolic work, a few per calling process.

    symbolic_pool().ask("\\\\frac{1}{2}", "0.5", deadline_s=2.0)      True, False, None (cannot be read), or `LateError`

A formula that exceeds its deadline ends the process that computes it, and its worker forks another at once
(envs/math/worker.py). A worker that does not report this in time is killed and replaced. Threads only wait for their
worker; they receive workers that are ready, so no thread waits for a start while another worker is free. Workers end
with this process, however it ends (envs/kept_process.py).
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_srl.envs.kept_process import start_kept
from rllib_srl.envs.slots import Slots

# As many as a runner has threads for its environments, so that none waits for late answers of others. They start as
# they are needed.
NUM_WORKERS = 8
_START_S = 60.0  # a worker imports sympy first
_FREE_S = 90.0  # longest wait for a worker, including its start
_WALL_FACTOR = 4.0  # how much longer than its work an answer may take on a busy machine; 8 s of a step's 10
_GRACE_S = 0.5  # for a worker to report that it was late, before it is killed; 8.5 s of a step's 10 in all
_ROOT = str(Path(__file__).absolute().parents[3])  # not resolved: rllib_srl/envs is a link in a checkout


class LateError(Exception):
    """The request exceeded its deadline; the process that computed it has been killed."""


class PoolError(RuntimeError):
    """No worker was available, for a reason other than the answer."""


@dataclass(frozen=True)
class _Failure:
    """A failed start: its number in the pool, and the reason."""

    start: int
    error: PoolError


class SymbolicPool:
    """Up to `num_workers` processes that compare formulas.

    Invariant: a worker is ready in the pool, or starting (one at a time, because the imports take seconds of work), or
    held by exactly one thread; a late or broken worker is dead. Threads are served first in, first out.
    """

    def __init__(self, num_workers: int = NUM_WORKERS):
        # Last in, first out, so that few workers stay in memory. A failed start is reported to one waiter.
        self._ready: queue.LifoQueue[_Worker | _Failure] = queue.LifoQueue()
        self._turns = Slots(num_workers)
        self._lock = threading.Lock()
        self._most_workers, self._num_workers = num_workers, 0
        self._num_starts = self._num_waiting = 0
        self._is_starting = self._is_closed = False
        self.num_killed = 0  # number of killed workers
        self.num_late = 0  # requests that were late without costing a worker

    def ask(self, gold: str, answer: str, deadline_s: float) -> bool | None:
        """Return whether two formulas mean the same; None if `answer` cannot be read.

        Args:
            gold: the right answer
            answer: the answer to compare
            deadline_s: seconds of processor time; on a busy machine up to four times as long by the wall clock

        Raises:
            LateError: the comparison takes longer, or breaks the worker: caused by the answer.
            PoolError: no worker starts, or none is free in time.
        """
        last = time.monotonic() + _FREE_S
        if not self._turns.acquire(_FREE_S):
            raise self._none_free()
        try:
            return self._answered_by(self._taken(last), gold, answer, deadline_s)
        finally:
            self._turns.release()

    def _answered_by(self, worker: _Worker, gold: str, answer: str, deadline_s: float) -> bool | None:
        try:
            request = {"gold": gold, "answer": answer, "deadline_s": deadline_s, "wall_s": _WALL_FACTOR * deadline_s}
            reply = worker.ask(request, _WALL_FACTOR * deadline_s + _GRACE_S)
        except LateError:
            self.num_killed += 1
            self._end(worker)
            self.warm()
            raise
        except BaseException:  # also one raised in this thread from outside, while the worker still computes
            self._end(worker)
            raise
        self._ready.put(worker)
        if "is_late" in reply:
            self.num_late += 1
            raise LateError(f"no reply within {deadline_s:g} s of work, or {_WALL_FACTOR * deadline_s:g} s in total")
        is_right: bool | None = reply["is_right"]
        return is_right

    def warm(self) -> None:
        """Start a worker if none is ready, without waiting: the next request will find it."""
        with self._lock:
            is_enough = not self._ready.empty() or self._is_starting or self._num_workers >= self._most_workers
            if is_enough or self._is_closed:
                return
            self._is_starting, self._num_workers = True, self._num_workers + 1
            self._num_starts += 1
            number = self._num_starts
        threading.Thread(target=self._start, args=[number], name="starts a symbolic worker", daemon=True).start()

    def close(self) -> None:
        """End all workers; those in use end when their thread releases them."""
        self._is_closed = True
        with suppress(queue.Empty):
            while True:
                worker = self._ready.get(block=False)
                if isinstance(worker, _Worker):
                    self._end(worker)

    def _none_free(self) -> PoolError:
        return PoolError(f"no symbolic worker was free within {_FREE_S:g} s; {self._num_workers} exist")

    def _taken(self, last: float) -> _Worker:
        with self._lock:
            known, self._num_waiting = self._num_starts, self._num_waiting + 1
        try:
            return self._waited_for(known, last)
        except PoolError:
            if self._num_waiting > 1:
                self.warm()  # the failed start also served the other waiters
            raise
        finally:
            with self._lock:
                self._num_waiting -= 1

    def _waited_for(self, known: int, last: float) -> _Worker:
        """Return a running worker; failures of starts up to number `known` are ignored: this is a new attempt."""
        while True:
            self.warm()
            try:
                outcome = self._ready.get(timeout=max(last - time.monotonic(), 0.0))
            except queue.Empty:
                raise self._none_free() from None
            if isinstance(outcome, _Failure):
                if outcome.start > known:
                    raise outcome.error
            elif outcome.is_alive:
                return outcome
            else:  # it died between two requests
                self._end(outcome)

    def _start(self, number: int) -> None:
        started: _Worker | _Failure
        try:
            started = _Worker()
        except PoolError as error:
            started = _Failure(number, error)
        except Exception as error:  # any failure must reach the waiting threads
            pool_error = PoolError(f"a symbolic worker did not start ({type(error).__name__}: {error})")
            started = _Failure(number, pool_error)
        with self._lock:
            self._is_starting = False
            self._num_workers -= isinstance(started, _Failure)
        self._ready.put(started)
        if self._is_closed:
            self.close()

    def _end(self, worker: _Worker) -> None:
        worker.kill()
        with self._lock:
            self._num_workers -= 1


class _Worker:
    """One process that runs envs/math/worker.py. Invariant: it is ready, and its pipes are empty between requests."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH", ""))))
        command = [sys.executable, "-m", "rllib_srl.envs.math.worker", str(os.getpid())]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        try:
            self._process = start_kept(command, env=environment, **pipes)
        except OSError as error:
            raise PoolError(f"a symbolic worker cannot be started ({error})") from error
        try:
            self._read(_START_S)
        except LateError as error:
            self.kill()
            raise PoolError(f"a symbolic worker did not start: {error}") from error

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PoolError(f"a symbolic worker exited between questions ({error})") from error
        return self._read(deadline_s)

    def kill(self) -> None:
        """Kill the process and reap it."""
        self._process.kill()
        self._process.wait(timeout=_START_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was written to a dead worker cannot be flushed
                    pipe.close()

    def _read(self, deadline_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe, line, end = self._process.stdout.fileno(), b"", time.monotonic() + deadline_s
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(end - time.monotonic(), 0.0))
            piece = os.read(pipe, 65536) if ready else b""
            if not piece:
                raise LateError("it ended" if ready else f"no reply after {deadline_s:g} s")
            line += piece
        reply: dict[str, Any] = json.loads(line)
        return reply


_pools: dict[int, SymbolicPool] = {}
_pools_lock = threading.Lock()


def symbolic_pool() -> SymbolicPool:
    """Return the pool of this process; a forked process gets its own, because pipes cannot be shared."""
    with _pools_lock:
        pid = os.getpid()
        if pid not in _pools:
            _pools.clear()
            _pools[pid] = SymbolicPool()
            atexit.register(_pools[pid].close)
        return _pools[pid]
