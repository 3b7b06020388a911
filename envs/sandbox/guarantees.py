"""Determine what the sandbox isolates on this machine by attacking it.

    network      yes   network namespace, seccomp       no connection to a port of this machine, no UDP, no Unix socket
    files        yes   mount namespace, landlock        a file beside the sandbox is neither read nor written
    ...

A guarantee holds if a mechanism for it exists *and* an attack on it fails, in this process's own sandbox.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_srl.envs.sandbox.calls import Limits, SandboxResult
from rllib_srl.envs.sandbox.pool import ENVIRONMENT, pool_of
from rllib_srl.envs.sandbox.run import Sandbox

NAMES = ("network", "files", "processes", "memory", "time", "privileges")
_MEMORY_BYTES, _TIMEOUT_S, _LATEST_S = 128 << 20, 0.25, 5.0
_DYING_S = 1.0  # in which a process that was sent a signal ends
_MECHANISMS = {  # what can hold up a guarantee
    "network": ("network", "seccomp"),
    "files": ("mount", "landlock"),
    "processes": ("pid", "seccomp"),
    "privileges": ("uid",),
}
_TITLES = {"network": "network namespace", "mount": "mount namespace", "pid": "process namespace", "uid": "own user id"}
# Import before the code is locked up: a failed import would look like a refusal.
_ATTACK = """
import ctypes, json, os, socket
def tried(attack):
    try:
        return attack()
    except BaseException as error:
        return f"refused: {type(error).__name__}"
def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
def connected():
    with socket.create_connection(("127.0.0.1", PORT), timeout=1):
        return "done"
def sent():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT))
    return "done"
def told(address):
    pair = (ctypes.c_int * 2)()
    libc = ctypes.CDLL(None, use_errno=True)
    checked(libc.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM, 0, pair))
    name = socket.AF_UNIX.to_bytes(2, "little") + os.fsencode(address)
    checked(libc.sendto(pair[0], b"x", ctypes.c_size_t(1), 0, name, len(name)))
    return "done"
def killed():
    O_ASYNC, F_SETFL, F_SETOWN, F_SETSIG = 0x2000, 4, 8, 10
    libc = ctypes.CDLL(None, use_errno=True)
    read_end, write_end = os.pipe()
    for command, argument in ((F_SETSIG, 9), (F_SETOWN, VICTIM), (F_SETFL, O_ASYNC)):
        checked(libc.fcntl(read_end, command, argument))
    os.write(write_end, b"x")
    return "done"
def read():
    with open(FOLDER + "/secret") as file:
        return "done" + file.read()
def written():
    with open(FOLDER + "/written", "w") as file:
        file.write("x")
    return "done"
def forked():
    if os.fork() == 0:
        import time
        time.sleep(60)
    return "done"
def signalled():
    os.kill(PARENT, 0)
    return "done"
def risen():
    os.setuid(0)
    return "done"
