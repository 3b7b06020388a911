"""A test that its timeout cannot end: its process ends, says where it was, and the other tests run."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

CONFTEST = """
import tests.watchdog
from tests.watchdog import pytest_configure, pytest_exception_interact
from tests.watchdog import pytest_timeout_cancel_timer, pytest_timeout_set_timer
tests.watchdog.GRACE_S = 1.0
"""
TESTS = """
import signal, time
import pytest

def wait_for_good():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # as where Ray drops what the signal's handler raises
    time.sleep(100)

@pytest.fixture
def hangs_at_the_end():
    yield
    wait_for_good()

@pytest.mark.timeout(1)
def test_that_hangs():
    wait_for_good()

@pytest.mark.timeout(1)
def test_that_fails_and_whose_fixture_hangs(hangs_at_the_end):
    assert False

def test_that_passes():
    pass
"""


def outcome(directory, *options):
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", str(directory)]
    env = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, cwd=directory, env=env, timeout=120, capture_output=True, text=True)


@pytest.mark.slow
def test_a_process_that_hangs_ends_with_its_stack_and_the_other_tests_run(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_hangs.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 50\ntimeout_method = signal\n")
    done = outcome(tmp_path, "-v", "-n", "1")
    assert done.returncode == 1
    assert "crashed while running 'test_hangs.py::test_that_hangs'" in done.stdout
    assert "PASSED test_hangs.py::test_that_passes" in done.stdout
    assert done.stderr.count("in wait_for_good") == 2 and done.stderr.count("Timeout (0:00:02)!") == 2


@pytest.mark.slow
def test_when_a_process_dies_the_files_that_are_left_are_tested(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.watchdog import pytest_xdist_make_scheduler\n")
    for number in range(8):
        dying = "def test_dies():\n    import os\n    os._exit(3)\n\n" if number in (1, 4) else ""
        (tmp_path / f"test_{number}.py").write_text(f"{dying}def test_passes():\n    pass\n")
    done = outcome(tmp_path, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert "2 failed, 8 passed" in done.stdout
    assert {f"crashed while running 'test_{number}.py::test_dies'" in done.stdout for number in (1, 4)} == {True}
