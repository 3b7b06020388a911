"""The parent's side of the zygote: a pool of ready workers, one zygote per set of packages and process.

    take()  ->  an unused worker; a new one is started in its place
    end(worker)                     kill it if it still runs; no worker is used twice

At most `MOST_RUNNING` workers run at once in a process; further callers wait, up to a deadline. The zygote ends with
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

from rllib_srl.envs.kept_process import start_kept
from rllib_srl.envs.sandbox.calls import LostWorkerError, SandboxError
from rllib_srl.envs.slots import Slots

# At least as many as a runner has threads for its environments: an episode that waits here for the calls of others may
# exceed the timeout of its own step, and is then dropped through no fault of the policy.
MOST_RUNNING = max(8, min(16, os.cpu_count() or 1))
NUM_WARM = 2  # beyond those that run
WAIT_S = 120.0  # for a free worker
BEGIN_S = 60.0  # until a zygote is ready; packages take seconds to import
CONTROL_S = 10.0  # until the zygote takes an order
_DYING_S = 1.0  # for a process that has closed some descriptors to close the others
_ROOT = str(Path(__file__).absolute().parents[3])  # not resolved: rllib_srl/envs is a link in a checkout
_START = (
    "import sys; sys.path.insert(0, sys.argv[2]); "
    "from rllib_srl.envs.sandbox.zygote import main; main(int(sys.argv[1]))"
)
ENVIRONMENT = {  # the whole environment of the zygote and its workers
    "LANG": "C.UTF-8",
    "PATH": "",
    "PYTHONHASHSEED": "0",  # same output of the same code in every process
    "OMP_WAIT_POLICY": "passive",  # as rllib_srl sets it when it is imported
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
    generation: int  # of the zygote that forked it

    def close(self) -> None:
        """Close this side; a waiting worker then exits."""
        self.channel.close()
        for fd in (self.out, self.err, self.status):
            os.close(fd)


class Pool:
    """Workers of one zygote. Invariant: `_idle` are unused; all methods may be called from any thread."""

    def __init__(self, packages: tuple[str, ...] = (), without: tuple[str, ...] = (), num_warm: int = NUM_WARM):
        self.pid = os.getpid()
        self.mechanisms: frozenset[str] = frozenset()
        self.generation = 0  # number of zygotes started so far
        self.note = ""  # why namespaces were given up after they had been made
        self._packages, self._without, self._num_warm = packages, without, num_warm
        self._slots = Slots(MOST_RUNNING)
        self._lock = threading.Lock()
        self._idle: deque[Worker] = deque()
        self._num_made = 0
        self.is_closed = False
        self._base = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        with self._lock:
            self._begin()

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        """Lend an unused worker, and end it afterwards.

        Raises:
            SandboxError: none became free in time, or the zygote is gone and cannot be restarted.
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
        """Have the zygote kill a worker; its status reports the end."""
        with self._lock:
            self._order({"kill": worker.number}, [])

    def mend(self, generation: int, is_stuck: bool = False) -> None:
        """Start another zygote if the one of `generation` is gone, unless another thread has done so.

        Args:
            generation: of the zygote that was lost
            is_stuck: kill the zygote first
        """
        with self._lock:
            if generation != self.generation or self.is_closed:
                return
            if is_stuck and self._process is not None:
                self._process.kill()
            if is_stuck or self._control is None or _is_closed(self._control):
                self._stop()
                self._begin()

    def close(self) -> None:
        """End the zygote and every worker, and wait until they are gone."""
        self.is_closed = True
        with self._lock:
            self._stop()

    def _taken(self) -> Worker:
        with self._lock:
            worker = self._idle.popleft() if self._idle else self._spawned()
            while len(self._idle) < self._num_warm:
                self._idle.append(self._spawned())
            return worker

    def _spawned(self) -> Worker:
        ours, theirs = socket.socketpair()
        ends = [os.pipe() for _ in range(3)]
        self._num_made += 1
        worker = Worker(self._num_made, ours, ends[0][0], ends[1][0], ends[2][0], self.generation)
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
        if self.is_closed:
            raise SandboxError("the sandbox is closed")
        if self._control is None:
            raise LostWorkerError("the sandbox's zygote could not be started again")
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise LostWorkerError(f"the sandbox's zygote does not respond: {error}") from error

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
        self._idle.extend(self._spawned() for _ in range(self._num_warm))

    def _hello(self, without: tuple[str, ...]) -> dict[str, Any]:
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
        hello: dict[str, Any] = json.loads(answer) if answer else {}
        return hello

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
    """Return whether the zygote's side is closed; after its greeting it sends nothing more."""
    return bool(select.select([control], [], [], _DYING_S)[0])


def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait until the zygote has ended its workers and itself; kill it if it does not."""
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
    """Return this process's pool for `packages`, started on first use. A forked process has its own."""
    key = (os.getpid(), packages, tuple(sorted(without)))
    with _POOLS_LOCK:
        if key not in _POOLS:
            _POOLS[key] = Pool(packages, without)
        return _POOLS[key]


@atexit.register
def close_all() -> None:
    """End every zygote of this process; later calls start another."""
    with _POOLS_LOCK:
        for key in [key for key in _POOLS if key[0] == os.getpid()]:
            _POOLS.pop(key).close()


os.register_at_fork(after_in_child=_POOLS_LOCK._at_fork_reinit)  # type: ignore[attr-defined]
