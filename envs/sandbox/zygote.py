"""A small single-threaded process that forks the sandbox's workers, because forking a process with threads is not safe.

    parent --- control (Unix, SEQPACKET) ---> zygote --- fork ---> worker, one per call
    {"spawn": 7} + 4 descriptors                       channel, stdout, stderr go to the worker, status stays here
    {"kill": 7}                                        SIGKILL
                 <--- {"mechanisms": [...]} once       what isolates the workers
    status of 7: {"exit": -9, "cpu_s": 0.3}            written when worker 7 and all it started are gone
                 {"failed": "..."}                     it could not be forked; the zygote goes on

The zygote inherits nothing from the parent: its environment is empty, and it holds no descriptors but these. It dies
with the parent (PR_SET_PDEATHSIG, and the end of the control socket), and its workers with it: if namespaces are
allowed it is process 1 of a namespace, each worker process 1 of one inside that, so the kernel ends all descendants.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rllib_srl.envs.sandbox import kernel, rooms, seccomp, worker

# Modules that most answers import; the only ones if the interpreter is in a home directory and cannot be mounted.
_PRELOADED = (
    "abc", "ast", "base64", "bisect", "calendar", "cmath", "collections.abc", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "decimal", "encodings.idna", "enum", "fractions", "functools", "hashlib", "heapq", "io",
    "itertools", "json", "linecache", "math", "numbers", "operator", "pprint", "random", "re", "statistics", "string",
    "struct", "textwrap", "threading", "time", "traceback", "typing", "unicodedata",
)  # fmt: skip
_SPACES = kernel.NEW_PID | kernel.NEW_NS | kernel.NEW_NET | kernel.NEW_IPC | kernel.NEW_UTS


@dataclass
class _Child:
    """The zygote's record of a worker."""

    pid: int
    pidfd: int
    status: int  # descriptor to write the end to
    folder: str  # on disk, "" where the scratch is a mount


@dataclass
class Zygote:
    """The loop that forks and reaps. Invariant: every child it has is in `children`."""

    control: socket.socket
    setting: worker.Setting
    processes: int = -1  # descriptor of /proc
    children: dict[int, _Child] = field(default_factory=dict)
    base: str = ""  # folder of the scratch folders where they are not mounts

    def run(self) -> None:
        """Serve until the parent is gone."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        own_space = os.open("/proc/self/ns/pid", os.O_RDONLY) if "pid" in self.setting.mechanisms else -1
        with suppress(OSError):
            self.processes = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
        self._enter_room()
        self._send({"mechanisms": sorted(self.setting.mechanisms)})
        is_open = True
        while is_open:
            for fd, _ in poll.poll():
                if fd == self.control.fileno():
                    is_open = self._obey(poll, own_space)
                else:
                    self._reap(poll, fd)
        self._end()

    def _enter_room(self) -> None:
        if "mount" in self.setting.mechanisms:
            rooms.enter(self.setting.readable)
            socket.sethostname("sandbox")
        else:
            self.base = tempfile.mkdtemp(prefix="sandbox-")
            os.chmod(self.base, 0o711)

    def _send(self, message: dict[str, Any]) -> None:
        self.control.send(json.dumps({**message, "base": self.base}).encode())

    def _obey(self, poll: select.poll, own_space: int) -> bool:
        data, fds, _, _ = socket.recv_fds(self.control, 4096, 4)
        if not data:
            return False
        message = json.loads(data)
        if "spawn" in message:
            self._spawn(message["spawn"], fds, poll, own_space)
        elif child := self.children.get(message["kill"]):
            os.kill(child.pid, signal.SIGKILL)
        return True

    def _spawn(self, number: int, fds: list[int], poll: select.poll, own_space: int) -> None:
        """Fork a worker; if the machine has no more processes or descriptors, report it and continue."""
        folder = os.path.join(self.base, str(number)) if self.base else ""
        try:
            pid, pidfd = self._forked(fds, folder, own_space)
        except OSError as error:
            with suppress(OSError, IndexError):  # without a status the parent sees its end
                os.write(fds[3], json.dumps({"failed": f"no worker could be forked ({error})"}).encode())
            for fd in fds:
                os.close(fd)
            return
        *others, status = fds
        for fd in others:
            os.close(fd)
        self.children[number] = _Child(pid, pidfd, status, folder)
        poll.register(pidfd, select.POLLIN)

    def _forked(self, fds: list[int], folder: str, own_space: int) -> tuple[int, int]:
        if len(fds) != 4:  # the kernel drops those for which this process has no room
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if own_space >= 0:  # a process may make a namespace of processes only from the one it is in
            kernel.setns(own_space, kernel.NEW_PID)
            kernel.unshare(kernel.NEW_PID)
        pid = os.fork()
        if pid == 0:
            self._be_killed_first()
            channel, out, err, _ = fds
            worker.main(channel, out, err, folder, self.setting)  # does not return
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _be_killed_first(self) -> None:
        """Make the kernel's OOM killer choose this worker before the zygote or the process that runs the sandbox."""
        with suppress(OSError):
            fd = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=self.processes)
            os.write(fd, b"1000")
            os.close(fd)

    def _reap(self, poll: select.poll, pidfd: int) -> None:
        number = next(number for number, child in self.children.items() if child.pidfd == pidfd)
        child = self.children.pop(number)
        poll.unregister(pidfd)
        _, status, usage = os.wait4(child.pid, 0)
        os.close(pidfd)
        if "pid" not in self.setting.mechanisms:
            self._end_strays()
        if child.folder:
            shutil.rmtree(child.folder, ignore_errors=True)
        ended = {"exit": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime}
        with suppress(OSError):  # the parent stopped listening: it is closing
            os.write(child.status, json.dumps(ended).encode())
        os.close(child.status)

    def _end_strays(self) -> None:
        """Kill processes that ended workers left behind; this process is their subreaper."""
        known = {child.pid for child in self.children.values()}
        while strays := [pid for pid in _children_of_this() if pid not in known]:
            for pid in strays:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _end(self) -> None:
        for child in self.children.values():
            os.kill(child.pid, signal.SIGKILL)
        for child in self.children.values():
            os.waitpid(child.pid, 0)
        if self.base:
            self._end_strays()
            shutil.rmtree(self.base, ignore_errors=True)


