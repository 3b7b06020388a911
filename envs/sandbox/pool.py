"""The parent's side of the zygote: workers held ready, one zygote for each set of packages and process.

    take()  ->  a worker that nobody has used, and a new one on its way
    end(worker)                     it is killed, unless it is gone already; nobody uses a worker twice

Workers are few (`MOST_RUNNING` at once in a process); who finds none free waits, up to a deadline. The zygote ends with
this process, however it ends (envs/kept_process.py).
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from envs.kept_process import start_kept
from envs.sandbox.calls import LostWorkerError, SandboxError
from envs.slots import Slots

MOST_RUNNING = max(4, min(16, os.cpu_count() or 1))
NUM_WARM = 2  # beyond those that run
WAIT_S = 120.0  # for a free worker
BEGIN_S = 60.0  # until a zygote is ready; packages take seconds to import
CONTROL_S = 10.0  # until the zygote takes an order
_DYING_S = 1.0  # in which a process that has lost some descriptors loses the others
_ROOT = str(Path(__file__).resolve().parents[2])
_START = "import sys; sys.path.insert(0, sys.argv[2]); from envs.sandbox.zygote import main; main(int(sys.argv[1]))"
ENVIRONMENT = {  # all that the zygote and its workers have
    "LANG": "C.UTF-8",
    "PATH": "",
    "PYTHONHASHSEED": "0",  # the same code prints the same in every process
    "OMP_NUM_THREADS": "1",  # a zygote must have one thread: see its _preload
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


@dataclass
class Worker:
    """A process that waits for one request. Invariant: its descriptors are open until `close`."""

    number: int
    channel: socket.socket
    out: int
    err: int
    status: int

    def close(self) -> None:
        """Close this side; a worker that waits then exits."""
        self.channel.close()
        for fd in (self.out, self.err, self.status):
            os.close(fd)


class Pool:
    """Workers of one zygote. Invariant: `_idle` are unused; all methods may be called from any thread."""

    def __init__(self, packages: tuple[str, ...] = (), without: tuple[str, ...] = ()):
        self.pid = os.getpid()
        self.mechanisms: frozenset[str] = frozenset()
        self.generation = 0  # how many zygotes there have been
        self.note = ""  # why namespaces were given up after they had been made
        self._packages, self._without = packages, without
        self._slots = Slots(MOST_RUNNING)
        self._lock = threading.Lock()
        self._idle: deque[Worker] = deque()
        self._num_made = 0
        self._base = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        with self._lock:
            self._begin()

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        """Lend a fresh worker, and end it afterwards.

        Raises:
            SandboxError: none became free in time, or the zygote is gone and cannot be started again.
        """
        if not self._slots.acquire(WAIT_S):
            raise SandboxError(f"all {MOST_RUNNING} workers of this process were busy for {WAIT_S:g} s")
        try:
            worker = self._taken()
            try:
                yield worker
            finally:
                worker.close()
        finally:
            self._slots.release()

    def kill(self, worker: Worker) -> None:
        """Ask the zygote to kill a worker; its status says when it is gone."""
        with self._lock:
            self._order({"kill": worker.number}, [])

    def mend(self, generation: int) -> None:
        """Start another zygote if the one of `generation` is gone, unless somebody has done so."""
        with self._lock:
            if generation == self.generation and self._control is not None and _is_closed(self._control):
                self._stop()
                self._begin()

    def close(self) -> None:
        """End the zygote and every worker, and wait until they are gone."""
        with self._lock:
            self._stop()

    def _taken(self) -> Worker:
        with self._lock:
            worker = self._idle.popleft() if self._idle else self._spawned()
            while len(self._idle) < NUM_WARM:
                self._idle.append(self._spawned())
            return worker

    def _spawned(self) -> Worker:
        ours, theirs = socket.socketpair()
        ends = [os.pipe() for _ in range(3)]
        self._num_made += 1
        worker = Worker(self._num_made, ours, *(end[0] for end in ends))
        try:
            self._order({"spawn": worker.number}, [theirs.fileno(), *(end[1] for end in ends)])
        except SandboxError:
            worker.close()
            raise
        finally:
            theirs.close()
            for _, write_end in ends:
                os.close(write_end)
        ours.setblocking(False)
        for fd in (worker.out, worker.err, worker.status):
            os.set_blocking(fd, False)
        return worker

    def _order(self, message: dict[str, int], fds: list[int]) -> None:
        if self._control is None:
            raise SandboxError("the sandbox is closed")
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise LostWorkerError(f"the sandbox's zygote takes no orders: {error}") from error

    def _begin(self) -> None:
        """Start a zygote, and once more without namespaces if it could make them but not use them."""
        hello = self._hello(self._without)
        if "failed" in hello:
            self._stop()
            self.note = str(hello["failed"])
            hello = self._hello((*self._without, "namespaces"))
        if "mechanisms" not in hello:
            self._stop()
            raise SandboxError(f"the sandbox's zygote did not start: {hello.get('failed', 'it ended')}")
        self.mechanisms, self.generation = frozenset(hello["mechanisms"]), self.generation + 1
        self._base = hello["base"]
        self._idle.extend(self._spawned() for _ in range(NUM_WARM))

    def _hello(self, without: tuple[str, ...]) -> dict:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(BEGIN_S)
        fd = theirs.fileno()
        command = [sys.executable, "-s", "-P", "-S", "-B", "-c", _START, str(fd), _ROOT]
        nowhere: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        try:
            self._process = start_kept(
                command, pass_fds=[fd], env=ENVIRONMENT, cwd="/", start_new_session=True, **nowhere
            )
        except OSError as error:
            return {"failed": f"it cannot be started ({error})"}
        finally:
            theirs.close()
        asked = {"site_folders": _site_folders(self._packages), "packages": self._packages, "without": without}
        try:
            self._control.send(json.dumps(asked).encode())
            answer = self._control.recv(65536)
        except OSError as error:
            return {"failed": f"no answer ({error})"}
        self._control.settimeout(CONTROL_S)
        return json.loads(answer) if answer else {}

    def _stop(self) -> None:
        while self._idle:
            self._idle.pop().close()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            _ended(self._process)
            self._process = None
        if self._base:
            shutil.rmtree(self._base, ignore_errors=True)
            self._base = ""


def _is_closed(control: socket.socket) -> bool:
    """Say whether the zygote's side is closed: after its greeting it says nothing more."""
    return bool(select.select([control], [], [], _DYING_S)[0])


