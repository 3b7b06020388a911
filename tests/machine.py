"""What the machine that runs the tests offers, asked of other programs than the sandbox, and what runs on it.

A sandbox that works less than it could must fail the tests, and not skip them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rllib_srl.envs.sandbox import kernel
from tests.waiting import wait_until


def offers_namespaces() -> bool:
    """Say whether util-linux's `unshare` can make namespaces, with a user's own where this is not root."""
    program = shutil.which("unshare")
    if program is None:
        return False
    kinds = (["--user"], [])
    return any(
        subprocess.run([program, *kind, "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "true"],
                       capture_output=True, timeout=30).returncode == 0
        for kind in kinds
    )  # fmt: skip


def offers_filters() -> bool:
    """Say whether the kernel has landlock, and with it seccomp."""
    return kernel.landlock_version() > 0


OFFERS = {"namespaces": offers_namespaces(), "filters": offers_filters()}
CAN_ISOLATE = any(OFFERS.values())


def processes_below(pid: int) -> list[int]:
    """Return the processes that descend from `pid`, from /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it has ended meanwhile
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: set[int] = set()
    new = {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return sorted(found)


def still_alive(pids: list[int]) -> list[int]:
    """Return those of `pids` that have not ended."""
    alive = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            alive.append(pid)
    return alive


def outlived_by(script: str, is_killed: bool) -> int:
    """Run a program that prints the process above its children, kill it or let it end; check that they end with it.

    Return the number of children.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-c", script]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True)
    assert parent.stdout is not None
    above = int(parent.stdout.readline())
    assert not is_killed or wait_until(lambda: processes_below(above) != [])
    processes = [above, *processes_below(above)]
    if is_killed:
        parent.kill()
    parent.wait(timeout=60)
    parent.stdout.close()
    assert wait_until(lambda: still_alive(processes) == [])
    return len(processes) - 1
