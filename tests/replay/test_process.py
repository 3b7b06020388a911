"""The process of the buffer: failures are named in time, and a call is repeated after a restart."""

from __future__ import annotations

import os
import sys
import time
from subprocess import PIPE, Popen

import pytest
import ray

from rllib_srl.common.remote_calls import ActorFailure, Call
from rllib_srl.replay.process import BufferProcess
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store import holder_of
from tests.conftest import ROOT

COUNTING = Call.of(len)


@pytest.fixture
def stubs(ray_here, tmp_path):
    """Return a function that makes a memory of such an actor; all are ended afterwards."""
    made = []

    class Stub:  # here, or no other process could import it
        """Answers, dies, falls silent or fails, as it is told."""

        def __init__(self, way: str, flag: str):
            self.way, self.flag = way, flag

        def call(self, method: str) -> int:
            way = self.way
            if way == "dies once" and not os.path.exists(self.flag):
                open(self.flag, "w").close()
                os._exit(1)
            if way == "silent":
                time.sleep(600)
            if way == "fails":
                raise ValueError("size = -1; expected more")
            return 7

    def of(way: str, timeout_s: float) -> BufferProcess:
        cls = ray.remote(Stub).options(num_cpus=0, max_restarts=-1)
        made.append(cls.remote(way, str(tmp_path / f"flag{len(made)}")))
        ray.get(made[-1].__ray_ready__.remote(), timeout=60)
        return BufferProcess(made[-1], False, tmp_path / "memory.db", timeout_s)

    yield of
    for actor in made:
        ray.kill(actor)


@pytest.mark.slow
def test_a_buffer_that_died_is_asked_again(stubs):
    process = stubs("dies once", timeout_s=30.0)
    assert process.call(COUNTING) == 7 and process.num_restarts == 1
    assert process.call(COUNTING) == 7 and process.num_restarts == 1


@pytest.mark.slow
def test_a_buffer_that_stays_silent_is_reported(stubs):
    with pytest.raises(ActorFailure, match=r"^the memory gave no answer within 3 s while running 'len'$"):
        stubs("silent", timeout_s=3.0).call(COUNTING)


@pytest.mark.slow
def test_what_the_buffer_raises_is_raised_as_it_is(stubs):
    with pytest.raises(ValueError, match="^size = -1; expected more$"):
        stubs("fails", timeout_s=30.0).call(COUNTING)


def test_the_process_that_has_a_database_is_found(tmp_path):
    """It is what ends a stopped process; asking must not take the database from whoever has it."""
    process = BufferProcess.start(ReplaySettings(admit=None), directory=tmp_path, run="", is_local=True, timeout_s=5.0)
    assert process.path.exists() and holder_of(process.path) == os.getpid() == holder_of(process.path)
    process.stop()
    assert holder_of(process.path) is None
    elsewhere = tmp_path / "elsewhere/memory.db"
    assert holder_of(elsewhere) is None
    script = "import sys; from pathlib import Path; from rllib_srl.replay.store import Store\n"
    script += "lock = Store(Path(sys.argv[1])); print('here', flush=True); sys.stdin.read()"
    with Popen([sys.executable, "-c", script, str(elsewhere.parent)], stdin=PIPE, stdout=PIPE, cwd=ROOT) as other:
        assert other.stdout.readline() == b"here\n"
        assert holder_of(elsewhere) == other.pid == holder_of(elsewhere)
        other.stdin.close()
        other.wait(60)
    assert holder_of(elsewhere) is None
