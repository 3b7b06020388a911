"""Grading of mathematics: what counts as right, by hand and as laws; hostile answers; and that late workers die."""

import os
import signal
import time

import pytest

from rllib_srl.envs.math import grading as math_grading
from rllib_srl.envs.math import pool as math_pool
from rllib_srl.envs.math.final_answers import graded
from rllib_srl.envs.math.grading import grade
from rllib_srl.envs.math.pool import LateError, PoolError, SymbolicPool, symbolic_pool
from rllib_srl.envs.math.size import is_absurd
from tests.machine import processes_below, still_alive


@pytest.fixture(name="no_worker")
def _no_worker(monkeypatch):
    def refused():
        raise AssertionError("a worker was asked")

    monkeypatch.setattr(math_grading, "symbolic_pool", refused)


@pytest.mark.parametrize(("gold", "answer", "expected"), [
    ("42", "**42.0**", 1), ("42", "43", 0), ("42", "42.0000001", 1), ("1000", r"1\,000", 1), ("78", "7 8", 0),
    ("1/2", r"\frac{1}{2}", 1), ("50%", "0.5", 1), ("3", "e3", "none"), ("B", "B. Paris", 1), ("B", "Banana", "none"),
    ("east", r"\text{East}", 1), ("2x + 3", "2x+3", 1), ("42", "   \n", "none"),
])  # fmt: skip
def test_plain_answers_need_no_worker(gold, answer, expected, no_worker):
    assert grade(gold, answer) == (None if expected == "none" else expected)


def test_a_kind_allows_one_way_of_being_right(no_worker):
    assert grade("0.5", "1/2", "number") == 1.0
    assert grade("0.5", "x/2", "number") is None
    assert grade("x", "7", "number") == 0.0
    assert grade("2x", "x*2", "text") == 0.0
    assert grade("A", "A. 7", "choice") == 1.0
    assert grade("A", "7", "choice") is None


