"""The process of the buffer: failures are named in time; tests/algorithm/test_memory_actors.py has real kills."""

from __future__ import annotations

import time

import pytest
import ray

from rllib_srl.common.remote_calls import ActorFailure, Call
from rllib_srl.replay.client import BufferProcess

COUNTING = Call.of(len)


@pytest.fixture
def stubs(ray_here, tmp_path):
    """Return a function that makes a memory of such an actor; all are ended afterwards."""
    made = []

    class Stub:  # here, or no other process could import it
        """Falls silent or fails, as it is told."""

        def __init__(self, way: str):
            self.way = way

        def call(self, method: str) -> None:
            if self.way == "silent":
                time.sleep(600)
            raise ValueError("size = -1; expected more")

    def of(way: str, timeout_s: float) -> BufferProcess:
        cls = ray.remote(Stub).options(num_cpus=0, max_restarts=-1)
        made.append(cls.remote(way))
        ray.get(made[-1].__ray_ready__.remote(), timeout=60)
        return BufferProcess(made[-1], False, tmp_path / "memory.db", timeout_s)

    yield of
    for actor in made:
        ray.kill(actor)


@pytest.mark.slow
def test_a_buffer_that_stays_silent_is_reported(stubs):
    with pytest.raises(ActorFailure, match=r"^the memory gave no answer within 3 s while running 'len'$"):
        stubs("silent", timeout_s=3.0).call(COUNTING)


@pytest.mark.slow
def test_what_the_buffer_raises_is_raised_as_it_is(stubs):
    with pytest.raises(ValueError, match="^size = -1; expected more$"):
        stubs("fails", timeout_s=30.0).call(COUNTING)
