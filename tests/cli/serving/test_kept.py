"""What a killed server has started ends with it, grandchildren included."""

from __future__ import annotations

import os
import subprocess
import sys
import time

OWNER = """
import os, subprocess, sys, time
command = [sys.executable, "-m", "rllib_srl.cli.serving.kept", str(os.getpid()), sys.executable, "-c", sys.argv[1]]
subprocess.Popen(command, start_new_session=True)
time.sleep(60)
"""
PROGRAM = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid} .")
time.sleep(60)
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_killed_owner_takes_the_whole_group_along(tmp_path):
    pids = tmp_path / "pids"
    environment = {**os.environ, "PIDS": str(pids)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, PROGRAM], env=environment)
    assert until(lambda: pids.exists() and pids.read_text().endswith("."))
    started = [int(word) for word in pids.read_text().split()[:2]]
    assert all(map(is_running, started))
    owner.kill()
    owner.wait()
    assert until(lambda: not any(map(is_running, started)))
