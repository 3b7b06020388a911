"""Reward functions of form "batch": which calls share one call of the function, in what order, and what fails."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rllib_srl.envs.math.question_file import QuestionFile
from rllib_srl.envs.rewards import batching
from rllib_srl.envs.rewards.scoring import RewardError, Rewards
from tests.waiting import at_once, wait_until

FUNCTIONS = """
import asyncio, threading, time

CALLS = []  # the answers of each call

def length(prompts, answers, rows):
    CALLS.append(list(answers))
    assert prompts == [f"{row['n']}?" for row in rows]
    values = [len(answer) / 100 for answer in answers]
    answers.clear()
    return values

async def later(prompts, answers, rows):
    CALLS.append(list(answers))
    await asyncio.sleep(0.01)
    return tuple(row["n"] / 100 for row in rows)

class Array(list):
    def tolist(self): return list(self)

def array(prompts, answers, rows):
    CALLS.append(list(answers))
    return Array(row["n"] / 100 for row in rows)

def picky(prompts, answers, rows):
    CALLS.append(list(answers))
    if "raise" in answers: raise ValueError("no such answer")
    if "short" in answers: return [1.0]
    if "hang" in answers: time.sleep(60.0)
    return [float("nan") if answer == "nan" else 0.5 for answer in answers]

class Scorer:
    @classmethod
    def half(cls, prompts, answers, rows):
        CALLS.append(list(answers))
        return [0.5] * len(answers)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def gathering(monkeypatch) -> None:
    """Let a batch wait for all calls of `together` in place of `WAIT_S`: the machine may be busy."""
    run = batching.Gathered._run

    def patient_run(self: batching.Gathered, batch: batching._Batch) -> None:
        def wait(wait_s: float) -> bool:
            assert wait_s == batching.WAIT_S
            return wait_until(lambda: len(batch.calls) == num_at_once)

        monkeypatch.setattr(batch.is_full, "wait", wait)
        run(self, batch)

    monkeypatch.setattr(batching.Gathered, "_run", patient_run)


num_at_once = 0


def rewards_of(file: Path, function: str, timeout_s: float = 60.0, **settings) -> Rewards:
    return Rewards.load({"function": f"{file}:{function}", "form": "batch"}, timeout_s, **settings)


def calls_of(rewards: Rewards) -> list[list[str]]:
    function = rewards._functions[0][1].function
    return getattr(function, "__func__", function).__globals__["CALLS"]


def scored(rewards: Rewards, answers: Sequence[str]) -> list[object]:
    def of(n: int) -> Callable[[], object]:
        return lambda: rewards.score(f"{n}?", answers[n], {"n": n}).total

    return together([of(n) for n in range(len(answers))])


def together(tasks: Sequence[Callable[[], object]]) -> list[object]:
    global num_at_once
    num_at_once = len(tasks)
    return at_once(tasks)


@pytest.mark.usefixtures("gathering")
@pytest.mark.parametrize("function", ["length", "later", "array"])
def test_calls_at_one_time_share_one_call_and_each_gets_its_own_value(file: Path, function: str) -> None:
    rewards, answers = rewards_of(file, function), ["x" * n for n in range(20)]
    assert scored(rewards, answers) == [n / 100 for n in range(20)]
    assert [sorted(call) for call in calls_of(rewards)] == [answers]


def test_at_most_64_answers_are_one_call_and_a_full_batch_does_not_wait(file: Path, monkeypatch) -> None:
    monkeypatch.setattr(batching, "WAIT_S", 60.0)
    rewards, start = rewards_of(file, "length"), time.monotonic()
    assert scored(rewards, ["x" * (n % 50) for n in range(128)]) == [n % 50 / 100 for n in range(128)]
    assert sorted(len(call) for call in calls_of(rewards)) == [64, 64]
    assert time.monotonic() - start < 50.0


@pytest.mark.usefixtures("gathering")
@pytest.mark.parametrize("function", ["length", "Scorer.half"])
def test_environments_of_a_process_share_the_batches_of_a_function(file: Path, function: str) -> None:
    data = file.parent / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"question": f"{n}?", "n": n}) for n in range(8)))
    reward = [{"function": f"{file}:{function}", "form": "batch"}]
    envs = [QuestionFile({"path": str(data), "num_shots": 0, "reward": reward}) for _ in range(8)]
    for number, env in enumerate(envs):
        env.reset(options={"prompt_id": env._ids[number]})
    steps = together([lambda env=env, n=n: env.step(f" {'x' * n}\n")[1] for n, env in enumerate(envs, 1)])
    expected = [n / 100 for n in range(1, 9)] if function == "length" else [0.5] * 8
    assert steps == pytest.approx(expected)
    assert [sorted(call) for call in calls_of(envs[0]._rewards)] == [["x" * n for n in range(1, 9)]]


@pytest.mark.usefixtures("gathering")
@pytest.mark.parametrize(("failure", "reason"), [
    ("raise", "picky' raised ValueError: no such answer; row"),
    ("short", "picky' returned a list of 1; expected one number for each of 3 answers; row"),
    ("hang", "picky' gave no reward within reward_timeout_s = 3; row"),
])  # fmt: skip
def test_a_call_that_fails_fails_its_answers_and_no_others(file: Path, failure: str, reason: str) -> None:
    rewards = rewards_of(file, "picky", timeout_s=3.0 if failure == "hang" else 60.0, on_error="drop")
    failed = scored(rewards, ["a", failure, "b"])
    for number, (error, answer) in enumerate(zip(failed, ["a", failure, "b"])):
        assert isinstance(error, RewardError) and not error.ends_run
        assert reason in str(error) and f'row {{"n": {number}}}, answer {answer!r}' in str(error)
    assert scored(rewards_of(file, "picky"), ["a", "c", "b"]) == [0.5] * 3  # also while the one that hangs is under way
    assert [len(call) for call in calls_of(rewards)] == [3, 3]
