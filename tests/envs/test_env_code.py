"""The environments that run code: what they ask, what their parts compute, and how they pay for hostile answers."""

import re

import pytest

from rllib_srl.envs.coding import function_tasks, number_problems
from rllib_srl.envs.coding.code_task import CodeTask, is_same
from rllib_srl.envs.coding.python_tool import PythonTool
from rllib_srl.envs.sandbox.calls import WeakSandboxError
from rllib_srl.envs.sandbox.run import MECHANISMS, Sandbox
from tests.envs.play import first_ids
from tests.machine import CAN_ISOLATE

pytestmark = pytest.mark.skipif(not CAN_ISOLATE, reason="this machine has neither namespaces nor landlock")


def played(env, prompt_id, *turns):
    """Return observations, rewards, whether it ended, and the last info."""
    start = env.reset(options={"prompt_id": prompt_id})[0]
    steps = [env.step(turn) for turn in turns]
    return [start, *(step[0] for step in steps)], [step[1] for step in steps], any(steps[-1][2:4]), steps[-1][4]


def code(body):
    return f"\n```python\n{body}\n```\n"


@pytest.mark.parametrize("make", [PythonTool, CodeTask])
def test_a_machine_that_cannot_isolate_is_refused_unless_allowed(make, monkeypatch):
    """An environment asks for every guarantee, and passes its setting on."""
    asked = []

    class Weak(Sandbox):
        def __init__(self, limits=None, *, allow_weak_sandbox=False, without=()):
            asked.append(allow_weak_sandbox)
            super().__init__(limits, allow_weak_sandbox=allow_weak_sandbox, without=MECHANISMS)

    monkeypatch.setattr("rllib_srl.envs.coding.code_task.Sandbox", Weak)
    monkeypatch.setattr("rllib_srl.envs.coding.python_tool.Sandbox", Weak)
    with pytest.raises(WeakSandboxError, match="set allow_weak_sandbox = True"):
        make({})
    make({"allow_weak_sandbox": True})
    assert asked == [False, True]


def test_a_tool_episode_by_hand():
    env = PythonTool({"num_shots": 0})
    observations, rewards, ended, _ = played(
        env, "power_mod 37 20 101", "<python>print(37 ** 2)\n1 / 0</python>",
        "<python>x = 5\nx + 1</python>", "\n```python\nprint(pow(37, 20, 101))\n```\n", "<answer>95</answer>",
    )  # fmt: skip
    assert observations[0].endswith("What is the remainder when 37 to the power of 20 is divided by 101?\n")
    assert "1369" in observations[1] and "ZeroDivisionError: division by zero" in observations[1]
    assert "\n6\n" in observations[2].replace(">", "\n").replace("<", "\n")
    assert "95" in observations[3]
    assert (rewards, ended) == ([0.0, 0.0, 0.0, 1.0], True)
    assert pow(37, 20, 101) == 95


def test_a_call_that_runs_too_long_ends_the_episode():
    env = PythonTool({"num_shots": 0, "call_timeout_s": 0.3})
    _, rewards, ended, info = played(env, "collatz 7", "<python>while True: pass</python>")
    assert (rewards, ended, info["stop_reason"]) == ([0.0], True, "tool_timeout")


def test_every_number_template_prints_what_it_solves():
    """The code is run in the sandbox; `solve` is another way to the same number. And no id comes twice."""
    sandbox = Sandbox()
    for place, name in enumerate(number_problems.NAMES):
        ids = {number_problems.prompt_id_of(place + len(number_problems.NAMES) * n) for n in range(2000)}
        assert len(ids) == 2000
        for prompt_id in sorted(ids)[:3]:
            template, numbers = number_problems.parsed(prompt_id)
            result = sandbox.run(template.code.format(*numbers))
            assert result.stdout == f"{template.solve(*numbers)}\n", name
    assert number_problems.parsed("divisible 100 3 11")[0].solve(100, 3, 11) == 33 + 9 - 3
    assert number_problems.parsed("collatz 7")[0].solve(7) == 16
    assert number_problems.parsed("growth 100 10 5")[0].solve(100, 10, 5) == 160  # 110 121 133 146 160


def test_a_function_task_by_hand_and_its_hidden_checks():
    task = function_tasks.task("list 0 20 0", 3)  # divisible by 2, times 2, the sum
    assert task.words.startswith(
        "Write f(xs), where xs is a list of whole numbers: keep those that are divisible by 2, "
        "multiply each by 2, and return the sum of the results. For example, f(["
    )
    assert task.checks[0] == ([], 0)
    for xs, wanted in task.checks:
        assert wanted == sum(2 * x for x in xs if x % 2 == 0)
    env = CodeTask({"num_shots": 0})
    gold = "def f(xs):\n    ys = [x * 2 for x in xs if x % 2 == 0]\n    return sum(ys)"
    assert env.gold_turns("list 0 20 0") == [code(gold)]
    assert function_tasks.task("recurrence 1 0 0 0", 3).checks[:2] == ((0, 1), (1, 1))
    env = CodeTask({"num_shots": 2})
    for prompt_id in first_ids(env, count=200):
        prompt, task = env.reset(options={"prompt_id": prompt_id})[0], function_tasks.task(prompt_id, 8)
        hidden = [argument for argument, _ in task.checks if isinstance(argument, list) and len(argument) > 1]
        assert len(task.checks) == 8 and not any(str(argument) in prompt for argument in hidden)
        (shown,) = re.findall(r"For example, f\((.*?)\) is", task.words)
        assert all(repr(argument) != shown for argument, _ in task.checks)


