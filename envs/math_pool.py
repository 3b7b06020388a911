"""Symbolic work in processes that can be killed, a few of them for each process that asks.

    symbolic_pool().ask("\\\\frac{1}{2}", "0.5", deadline_s=2.0)      True, False, None (cannot be read), or `LateError`

A worker that is late is killed, and another starts in its place. Threads wait for their worker and compute nothing.
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
from pathlib import Path
from typing import Any

NUM_WORKERS = 4  # started as they are needed
_START_S = 60.0  # a worker imports sympy first
_FREE_S = 30.0  # how long a question waits for a worker
_ENVS_PARENT = str(Path(__file__).resolve().parents[1])


class LateError(Exception):
    """The question was not answered within its deadline; its worker has been killed."""


class PoolError(RuntimeError):
    """No worker could be had: the machine's fault, not the answer's."""


class SymbolicPool:
    """Up to `num_workers` processes that compare formulas.

    Invariant: a worker is idle in here, or held by exactly one thread; a worker that is late or broken is dead.
    """

    def __init__(self, num_workers: int = NUM_WORKERS):
        # Last in, first out, with the places that have no worker yet at the bottom: no more start than are needed.
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._places.put(None)
        self._num_workers = num_workers
        self.num_killed = 0

    def ask(self, gold: str, answer: str, deadline_s: float) -> bool | None:
        """Say whether two formulas mean the same; None if `answer` cannot be read.

        Args:
            gold: the right answer
            answer: the answer to be compared
            deadline_s: seconds from when a worker takes the question

        Raises:
            LateError: it takes longer, or breaks the worker: the answer's fault.
            PoolError: no worker starts, or none is free in time.
        """
        worker = self._taken()
        try:
            if worker is not None and not worker.is_alive:
                worker.kill()
                worker = None
            worker = worker or _Worker()
            reply = worker.ask({"gold": gold, "answer": answer, "deadline_s": deadline_s}, deadline_s)
        except LateError:
            worker = self._replaced(worker)
            raise
        except BaseException:  # also an exception raised in this thread from outside: the worker still computes
            if worker is not None:
                worker.kill()
            worker = None
            raise
        finally:
            self._places.put(worker)
        return reply["is_right"]

    def warm(self) -> None:
        """Start a worker, if there is none, and do not wait for it: the first question will find it ready."""
        try:
            worker = self._places.get(block=False)
        except queue.Empty:  # all are in use, and so warm
            return
        try:
            worker = worker or _Worker()
        finally:
            self._places.put(worker)

    def _replaced(self, worker: _Worker | None) -> _Worker | None:
        if worker is None:
            return None
        self.num_killed += 1
        worker.kill()
        return _Worker()

    def close(self) -> None:
        """End all workers; those in use end when their thread gives up."""
        for _ in range(self._num_workers):
            try:
                worker = self._places.get(block=False)
            except queue.Empty:
                continue
            if worker is not None:
                worker.kill()
            self._places.put(None)

    def _taken(self) -> _Worker | None:
        try:
            return self._places.get(timeout=_FREE_S)
        except queue.Empty:
            raise PoolError(f"no symbolic worker was free within {_FREE_S:g} s; {self._num_workers} exist") from None


class _Worker:
    """One process that runs `envs.math_worker`. Invariant: between questions its pipes are empty, once it is ready."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, (_ENVS_PARENT, os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "envs.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        """Say whether the process runs."""
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        if not self._is_ready:
            try:
                self._read(_START_S)
            except LateError as error:
                raise PoolError(f"a symbolic worker did not start: {error}") from error
            self._is_ready = True
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PoolError(f"a symbolic worker has ended between questions ({error})") from error
        return self._read(deadline_s)

    def kill(self) -> None:
        """End the process and take note of it, so that none is left behind."""
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
        return json.loads(line)


_pools: dict[int, SymbolicPool] = {}
_pools_lock = threading.Lock()


def symbolic_pool() -> SymbolicPool:
    """Return the pool of this process; a forked process gets its own, for pipes are not to be shared."""
    with _pools_lock:
        pid = os.getpid()
        if pid not in _pools:
            _pools.clear()
            _pools[pid] = SymbolicPool()
            atexit.register(_pools[pid].close)
        return _pools[pid]
