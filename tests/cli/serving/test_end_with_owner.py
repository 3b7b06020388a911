"""What a killed server has started ends with it, grandchildren included."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.cli.killing import are_gone
from tests.waiting import wait_until

OWNER = """
import os, subprocess, sys, time
command = [sys.executable, "-m", "rllib_srl.cli.serving.end_with_owner", str(os.getpid())]
command += [sys.executable, "-c", sys.argv[1]]
subprocess.Popen(command, start_new_session=True)
time.sleep(60)
"""
TRAINER = """
import os, signal, sys, time
from pathlib import Path
from rllib_srl.cli.serving.trainer_process import NICENESS, start_trainer
process = start_trainer(Path(sys.argv[1]), sys.stderr.buffer)
while os.getpriority(os.PRIO_PROCESS, process.pid) != NICENESS:  # then it is tied to its owner
    time.sleep(0.01)
process.send_signal(signal.SIGSTOP)
Path(os.environ["PIDS"]).write_text(f"{process.pid} .")
time.sleep(60)
"""
PROGRAM = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid} .")
time.sleep(60)
"""


def owned(code, tmp_path, argument):
    """Start an owner; return it, and the ids of the processes that it has started."""
    pids = tmp_path / "pids"
    owner = subprocess.Popen([sys.executable, "-c", code, argument], env={**os.environ, "PIDS": str(pids)})
    assert wait_until(lambda: pids.exists() and pids.read_text().endswith("."), 120)
    return owner, [int(word) for word in pids.read_text().split()[:-1]]


@pytest.mark.parametrize("is_trainer", [False, True], ids=["group", "stopped trainer"])
def test_what_a_killed_owner_has_started_ends(tmp_path, is_trainer):
    owner, started = owned(TRAINER, tmp_path, str(tmp_path)) if is_trainer else owned(OWNER, tmp_path, PROGRAM)
    try:
        assert all(map(psutil.pid_exists, started)) and len(started) == (1 if is_trainer else 2)
        owner.kill()
        owner.wait()
        assert are_gone(started)
    finally:
        for pid in filter(psutil.pid_exists, started):
            os.kill(pid, signal.SIGKILL)
