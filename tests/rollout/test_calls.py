"""Threads with deadlines: each call comes back once, a hung one costs one thread, and threads do not leak."""

import threading
import time
from types import SimpleNamespace

import pytest

from rllib_srl.rollout.env_calls import EnvCalls, TooManyHangingCallsError, one_line
from rllib_srl.rollout.replies import Constructed
from tests.rollout.fakes import misbehave
from tests.waiting import wait_until


def poll_all(calls: EnvCalls, num: int, timeout_s: float = 30.0) -> dict:
    ended: list = []
    deadline = time.monotonic() + timeout_s
    while len(ended) < num and time.monotonic() < deadline:
        ended += calls.poll(deadline - time.monotonic())
    assert len({call.call_id for call in ended}) == len(ended) == num
    return {call.call_id: call for call in ended}


@pytest.mark.slow
def test_endless_python_loops_end_and_all_workers_are_replaced():
    before = set(threading.enumerate())
    calls = EnvCalls(4, 0.1)
    for i in range(12):  # three times as many as there are workers
        calls.submit(i, misbehave, "loop-step" if i % 2 else "stubborn-step", "step")
    ended = poll_all(calls, 12)
    assert all(call.timed_out for call in ended.values())
    assert (calls.num_abandoned, len(calls._workers)) == (12, 4)
    assert wait_until(lambda: calls.num_hanging == 0)
    calls.timeout_s = 20.0
    calls.submit("after", lambda: "fine")
    assert poll_all(calls, 1)["after"].value == "fine"
    calls.close()
    assert set(threading.enumerate()) <= before


def test_a_loop_that_swallows_everything_is_interrupted_again():
    calls = EnvCalls(1, 0.1)
    num_caught = 0

    def swallow() -> None:
        nonlocal num_caught
        while num_caught < 3:
            try:
                time.sleep(0.001)
            except BaseException:
                num_caught += 1

    calls.submit("swallow", swallow)
    assert poll_all(calls, 1)["swallow"].timed_out

    def has_ended() -> bool:
        calls.poll(0.0)
        return calls.num_hanging == 0

    assert wait_until(has_ended)
    assert num_caught == 3
    calls.close()


def test_the_clock_starts_when_the_call_runs(monkeypatch):
    now = 0.0

    def work() -> None:
        nonlocal now
        now += 10
        time.sleep(0.05)  # for `poll` to look at the clock

    monkeypatch.setattr("rllib_srl.rollout.env_calls.time", SimpleNamespace(monotonic=lambda: now))
    calls = EnvCalls(1, 30.0)
    for i in range(6):  # 60 s of work in one queue
        calls.submit(i, work)
    ended = poll_all(calls, 6)
    assert [i for i in ended if ended[i].timed_out] == []
    calls.close()


@pytest.mark.slow
def test_too_many_hanging_threads_are_an_error():
    calls = EnvCalls(2, 0.05, max_abandoned=1)
    calls.submit(1, time.sleep, 60)
    assert poll_all(calls, 1)[1].timed_out
    calls.submit(2, time.sleep, 60)
    with pytest.raises(TooManyHangingCallsError, match=r"2 environment calls timed out .* at most 1 \(max_abandoned\)"):
        poll_all(calls, 1)
    calls.close(0.1)


def test_abandoned_calls_do_not_come_back():
    calls = EnvCalls(1, 60.0)
    is_running, ran = threading.Event(), []

    def loop() -> None:
        is_running.set()
        misbehave("loop-step", "step")

    calls.submit("running", loop)
    calls.submit("queued", ran.append, 1)
    assert is_running.wait(60)
    assert calls.abandon(["running", "queued", "unknown"]) == {"running"}
    calls.submit("next", lambda: "next")
    assert poll_all(calls, 1)["next"].value == "next"
    assert (calls.num_open, calls.num_abandoned, calls.poll(0.05), ran) == (0, 1, [], [])
    assert wait_until(lambda: calls.num_hanging == 0)
    calls.close()


def test_close_closes_idle_environments_within_a_bound():
    closed = []

    class Env:
        def __init__(self, mischief: str) -> None:
            self.mischief = mischief

        def close(self) -> None:
            misbehave(self.mischief, "close")
            closed.append(self.mischief)

    calls = EnvCalls(2, 3.0)
    for mischief in ("", "crash-close", "loop-close", "fine"):
        calls.pool.put(Constructed(Env, Env(mischief), ()))
    calls.pool.put(Constructed(object, object(), ()))
    assert calls.pool.num_idle == 5
    started = time.monotonic()
    calls.close(60.0)
    assert time.monotonic() - started < 55
    assert (sorted(closed), calls.pool.num_idle) == (["", "fine"], 0)
    with pytest.raises(ValueError, match="submitted after close"):
        calls.submit(1, print)
    calls.close()  # a second time is fine


def test_one_line_survives_any_error():
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert one_line(ValueError("a\n  b\tc")) == "ValueError: a b c"
    assert one_line(Hostile()) == "Hostile: (its message cannot be printed: RuntimeError)"
    assert len(one_line(ValueError("x" * 10_000))) == 500
