"""What the sandbox isolates on this machine, found by attacking it.

    network      yes   network namespace, seccomp       no connection to a port of this machine, no UDP
    files        yes   mount namespace, landlock        a file beside the sandbox is neither read nor written
    ...

A guarantee holds if a mechanism for it is there *and* an attack on it fails, in this process's own sandbox.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.sandbox.calls import Limits, SandboxResult
from envs.sandbox.pool import ENVIRONMENT, pool_of
from envs.sandbox.run import Sandbox

NAMES = ("network", "files", "processes", "memory", "time", "privileges")
_MEMORY_BYTES, _TIMEOUT_S, _LATEST_S = 128 << 20, 0.25, 5.0
_MECHANISMS = {  # what can hold up a guarantee
    "network": ("network", "seccomp"),
    "files": ("mount", "landlock"),
    "processes": ("pid", "seccomp"),
    "privileges": ("uid",),
}
_TITLES = {"network": "network namespace", "mount": "mount namespace", "pid": "process namespace", "uid": "own user id"}
_ATTACK = """
import json, os, socket
def tried(attack):
    try:
        return attack()
    except BaseException as error:
        return f"refused: {type(error).__name__}"
def connected():
    with socket.create_connection(("127.0.0.1", PORT), timeout=1):
        return "done"
def sent():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT))
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
    "tcp": tried(connected), "udp": tried(sent), "read": tried(read), "written": tried(written),
    "forked": tried(forked), "signalled": tried(signalled), "risen": tried(risen), "uid": os.getuid(),
    "environment": len(os.environ),
}))
"""


@dataclass(frozen=True)
class Guarantee:
    """One thing the sandbox should isolate, whether it does, by what, and what was seen."""

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
        """Return the names of those that do not hold."""
        return [row.name for row in self.rows if not row.holds]

    def __str__(self) -> str:
        cells = [("isolates", "", "by", "seen")]
        cells += [(row.name, "yes" if row.holds else "NO", row.how or "nothing", row.seen) for row in self.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[3]]).rstrip() for row in cells]
        return "\n".join([*lines, *([f"namespaces were given up: {self.note}"] if self.note else [])])


_FOUND: dict[tuple[str, ...], Guarantees] = {}
_TOLD: set[tuple[str, ...]] = set()
_LOCK = threading.Lock()
os.register_at_fork(after_in_child=_LOCK._at_fork_reinit)  # type: ignore[attr-defined]


def probe(without: tuple[str, ...] = ()) -> Guarantees:
    """Attack the sandbox and return what held; asked again in the same process, the first answer."""
    without = tuple(sorted(without))
    with _LOCK:
        if without not in _FOUND:
            _FOUND[without] = _probed(without)
        return _FOUND[without]


def told(without: tuple[str, ...] = ()) -> Guarantees:
    """Return what `probe` does, and print it to standard error the first time in a process."""
    found = probe(without)
    key = tuple(sorted(without))
    with _LOCK:
        is_new = key not in _TOLD
        _TOLD.add(key)
    if is_new:
        print(f"sandbox for code of the policy:\n{found}", file=sys.stderr, flush=True)
    return found


def _probed(without: tuple[str, ...]) -> Guarantees:
    pool = pool_of((), without)
    sandbox = Sandbox(Limits(memory_bytes=_MEMORY_BYTES), without=without, is_probed=False)
    attacked, facts, is_connected = _attacked(sandbox)
    hungry = sandbox.run(f"x = bytearray({2 * _MEMORY_BYTES})")
    endless = sandbox.run("while True: pass", timeout_s=_TIMEOUT_S)
    refused = {name: str(fact).startswith("refused") for name, fact in facts.items()}
    is_heard = is_connected or not (refused["tcp"] and refused["udp"])
    holds = {
        "network": not is_heard,
        "files": refused["read"] and refused["written"],
        "processes": not attacked.is_leaking and refused["signalled"],
        "memory": hungry.stop == "memory",
        "time": endless.stop == "timeout" and endless.duration_s < _LATEST_S,
        "privileges": refused["risen"] and facts["uid"] != 0 and facts["environment"] <= len(ENVIRONMENT) + 1,
    }
    seen = {
        "network": f"TCP {facts['tcp']}, UDP {facts['udp']}",
        "files": f"outside: read {facts['read'][:40]}, write {facts['written']}",
        "processes": f"fork {facts['forked']}, signal to the parent {facts['signalled']}",
        "memory": f"an allocation of {2 * _MEMORY_BYTES >> 20} MiB ends as {hungry.stop}",
        "time": f"an endless loop ends as {endless.stop} after {endless.duration_s:.2f} s of {_TIMEOUT_S:g}",
        "privileges": f"user id {facts['uid']}, setuid(0) {facts['risen']}",
    }
    how = {name: _how(name, pool.mechanisms) for name in NAMES} | {"memory": "rlimit", "time": "kill from outside"}
    return Guarantees(tuple(Guarantee(n, holds[n] and bool(how[n]), how[n], seen[n]) for n in NAMES), pool.note)


def _how(name: str, mechanisms: frozenset[str]) -> str:
    return ", ".join(_TITLES.get(m, m) for m in _MECHANISMS.get(name, ()) if m in mechanisms)


def _attacked(sandbox: Sandbox) -> tuple[SandboxResult, dict[str, Any], bool]:
    """Run the attacks; return the result, what each attack says of itself, and whether our port was reached."""
    with tempfile.TemporaryDirectory(prefix="sandbox-probe-") as folder, socket.socket() as listener:
        os.chmod(folder, 0o777)
        (Path(folder) / "secret").write_text("known")
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        names = f"PORT = {listener.getsockname()[1]}\nFOLDER = {folder!r}\nPARENT = {os.getpid()}\n"
        result = sandbox.run(names + _ATTACK)
        try:
            listener.accept()[0].close()
            is_connected = True
        except BlockingIOError:
            is_connected = False
        lines = result.stdout.splitlines() or ["{}"]
        facts = dict.fromkeys(("tcp", "udp", "read", "written", "forked", "signalled", "risen"), "not tried")
        return result, facts | {"uid": 0, "environment": 0} | json.loads(lines[0]), is_connected