print(json.dumps({
    "tcp": tried(connected), "udp": tried(sent), "path": tried(lambda: told(FOLDER + "/socket")),
    "abstract": tried(lambda: told("\\0" + ABSTRACT)), "killed": tried(killed), "read": tried(read),
    "written": tried(written), "forked": tried(forked), "signalled": tried(signalled), "risen": tried(risen),
    "uid": os.getuid(), "environment": len(os.environ),
}))
"""
_FACTS = ("tcp", "udp", "path", "abstract", "read", "written", "forked", "signalled", "killed", "risen")


@dataclass(frozen=True)
class Guarantee:
    """One isolation guarantee: whether it holds, by which mechanisms, and what the attack observed."""

    name: str
    holds: bool
    how: str
    seen: str


@dataclass(frozen=True)
class Guarantees:
    """The guarantees of this machine, in the order of `NAMES`; `str` of it is a table."""

    rows: tuple[Guarantee, ...]
    note: str = ""  # why less was used than the machine seemed to offer

    @property
    def missing(self) -> list[str]:
        """Return the names of the guarantees that do not hold."""
        return [row.name for row in self.rows if not row.holds]

    def __str__(self) -> str:
        cells = [("isolates", "", "by", "seen")]
        cells += [(row.name, "yes" if row.holds else "NO", row.how or "nothing", row.seen) for row in self.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[3]]).rstrip() for row in cells]
        return "\n".join([*lines, *([f"namespaces are not available: {self.note}"] if self.note else [])])


_FOUND: dict[tuple[str, ...], Guarantees] = {}
_REPORTED: set[tuple[str, ...]] = set()
_LOCK = threading.Lock()
os.register_at_fork(after_in_child=_LOCK._at_fork_reinit)  # type: ignore[attr-defined]


def probe(without: tuple[str, ...] = ()) -> Guarantees:
    """Attack the sandbox and return the guarantees; later calls in the same process return the first result."""
    without = tuple(sorted(without))
    with _LOCK:
        if without not in _FOUND:
            _FOUND[without] = _probed(without)
        return _FOUND[without]


def reported(without: tuple[str, ...] = ()) -> Guarantees:
    """Return the result of `probe`, and print it to standard error the first time in a process."""
    guarantees = probe(without)
    key = tuple(sorted(without))
    with _LOCK:
        is_new = key not in _REPORTED
        _REPORTED.add(key)
    if is_new:
        print(f"sandbox for code of the policy:\n{guarantees}", file=sys.stderr, flush=True)
    return guarantees


def _probed(without: tuple[str, ...]) -> Guarantees:
    pool = pool_of((), without)
    sandbox = Sandbox(Limits(memory_bytes=_MEMORY_BYTES), without=without, is_probed=False)
    attacked, facts, reached = _attacked(sandbox)
    hungry = sandbox.run(f"x = bytearray({2 * _MEMORY_BYTES})")
    endless = sandbox.run("while True: pass", timeout_s=_TIMEOUT_S)
    refused = {name: str(fact).startswith("refused") for name, fact in facts.items()}
    is_heard = bool({"tcp", "path", "abstract"} & reached) or not (refused["tcp"] and refused["udp"])
    # A missing socket or an undelivered signal is neither refusal nor harm: only what has arrived counts.
    arrived = {
        name: "done" if name in reached else fact if refused[name] else "without effect" for name, fact in facts.items()
    }
    holds = {
        "network": not is_heard,
        "files": refused["read"] and refused["written"],
        "processes": not attacked.is_leaking and refused["signalled"] and "killed" not in reached,
        "memory": hungry.stop == "memory",
        "time": endless.stop == "timeout" and endless.duration_s < _LATEST_S,
        "privileges": refused["risen"] and facts["uid"] != 0 and facts["environment"] <= len(ENVIRONMENT) + 1,
    }
    seen = {
        "network": f"TCP {facts['tcp']}, UDP {facts['udp']}, Unix datagram to a path {arrived['path']}, "
        f"to a name {arrived['abstract']}",
        "files": f"outside: read {facts['read'][:40]}, write {facts['written']}",
        "processes": f"fork {facts['forked']}, signal to the parent {facts['signalled']}, "
        f"SIGKILL by a pipe's owner {arrived['killed']}",
        "memory": f"an allocation of {2 * _MEMORY_BYTES >> 20} MiB ends as {hungry.stop}",
        "time": f"an endless loop ends as {endless.stop} after {endless.duration_s:.2f} s of {_TIMEOUT_S:g}",
        "privileges": f"user id {facts['uid']}, setuid(0) {facts['risen']}",
    }
    means = {name: _how(name, pool.mechanisms) for name in NAMES} | {"memory": "rlimit", "time": "kill from outside"}
    return Guarantees(tuple(Guarantee(n, holds[n] and bool(means[n]), means[n], seen[n]) for n in NAMES), pool.note)


def _how(name: str, mechanisms: frozenset[str]) -> str:
    return ", ".join(_TITLES.get(m, m) for m in _MECHANISMS.get(name, ()) if m in mechanisms)


def _attacked(sandbox: Sandbox) -> tuple[SandboxResult, dict[str, Any], set[str]]:
    """Run the attacks; return the result, the report of each attack, and the attacks that reached their target."""
    with tempfile.TemporaryDirectory(prefix="sandbox-probe-") as folder, _victim() as victim:
        os.chmod(folder, 0o777)
        (Path(folder) / "secret").write_text("known")
        abstract = Path(folder).name
        with _listening(folder, abstract) as listeners:
            port = listeners["tcp"].getsockname()[1]
            names = {"PORT": port, "FOLDER": folder, "ABSTRACT": abstract, "PARENT": os.getpid(), "VICTIM": victim.pid}
            result = sandbox.run("".join(f"{name} = {value!r}\n" for name, value in names.items()) + _ATTACK)
            reached = {name for name, listener in listeners.items() if _is_reached(listener)}
        lines = result.stdout.splitlines() or ["{}"]
        facts = dict.fromkeys(_FACTS, "not tried") | {"uid": 0, "environment": 0} | json.loads(lines[0])
        with suppress(subprocess.TimeoutExpired):
            victim.wait(timeout=_DYING_S if facts["killed"] == "done" else 0)
            reached.add("killed")
        return result, facts, reached


@contextmanager
def _victim() -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of this user that waits to be killed."""
    command = [sys.executable, "-I", "-S", "-c", "input()"]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def _listening(folder: str, abstract: str) -> Iterator[dict[str, socket.socket]]:
    """Listen, as other programs of this machine do, on a port, at a path that all may write to, and under a name."""
    with (
        socket.socket() as tcp,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as path,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name,
    ):
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        path.bind(f"{folder}/socket")
        os.chmod(f"{folder}/socket", 0o777)
        name.bind(f"\0{abstract}")
        listeners = {"tcp": tcp, "path": path, "abstract": name}
        for listener in listeners.values():
            listener.setblocking(False)
        yield listeners


def _is_reached(listener: socket.socket) -> bool:
    try:
        if listener.type == socket.SOCK_STREAM:
            listener.accept()[0].close()
        else:
            listener.recv(1)
    except BlockingIOError:
        return False
    return True
