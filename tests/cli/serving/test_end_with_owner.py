"""What a killed server has started ends with it, grandchildren included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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
from rllib_srl.cli.serving.trainer.process import NICENESS, start_trainer
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


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:  # it has ended, perhaps between two calls
        return False


def test_a_killed_owner_takes_the_whole_group_along(tmp_path):
    pids = tmp_path / "pids"
    environment = {**os.environ, "PIDS": str(pids)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, PROGRAM], env=environment)
    assert wait_until(lambda: pids.exists() and pids.read_text().endswith("."))
    started = [int(word) for word in pids.read_text().split()[:2]]
    assert all(map(is_running, started))
    owner.kill()
    owner.wait()
    assert wait_until(lambda: not any(map(is_running, started)))


def test_a_trainer_that_is_stopped_ends_with_its_owner(tmp_path):
    pids = tmp_path / "pids"
    environment = {**os.environ, "PIDS": str(pids)}
    owner = subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path)], env=environment)
    assert wait_until(lambda: pids.exists() and pids.read_text().endswith("."), 120)
    trainer = int(pids.read_text().split()[0])
    try:
        assert is_running(trainer)
        owner.kill()
        owner.wait()
        assert wait_until(lambda: not is_running(trainer))
    finally:
        if is_running(trainer):
            os.kill(trainer, signal.SIGKILL)