def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait until the zygote has ended its workers and itself, and kill it if it does not."""
    deadline = time.monotonic() + CONTROL_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    if process.poll() is None:
        process.kill()


def _site_folders(packages: tuple[str, ...]) -> list[str]:
    """Return the folders that `packages`, and what they import, are installed in."""
    if not packages:
        return []
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    for name in packages:
        spec = find_spec(name.partition(".")[0])
        if spec is not None and spec.origin and spec.submodule_search_locations:
            folders.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(folders))


_POOLS: dict[tuple[int, tuple[str, ...], tuple[str, ...]], Pool] = {}
_POOLS_LOCK = threading.Lock()


def pool_of(packages: tuple[str, ...], without: tuple[str, ...]) -> Pool:
    """Return this process's pool for `packages`, started if it is the first time. A fork of a process has its own."""
    key = (os.getpid(), packages, without)
    with _POOLS_LOCK:
        if key not in _POOLS:
            _POOLS[key] = Pool(packages, without)
        return _POOLS[key]


@atexit.register
def close_all() -> None:
    """End every zygote of this process; calls that come later start another."""
    with _POOLS_LOCK:
        for key in [key for key in _POOLS if key[0] == os.getpid()]:
            _POOLS.pop(key).close()


os.register_at_fork(after_in_child=_POOLS_LOCK._at_fork_reinit)  # type: ignore[attr-defined]