def _children_of_this() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _unshared(allowed: bool) -> set[str]:
    """Enter new namespaces if the machine allows them, and return what they isolate."""
    if not allowed:
        return set()
    uid, gid = os.geteuid(), os.getegid()
    try:
        if uid == 0:
            kernel.unshare(_SPACES)
            return {"pid", "mount", "network"}
        kernel.unshare(_SPACES | kernel.NEW_USER)
        for name, line in (("setgroups", "deny"), ("uid_map", f"{worker.NOBODY} {uid} 1"),
                           ("gid_map", f"{worker.NOBODY} {gid} 1")):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
        return {"user", "pid", "mount", "network"}
    except OSError:
        return set()


def _works(restrict: Any) -> bool:
    """Try a restriction in a child process, because it cannot be undone."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            restrict()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def _setting(asked: dict[str, Any], mechanisms: set[str], readable: list[str]) -> worker.Setting:
    version = 0 if "landlock" in asked["without"] else kernel.landlock_version()
    if version and _works(lambda: kernel.landlock(version, readable, [])):
        mechanisms.add("landlock")
    is_filtering = "seccomp" not in asked["without"] and seccomp.is_known_machine()
    if is_filtering and _works(lambda: seccomp.restrict(1)):
        mechanisms.add("seccomp")
    may_change = "uid" not in asked["without"]
    if "user" in mechanisms or os.geteuid() != 0 or (may_change and _works(lambda: worker.become(worker.NOBODY))):
        mechanisms.add("uid")
    return worker.Setting(frozenset(mechanisms), version, readable)


def main(fd: int) -> None:
    """Serve over the control socket `fd`; errors before that are reported to the parent."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    control = socket.socket(fileno=fd)
    try:
        _serve(control)
    except Exception as error:  # the parent would not see it otherwise
        control.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        raise


def _serve(control: socket.socket) -> None:
    asked = json.loads(control.recv(65536))
    sys.path[:] = [*sys.path[1:], *asked["site_folders"]]  # the first is where this package was found
    readable = rooms.readable_paths(asked["site_folders"])
    mechanisms = _unshared("namespaces" not in asked["without"])
    if mechanisms:
        pid = os.fork()
        if pid:
            control.close()  # the parent must see the end of the one that serves
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    _preload(asked["packages"])  # after the namespaces, which a process with threads may not make
    Zygote(control, _setting(asked, mechanisms, readable)).run()


def _preload(packages: list[str]) -> None:
    for name in (*_PRELOADED, *packages):
        importlib.import_module(name)
    # A lock that another thread holds during a fork is never released in the child.
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        started = f"importing {', '.join(packages)} started {num_threads - 1} threads"
        raise RuntimeError(f"{started}; expected none, since a process with threads cannot fork safely")
