"""Processes that end with their owner: killed, ended, idle or computing; and not with a thread of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import outlived_by

ROOT = Path(__file__).resolve().parents[2]
SLEEPER = """
import sys, time
from rllib_srl.envs.kept_process import end_with
end_with(int(sys.argv[1]))
print(1, flush=True)"""
GRADER = """
import os, threading, time
from rllib_srl.envs.math.pool import symbolic_pool
pool = symbolic_pool()
if {has_computed}:
    assert pool.ask("x + 1", "1 + x", 60.0)
if {computes}:
    threading.Thread(target=pool.ask, args=("1", "10000000!", 60.0), daemon=True).start()
    time.sleep(0.3)
else:
    pool.warm()
    time.sleep(0.3)
print(os.getpid(), flush=True)
{ending}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("has_computed", "computes", "ending"), [
    (True, True, "time.sleep(60)"), (False, False, "time.sleep(60)"), (True, False, "import os; os._exit(0)"),
    (False, True, "raise KeyboardInterrupt"),
])  # fmt: skip
def test_no_grader_outlives_a_runner(has_computed, computes, ending):
    """The runner is killed, or ends otherwise, while its grader starts, is idle, or computes what has no end."""
    script = GRADER.format(has_computed=has_computed, computes=computes, ending=ending)
    is_killed = ending.startswith("time")
    assert is_killed <= outlived_by(script, is_killed) <= 2


def test_one_that_is_orphaned_before_it_has_begun_ends_itself():
    done = subprocess.run([sys.executable, "-c", SLEEPER, "1"], cwd=ROOT, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, b"")  # its owner is not process 1