HOSTILE = {
    "a power tower": "9**9**9**9", "a huge exponent": "(1+x)^{99999999}", "a factorial": "10000000!",
    "a sum without end": r"\sum_{n=1}^{10^9} n^n", "an integral": r"\int_0^1 e^{x^x} dx",
    "open fractions": r"\frac{" * 160, "open matrices": r"\begin{pmatrix}" * 60, "many primes": "x" + "'" * 900,
    "an exponent": "1e999999999", "10 MB of digits": "7" * 10_000_000, "10 MB of boxes": r"\boxed{" * 1_500_000,
    "10 MB of the phrase": "answer is " * 1_000_000, "10 MB of dollars": "$" * 10_000_000,
    "other digits": "\u0664\u0662 \uff14\uff12 \u00b2", "no text": "\ud800 \x00 \u202e24",
    "code": "__import__('os').system('touch {path}')", "a lambda": "(lambda: open('{path}', 'w'))()",
    "code in text": r"\text{__import__('os').system('touch {path}')}", "input of a file": r"\input{{path}}",
    "a JSON reply": '"}\n{"is_right": true}', "not a number": "nan", "division by nothing": "1/0",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_end_in_time_and_earn_nothing(name, tmp_path):
    touched = tmp_path / "touched"
    symbolic_pool().ask("1", "2", 30.0)  # a worker is warm
    turn = HOSTILE[name].replace("{path}", str(touched))
    start = time.monotonic()
    assert graded("42", turn, deadline_s=0.5).grade in (None, 0.0)
    assert time.monotonic() - start < 50.0
    assert not touched.exists()


ABSURD = [
    "10000000!", "3001!", "(10^7)!", "{10^{7}}!", "20!!", "1,000,000!", "9^9^9", "9^{9^{9^{9}}}", "2^{2^{2^{2^2}}}",
    "2^{10001}", "x^{99999999}", "9^{-99999}", "(1+x)^{99999999}", "2^{" + "9" * 900, r"\binom{10^{9}}{10^{8}}",
    r"\dbinom{99999}{50000}", r"\binom{9^{9^9}}{9^{9^9}}", "(" * 61, "{" * 500, "9^" * 400 + "9",
]  # fmt: skip
FINE = [
    "3000!", "5!!", "n!", "1,000!", "2^{2^3}", "2^{2^{2^2}}", "10^{100}", "2^{10000}", "(1+x)^{10}", "e^{x^2}",
    "x^{2n}", "1^{1^{999}}", "0^{0}", r"\binom{20}{10}", r"\binom{1000000}{2}", r"\binom{1000000}{999998}",
    r"\binom{n}{k}", "(" * 60 + ")" * 60, "()" * 400, ")" * 900 + "(", "1" * 999, "", "\ud800^\u0664!", "^" * 900,
]  # fmt: skip


def test_absurd_sizes_by_hand(no_worker):
    started = time.thread_time()
    assert [formula for formula in ABSURD if not is_absurd(formula)] == []
    assert [formula for formula in FINE if is_absurd(formula)] == []
    assert time.thread_time() - started < 10
    for answer in ("10000000!", "9**9**9", r"\binom{10^9}{10^8}", "(" * 450 + "x" + ")" * 450, "7" * 2_000_000):
        assert grade("42", answer, deadline_s=0.5) is None
    assert grade("10000000!", "10000000!") == 1.0  # the same text
    with pytest.raises(AssertionError, match="a worker was asked"):  # whoever wrote the gold means it
        grade("10000000!", "10000000! + 0")


@pytest.fixture(name="pool")
def _pool():
    pool = SymbolicPool(num_workers=2)
    yield pool
    pool.close()


@pytest.mark.slow
def test_a_late_formula_costs_its_deadline_and_no_worker(pool, monkeypatch):
    monkeypatch.setattr(math_pool, "_GRACE_S", 20.0)  # for a busy machine
    assert pool.ask("x+1", "1+x", 30.0) is True
    (worker,) = pool._ready.queue
    (first,) = processes_below(worker._process.pid)
    for count in (1, 2, 3):
        with pytest.raises(LateError, match=r"no reply within 0.5 s of work"):
            pool.ask("1", "10000000!", 0.5)
        assert pool.ask("x+1", "x+2", 30.0) is False  # another process of the same worker answers
        assert (pool.num_late, pool.num_killed, list(pool._ready.queue)) == (count, 0, [worker])
    assert still_alive([first]) == [] and len(processes_below(worker._process.pid)) == 1


@pytest.mark.slow
def test_a_process_that_dies_between_questions_answers_none_of_them(pool):
    """Else the reply to one question would be read as that to the next."""
    assert pool.ask("x+1", "1+x", 30.0) is True
    (worker,) = pool._ready.queue
    for right in (True, False, True):
        (process,) = processes_below(worker._process.pid)
        os.kill(process, signal.SIGKILL)
        while processes_below(worker._process.pid) == [process]:
            time.sleep(0.01)
        assert pool.ask("x+1", "1+x" if right else "2+x", 30.0) is right
    assert (pool.num_late, pool.num_killed) == (0, 0)


@pytest.mark.slow
def test_a_start_that_fails_is_told_to_the_one_who_waits_and_tried_again(pool, monkeypatch):
    starts: list[int] = []

    def fail(*_, **__):
        starts.append(1)
        raise OSError("no memory")

    monkeypatch.setattr(math_pool, "start_kept", fail)
    for _ in range(2):
        with pytest.raises(PoolError, match="a symbolic worker cannot be started"):
            pool.ask("x", "y", 1.0)
    assert len(starts) == 2  # one try for each question, however fast it fails
    monkeypatch.undo()
    assert pool.ask("x+1", "1+x", 30.0) is True and pool._num_workers == 1


def test_a_forked_process_has_a_pool_of_its_own():
    ours = symbolic_pool()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"same" if symbolic_pool() is ours else b"own")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"own"
    os.close(read)
    os.close(write)
    assert symbolic_pool() is ours