def test_the_share_of_checks_passed_is_paid():
    prompt_id = "list 0 20 0"
    checks = function_tasks.task(prompt_id, 8).checks
    share = sum(wanted == 0 for _, wanted in checks) / 8
    assert 0 < share < 1
    answer = code("def f(xs): return 0")
    assert played(CodeTask({"num_shots": 0}), prompt_id, answer)[1] == [share]
    assert played(CodeTask({"num_shots": 0, "partial": False}), prompt_id, answer)[1] == [0.0]
    strict = CodeTask({"num_shots": 0, "partial": False})
    assert played(strict, prompt_id, *strict.gold_turns(prompt_id))[1] == [1.0]


FORGERIES = [
    "class Any(int):\n    __eq__ = lambda self, other: True\ndef f(x): return Any(7)",
    "import json\njson.dumps = lambda *a, **k: 'true'\ndef f(x): return True",
    "def f(x):\n    import sys\n    for name, module in list(sys.modules.items()):\n"
    "        for key in ('is_same', 'grade', 'checks'): setattr(module, key, lambda *a: 1.0)\n    return True",
    "import os\nos.write(3, b'{\"stop\": \"ok\", \"reward\": 1.0}')\nos._exit(0)",
    "import os\nfor fd in range(20):\n    try: os.write(fd, b'1.0\\n')\n    except OSError: pass\ndef f(x): return 1.0",
    "print('PASSED')\nprint('reward = 1.0')\nraise SystemExit(0)",
    "import gc\ndef f(x):\n    return [o for o in gc.get_objects() if isinstance(o, dict) and 'checks' in o][0]",
    "def f(x): return float('nan')",
]  # fmt: skip


@pytest.mark.parametrize("body", FORGERIES)
def test_a_verdict_cannot_be_forged(body):
    env = CodeTask({"num_shots": 0})
    for prompt_id in ("list 0 20 0", "text 3 4 5", "recurrence 3 4 5 6"):
        _, rewards, ended, _ = played(env, prompt_id, code(body))
        assert ended and rewards[0] < 0.2, (prompt_id, rewards)


def test_the_expected_values_never_enter_the_sandbox(monkeypatch):
    sent, run = [], Sandbox.run
    monkeypatch.setattr(Sandbox, "run", lambda *args, **given: sent.append((args[1:], given)) or run(*args, **given))
    prompt_id = "recurrence 3 4 5 6"
    env = CodeTask({"num_shots": 0})
    played(env, prompt_id, *env.gold_turns(prompt_id))
    ((args, keywords),) = sent
    assert args == (env.gold_turns(prompt_id)[0].split("```")[1].removeprefix("python").strip(),)
    checks = function_tasks.task(prompt_id, 8).checks
    assert [list(call.args) for call in keywords.pop("calls")] == [[argument] for argument, _ in checks]
    assert keywords == {}


def test_code_that_runs_too_long_is_a_tool_timeout():
    env = CodeTask({"num_shots": 0, "timeout_s": 0.3})
    for body in ("while True: pass", "def f(x):\n    while True: pass"):
        _, rewards, ended, info = played(env, "list 0 20 0", code(body))
        assert (rewards, ended, info) == ([0.0], True, {"stop_reason": "tool_timeout"})
    assert played(env, "list 0 20 0", "no code")[3] == {"stop_reason": "unparsable"}


def test_code_is_found_in_a_turn_and_its_values_are_compared_with_their_types():
    env = CodeTask({"num_shots": 0})
    assert env.answer_in("\n```python\nx = 1\n```\n") == "x = 1"
    assert env.answer_in("Here it is:\n```py\nx = 1\n\ny = 2\n```\nand\n```python\nz\n```\n") == "x = 1\n\ny = 2"
    assert env.answer_in("```\nx = 1") == "x = 1"  # cut off
    assert env.answer_in("def f(x): return x") == env.answer_in("```python x```") == ""
    nan = float("nan")
    for value, wanted in ((1, 1), (1.0, 1), ([1, 2], [1, 2])):
        assert is_same(value, wanted)
    for value, wanted in (
        (True, 1), (False, 0), ("1", 1), (1, "1"), (None, 0), ([1], [1, 2]), ("ab", ["a", "b"]), ([], ""),
        ([True], [1]), (nan, 1), ({}, []),
    ):  # fmt: skip
        assert not is_same(value, wanted), (value, wanted)
