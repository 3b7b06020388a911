"""Reward functions of a user's own: forms, weights, values that are none, servers, and the environment."""

import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rllib_srl.common.loading import load_function
from rllib_srl.envs import posting
from rllib_srl.envs.math.question_file import QuestionFile
from rllib_srl.envs.rewards.scoring import RewardError, Rewards
from rllib_srl.envs.rewards.settings import RewardSettings, read_rewards
from rllib_srl.rollout.replies import reset, step
from rllib_srl.types import Prompt
from tests.envs.http_server import http_server
from tests.waiting import at_once

FUNCTIONS = """
import asyncio, time
import helper

def right(prompt, answer, row):
    return float(answer.strip() == row["gold"])

def short(prompt, answer, row):
    return 1 - min(len(answer), 10) / 10

async def later(prompt, answer, row):
    await asyncio.sleep(0.01)
    return helper.HALF

def spoils(prompt, answer, row):
    row["gold"] = "spoilt"
    return True

def raises(prompt, answer, row): return 1 / 0
def hangs(prompt, answer, row):
    while True: pass
async def sleeps(prompt, answer, row): await asyncio.sleep(60)
def nothing(prompt, answer, row): pass
def text(prompt, answer, row): return "0.5"
def nan(prompt, answer, row): return float("nan")
def two(prompt, answer, row): return 2
def above(prompt, answer, row): return 1.000002
def rounded(prompt, answer, row): return float(answer)
def listed(prompt, answer, row): return [1.0]

def trl(completions, prompts, **kwargs): return [1.0]
def trl_chat(completions, **kwargs): return [float(c == [{"role": "assistant", "content": "4"}]) for c in completions]
def trl_long(completions, **kwargs): return [1.0, 0.0]
def trl_number(completions, **kwargs): return 1.0
def trl_ids(completions, completion_ids): return [1.0]
def trl_abstains(completions, **kwargs): return [None]
def trl_knows(completions, gold): return [float(completions == gold)]
def trl_length(prompts, completions, completion_ids, **kwargs): return [len(completion_ids[0]) / 10]
def trl_step(completions, trainer_state): return [trainer_state.global_step / 10]
def trl_needs(completions, golden, level, **kwargs): return [1.0]
def other_names(question, response): return 1.0
def positional(prompt, answer, row, /): return 1.0
def any_names(*args, **kwargs): return 1.0
class Judge:
    def __call__(self, prompt, answer, row): return 1.0
judge = Judge()
def verl(data_source, solution_str, ground_truth, extra_info=None):
    is_right = solution_str == ground_truth and data_source == "sums" and extra_info["index"] == 7
    return {"score": float(is_right), "acc": 1}
def verl_wrong(data_source, solution_str, ground_truth, extra_info=None): return {"accuracy": 1.0}
def batch(prompts, answers, rows): return [float(a == r["gold"]) for a, r in zip(answers, rows)]
def batch_exits(prompts, answers, rows): raise SystemExit(3)
number = 3
"""
ROW = {"question": "2 + 2?", "gold": "4"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("HALF = 0.5\n")
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def score(file: Path, given, answer: str = "4", row=ROW, messages=(), **settings):
    entries = given if isinstance(given, list) else [given]
    named = [{"function": one} if isinstance(one, str) else one for one in entries]
    specs = [{**one, "function": f"{file}:{one['function']}"} for one in named]
    return Rewards.load(specs, **{"timeout_s": 20.0, **settings}).score("2 + 2?", answer, row, messages)


def test_the_reward_is_the_weighted_mean_of_functions_that_get_a_copy_of_the_row(file: Path) -> None:
    given = [{"function": "right", "weight": 3.0}, {"function": "short", "weight": 1.0}, "later"]
    scored = score(file, given, answer="41")
    assert scored.parts == {"right": 0.0, "short": 0.8, "later": 0.5}
    assert scored.total == pytest.approx((3 * 0 + 1 * 0.8 + 1 * 0.5) / 5)
    assert score(file, ["spoils", "right"]).total == 1.0
    assert ROW["gold"] == "4"


def test_a_value_that_rounding_moves_out_of_its_range_is_at_the_end_of_it(file: Path) -> None:
    wide = {"function": "rounded", "low": -100.0, "high": 100.0}
    for given, answer, value, total in (
        ("rounded", "1.0000001192092896", 1.0, 1.0), ("rounded", "-2.7755575615628914e-17", 0.0, 0.0),
        (wide, "100.00001", 100.0, 1.0), (wide, "-100.00001", -100.0, 0.0),
    ):  # fmt: skip
        scored = score(file, given, answer)
        assert (scored.parts, scored.total) == ({"rounded": value}, total)


def test_all_functions_share_one_timeout(monkeypatch) -> None:
    passed_s = 0.0

    def a(**about) -> float:
        nonlocal passed_s
        passed_s = 59.7
        return 1.0

    def b(**about) -> float:
        time.sleep(60)
        return 1.0

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    for module in ("posting", "rewards.scoring"):
        monkeypatch.setattr(f"rllib_srl.envs.{module}.time", clock)
    start = time.monotonic()
    with pytest.raises(RewardError, match="reward 'b' gave no reward within reward_timeout_s = 60"):
        Rewards([(RewardSettings(f.__name__), f) for f in (a, b)], timeout_s=60.0).score("2 + 2?", "4", ROW)
    assert time.monotonic() - start < 50.0


@pytest.mark.parametrize(("function", "form", "reason"), [
    ("raises", "row", "raised ZeroDivisionError: division by zero"),
    ("hangs", "row", "gave no reward within reward_timeout_s = 0.5"),
    ("nothing", "row", "returned None; expected a number: does every path of it end in a return?"),
    ("text", "row", "returned '0.5', a str; expected a number"),
    ("nan", "row", "returned nan; expected a finite number"),
    ("two", "row", "returned 2; expected 0 to 1: set low and high to the range of its values"),
    ("above", "row", "returned 1.000002; expected 0 to 1: set low and high"),
    ("listed", "row", "returned [1.0], a list; expected a number"),
    ("trl_long", "trl", "returned a list of 2; expected one number for each of 1 completion"),
    ("trl_number", "trl", "returned 1.0, a float; expected a list of 1 number"),
    ("trl_ids", "trl", "needs completion_ids, which only the answers of an engine have; give"),
    ("verl_wrong", "verl", "returned a dict with accuracy; expected 'score' in it"),
    ("batch_exits", "batch", "raised SystemExit: 3"),
])  # fmt: skip
def test_an_invalid_reward_names_function_row_and_answer(file: Path, function: str, form: str, reason: str) -> None:
    timeout_s = 0.5 if "reward_timeout_s" in reason else 20.0
    with pytest.raises(RewardError) as caught:
        score(file, {"function": function, "form": form}, answer="x" * 10_000_000, timeout_s=timeout_s)
    message = str(caught.value)
    assert f"{function}' {reason}" in message
    assert 'row {"question": "2 + 2?", "gold": "4"}, answer \'xxx' in message
    assert "\n" not in message and len(message) < 600 + len(str(file))
    assert caught.value.ends_run


def test_episodes_without_a_reward_may_be_dropped_until_too_many_calls_hang(file: Path) -> None:
    rewards = Rewards.load(f"{file}:raises", timeout_s=20.0, on_error="drop")
    with pytest.raises(RewardError) as caught:
        rewards.score("2 + 2?", "4", ROW)
    assert not caught.value.ends_run
    rewards = Rewards.load(f"{file}:sleeps", timeout_s=0.001, on_error="drop")
    ended = []
    for _ in range(34):
        with pytest.raises(RewardError) as caught:
            rewards.score("2 + 2?", "4", ROW)
        ended.append(caught.value.ends_run)
    assert ended == [False] * 32 + [True] * 2


@pytest.mark.parametrize(("given", "error"), [
    ([], "expected at least one function"),
    ([3], "3 is a int; expected 'module:f', 'file.py:f', a URL, or a mapping"),
    ([{"weight": 1.0}], "has no 'function'"),
    ([{"function": "m:f", "weigth": 1.0}], "weigth is not a field; expected some of function, name, weight"),
    ([{"function": "m:f", "weight": 0}], "weight = 0; expected a number above 0"),
    ([{"function": "m:f", "low": 1.0}], "low = 1.0, high = 1.0; expected low < high"),
    ([{"function": "m:f", "form": "many"}], "form = 'many'; expected one of row, trl, verl, batch"),
    ([{"function": "http://localhost/f", "form": "trl"}], "expected 'row' for a URL"),
    (["f"], "function = 'f'; expected 'module:f', 'path/to/file.py:f' or a URL"),
    (["a:f", "b:f"], "two functions have the name 'f'; set 'name' of one of them"),
])  # fmt: skip
def test_wrong_settings_are_named(given, error: str) -> None:
    assert any(error in line for line in read_rewards(given)[1])


@pytest.mark.parametrize(("spec", "error"), [
    ("{dir}/gone.py:f", "gone.py is not a file"),
    ("{dir}/functions.py:gone", "functions.py has no 'gone'; it has right, short, later"),
    ("{dir}/functions.py:number", "is a int; expected a function"),
    ("{dir}/broken.py:f", "cannot be imported (SyntaxError"),
])  # fmt: skip
def test_a_function_that_cannot_be_loaded_is_named(file: Path, spec: str, error: str) -> None:
    (file.parent / "broken.py").write_text("def f(:\n")
    with pytest.raises(ValueError) as caught:
        load_function(spec.format(dir=file.parent))
    assert error in str(caught.value) and "\n" not in str(caught.value)


class Server:
    """Answers with what it has in `replies`, the last one again and again, and notes how many ask at once."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, Any]] = [(200, {"reward": 0.5})]
        self.num_under_way = self.most = 0
        self.lock = threading.Lock()

    def answer(self, body: Any) -> tuple[int, bytes]:
        with self.lock:
            self.num_under_way += 1
            self.most = max(self.most, self.num_under_way)
            status, reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        time.sleep(60 if reply == "late" else 0.02)
        with self.lock:
            self.num_under_way -= 1
        return status, reply if isinstance(reply, bytes) else json.dumps(reply).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with http_server(made.answer) as (made.url, made.asked):
        yield made


def remote(server: Server, **settings) -> Rewards:
    return Rewards.load(f"{server.url}/score", **{"timeout_s": 20.0, **settings})


def test_a_server_gives_the_reward_also_after_failures_that_may_pass(server) -> None:
    assert remote(server).score("2 + 2?", "4", ROW).parts == {"score": 0.5}
    assert [body for *_, body in server.asked] == [{"prompt": "2 + 2?", "answer": "4", "row": ROW}]
    server.replies = [(503, {}), (429, {}), (200, 0.25)]
    assert remote(server).score("2 + 2?", "4", ROW).total == 0.25 and len(server.asked) == 4


@pytest.mark.parametrize(("replies", "num_asked", "reason"), [
    ([(500, {"no": "GPU"})], 3, 'the endpoint answered 500 Internal Server Error: b\'{"no": "GPU"}\''),
    ([(404, {})], 1, "the endpoint answered 404 Not Found"),
    ([(200, b"reward: 1")], 1, "holds no reward; expected"),
    ([(200, {"reward": None})], 1, "returned None; expected a number"),
    ([(200, b" " * (posting.MOST_BYTES + 2))], 1, "wrote more than"),
    ([(200, "late")], 1, "gave no reward within reward_timeout_s = 3"),
])  # fmt: skip
def test_a_server_without_a_reward_is_named(server, replies, num_asked: int, reason: str) -> None:
    server.replies = replies
    start = time.monotonic()
    with pytest.raises(RewardError) as caught:
        remote(server, timeout_s=3.0 if "reward_timeout_s" in reason else 60.0).score("2 + 2?", "4", ROW)
    assert reason in str(caught.value) and len(server.asked) == num_asked
    assert time.monotonic() - start < 50.0


def test_an_unreachable_server_is_named_and_one_that_is_not_allowed_is_refused(monkeypatch) -> None:
    with pytest.raises(RewardError, match=r"ConnectionRefusedError.*asked 2 times"):
        Rewards.load("http://127.0.0.1:9/score", timeout_s=20.0, retries=1).score("2 + 2?", "4", ROW)
    monkeypatch.delenv("RLLIB_SRL_JUDGES", raising=False)
    with pytest.raises(ValueError, match="reward = 'https://example.com/f' is not among the endpoints that you allow"):
        Rewards.load("https://example.com/f", timeout_s=1.0)


def test_at_most_so_many_requests_are_open(server) -> None:
    rewards = remote(server, concurrency=2, timeout_s=60.0)
    at_once([partial(rewards.score, "2 + 2?", "4", ROW)] * 8)
    assert len(server.asked) == 8 and 1 <= server.most <= 2


def environment(file: Path, rows, **settings) -> QuestionFile:
    data = file.parent / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    return QuestionFile({"path": str(data), "num_shots": 0, "reward": f"{file}:right", **settings})


def test_the_environment_asks_the_functions_and_reports_each(file: Path) -> None:
    rows = [{"question": f"{n} + {n}?", "gold": str(2 * n), "tag": n} for n in range(20)]
    given = [{"function": f"{file}:right", "weight": 3.0}, f"{file}:short"]
    env = environment(file, rows, reward=given)
    prompt_id = next(env.prompt_ids("train", 0))
    prompt, _ = env.reset(options={"prompt_id": prompt_id})
    answer = str(2 * int(prompt.split()[1]))
    _, reward, terminated, _, info = env.step(f" {answer}\n")
    short = 1 - len(answer) / 10
    assert terminated and reward == pytest.approx((3 + short) / 4)
    assert info == {"reward/right": 1.0, "reward/short": pytest.approx(short)}
    assert env.gold_turns(prompt_id) == []  # `gold` is a column for the function, not a known name of an answer


def test_rows_that_ask_the_same_and_differ_are_two_prompts_of_one_split(file: Path) -> None:
    rows = [{"question": "2 + 2?", "gold": gold} for gold in ("4", "four", "4")]
    env = environment(file, rows)
    assert env.num_questions == 2 and env.num_repeated == 1
    (split,) = {env.split_of(prompt_id) for prompt_id in env._ids}
    earned = []
    for prompt_id in env.prompt_ids(split, 0):
        env.reset(options={"prompt_id": prompt_id})
        earned.append(env.step(" four\n")[1])
    assert sorted(earned) == [0.0, 1.0]
    (file.parent / "test.jsonl").write_text(json.dumps({"question": "1 + 1?", "gold": "2"}))
    rows = [{"question": "1 + 1?", "gold": gold} for gold in ("two", "II")] + [{"question": "2 + 2?", "gold": "4"}]
    env = environment(file, rows, heldout_path=str(file.parent / "test.jsonl"))
    assert [env.question(each).text for each in env.prompt_ids("train", 0)] == ["2 + 2?"]
    assert [env.question(each).text for each in env.prompt_ids("heldout", 0)] == ["1 + 1?"] * 2


def test_a_pass_mark_of_ones_own_reaches_the_runner(file: Path) -> None:
    """Of functions that take any arguments, and of objects that are called."""
    for function, mark in (("any_names", {}), ("judge", {"pass_reward": 0.5})):
        env = environment(file, [ROW], reward=f"{file}:{function}", **mark)
        assert reset(env, Prompt("question_file", env._ids[0])).pass_reward == mark.get("pass_reward")


@pytest.mark.parametrize(("settings", "error"), [
    ({"answer_format": "boxed"}, "answer_format = 'boxed'; expected 'any' with reward, whose functions grade"),
    ({"reward": "", "pass_reward": 0.5}, "pass_reward = 0.5; expected 0.0 without reward"),
    ({"reward": len}, "is a function object; set it by .reward(f), or name it as 'module:f'"),
    ({"reward": 3}, "reward: 3 is a int; expected 'module:f', 'file.py:f', a URL, or a mapping"),
    ({"reward": "", "reward_timeout_s": 3.0}, "reward_timeout_s = 3.0; expected 8.0 without reward"),
    ({"num_shots": 1}, "num_shots = 1; expected 0: rows without an answer show none"),
    ({"answer_field": "golden"}, "field 'golden' is missing; the row has question, gold; set answer_field"),
])  # fmt: skip
def test_wrong_settings_of_the_environment_are_named(file: Path, settings, error: str) -> None:
    with pytest.raises(ValueError) as caught:
        environment(file, [ROW, {**ROW, "question": "3 + 1?"}], **settings)
    assert error in str(caught.value)


def test_a_function_that_abstains_gives_its_weight_to_the_others(file: Path) -> None:
    one = {"function": "trl_abstains", "form": "trl", "weight": 8.0}
    scored = score(file, [one, {"function": "right", "weight": 1.0}, {"function": "short", "weight": 3.0}], answer="4")
    assert scored.parts == {"right": 1.0, "short": 0.9}  # none of the one that abstains
    assert scored.total == pytest.approx((1 * 1.0 + 3 * 0.9) / 4)
    for given, said in (
        (one, "trl_abstains' returned None; expected a number; row"),
        ([one, {**one, "name": "again"}], "returned None, and so did every other function; expected a number;"),
        ("nothing", "nothing' returned None; expected a number: does every path"),  # only functions of TRL abstain
    ):
        with pytest.raises(RewardError, match=said):
            score(file, given)


def test_functions_of_trl_get_tokens_state_and_columns_as_they_name_them(file: Path) -> None:
    for function, expected in (("trl_length", 0.3), ("trl_step", 0.7), ("trl_knows", 1.0)):
        rewards = Rewards.load({"function": f"{file}:{function}", "form": "trl"}, timeout_s=20.0)
        rewards.check_columns({"question", "gold"})
        assert rewards.score("2 + 2?", "4", ROW, turn=([5, 6, 7], 7)).total == pytest.approx(expected)
    reward = [{"function": f"{file}:{name}", "form": "trl"} for name in ("trl_length", "trl_step")]
    env = environment(file, [ROW], reward=reward)
    reset(env, Prompt("question_file", env._ids[0]))
    reply = step(env, "4\n", token_ids=(9, 9, 9, 9), version=2)
    assert reply.info["reward/trl_length"] == 0.4 and reply.info["reward/trl_step"] == 0.2
    reset(env, Prompt("question_file", env._ids[0]))
    with pytest.raises(RewardError, match="trl_length' needs completion_ids, which only the answers of an engine have"):
        env.step("4\n")  # the tokens of another turn are never taken


@pytest.mark.parametrize(("function", "form", "error"), [
    ("other_names", "row", "form = 'row' gives it prompt, answer, row, but missing a required argument: 'question'; it "
                           "takes (question, response); rename its parameters"),
    ("positional", "row", "form = 'row' gives it prompt, answer, row, but "),
    ("trl", "row", "set form = 'trl', or rename its parameters"),
    ("verl", "row", "set form = 'verl', or rename its parameters"),
    ("right", "batch", "form = 'batch' gives it prompts, answers, rows, but "),
    ("right", "verl", "form = 'verl' gives it data_source, solution_str, ground_truth, extra_info, but "),
    ("trl_needs", "trl", "needs the parameters golden, level, but the data has no such column; form = 'trl' gives "
                         "prompts, completions, completion_ids, trainer_state, gold, question: rename a column"),
])  # fmt: skip
def test_parameters_that_no_argument_has_are_named_when_the_environment_is_made(file: Path, function, form, error):
    with pytest.raises(ValueError) as caught:
        environment(file, [ROW], reward={"function": f"{file}:{function}", "form": form})
    assert f"reward '{file}:{function}'" in str(caught.value) and error in str(caught.value)


def test_a_parquet_file_of_verl_and_a_conversation_of_trl_are_the_same_prompt(file: Path) -> None:
    said = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
    verl = {"data_source": "sums", "prompt": said, "ability": "math", "extra_info": {"index": 7, "split": "train"}}
    verl["reward_model"] = {"style": "rule", "ground_truth": "4"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([verl]), file.parent / "train.parquet")
    reward = [{"function": f"{file}:verl", "form": "verl"}]
    of_verl = QuestionFile({"path": str(file.parent / "train.parquet"), "num_shots": 0, "reward": reward})
    reward = [{"function": f"{file}:trl_chat", "form": "trl"}]
    of_trl = environment(file, [{"messages": [*said, {"role": "assistant", "content": "It is #### 4"}]}], reward=reward)
    assert of_verl._ids == of_trl._ids
    for env in (of_verl, of_trl):
        assert env.reset(options={"prompt_id": env._ids[0]})[0] == "2 + 2?"
        assert (env.system_prompt, env.question(env._ids[0]).answer) == ("Be short.", "4")
        assert env.step("4\n")[1] == 1.0
        env.reset(options={"prompt_id": env._ids[0]})
        assert env.step("5\n")[1] == 0.0


def test_a_function_of_verl_gets_the_right_answer_that_the_environment_reads(file: Path) -> None:
    about = {"question": "2 + 2?", "data_source": "sums", "extra_info": {"index": 7}}
    reward = {"function": f"{file}:verl", "form": "verl"}
    for given, answer, settings in (
        ({"ground_truth": "4"}, "4", {}),
        ({"Answer": 4}, "4", {}),
        ({"truth": "4", "answer": "5"}, "4", {"answer_field": "truth"}),
        ({"answer": "2 + 2 = 4\n#### 4"}, "4", {}),
        ({"solution": r"so \boxed{4}"}, "4", {}),
        ({"choices": ["3", "4"], "answer": 1}, "B", {}),
        ({"answer": "5", "reward_model": {"ground_truth": "4"}}, "4", {}),
        ({"answer": "4", "reward_model": {"style": "rule"}}, "4", {}),
    ):
        env = environment(file, [{**about, **given}], reward=reward, **settings)
        env.reset(options={"prompt_id": env._ids[0]})
        assert env.step(f"{answer}\n")[1] == 1.0, given
