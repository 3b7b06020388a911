"""Environments with tools: the turn loop by hand, its limits, votes, and tools shown by a chat template."""

import json
import time
from itertools import islice

import pytest

from rllib_srl.envs.question import Question
from rllib_srl.envs.tools import ToolCall, ToolQuestionEnv, ToolTimeoutError
from rllib_srl.envs.wrappers.self_iteration import SelfIteration
from rllib_srl.envs.wrappers.self_label import SelfLabel
from rllib_srl.rollout.replies import reset, step
from rllib_srl.rollout.transcript import ChatTranscript
from rllib_srl.types import Prompt
from tests.envs import table
from tests.rollout.fakes import CHATML, make_tokenizer


class Sums(ToolQuestionEnv):
    """Sums of two numbers, and tools that misbehave."""

    domain = "sums"
    num_questions = 2500

    def _num_ids(self):
        return 2500

    def _prompt_id(self, number):
        return f"{number // 50} {number % 50}"

    def question(self, prompt_id):
        a, b = map(int, prompt_id.split())
        return Question(f"{a} + {b}?", str(a + b), str(a + b + 1), canonical=prompt_id)

    def grade(self, prompt_id, answer):
        return float(answer == self.question(prompt_id).answer) if answer.isdigit() else None

    def tools(self, prompt_id):
        kept: list[int] = []

        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        def keep(number: int) -> list[int]:
            """Remember a number."""
            kept.append(number)
            return kept

        def hang(seconds: float) -> None:
            """Take long."""
            time.sleep(seconds)

        def fail(how: str) -> str:
            """Go wrong."""
            raise ToolTimeoutError if how == "late" else KeyError(how)

        return [add, keep, hang, fail]

    def gold_calls(self, prompt_id):
        a, b = map(int, prompt_id.split())
        return [ToolCall("add", (), {"a": a, "b": b})]


def playing(prompt_id="2 3", **env_config):
    env = Sums({"num_shots": 0, **env_config})
    env.reset(options={"prompt_id": prompt_id})
    return env


def test_an_episode_by_hand():
    env = Sums({"num_shots": 1})
    observation, _ = env.reset(options={"prompt_id": "2 3"})
    tools, shot, asked = observation.split("\n\n")
    assert tools.startswith("Tools:\nadd(a: int, b: int) - Add two numbers.\nkeep(number: int) - Remember a number.\n")
    a, b = shot.removeprefix("Question: ").partition("?")[0].split(" + ")
    total = int(a) + int(b)
    assert shot == f"Question: {a} + {b}?\nTool: add(a={a}, b={b})\nResult: {total}\nAnswer: {total}"
    assert asked == "Question: 2 + 3?\n"
    assert env.step("Tool: add(2, b=3)\n") == (
        "Result: 5\n", 0.0, False, False, {"num_calls": 1, "num_call_errors": 0},
    )  # fmt: skip
    assert env.step("Answer: 5\n") == ("", 1.0, True, False, {})


@pytest.mark.parametrize(("turn", "said"), [
    ("Tool: add(2)\n", "Result: Error: add: b is missing. Expected add(a: int, b: int)\n"),
    ("Tool: sub(2, 3)\n", "Result: Error: there is no tool 'sub'; expected one of add, keep, hang, fail\n"),
    ("Tool: fail('x')\n", "Result: Error: KeyError: 'x'\n"),
])  # fmt: skip
def test_a_call_that_does_not_fit_is_answered_and_the_episode_goes_on(turn, said):
    env = playing()
    assert env.step(turn) == (said, 0.0, False, False, {"num_calls": 1, "num_call_errors": 1})
    assert env.step("Answer: 5\n")[1:3] == (1.0, True)


@pytest.mark.parametrize("turn", ["Tool: hang(60.0)\n", "Tool: fail('late')\n"])
def test_a_late_call_ends_the_episode(turn):
    start = time.monotonic()
    env = playing(call_timeout_s=0.1)
    assert env.step(turn) == ("", 0.0, True, False, {"stop_reason": "tool_timeout"})
    assert time.monotonic() - start < 50
    env.reset(options={"prompt_id": "2 3"})
    assert env.step("Answer: 5\n")[1] == 1.0


def test_calls_and_turns_that_cannot_be_read_are_limited():
    env = playing(max_calls=2)
    env.step("Tool: keep(1); keep(2)\n")
    assert env.step("Tool: keep(3)\n") == ("", 0.0, False, True, {"stop_reason": "out_of_turns"})
    env.reset(options={"prompt_id": "2 3"})
    env.step("Tool: keep(1); keep(2)\n")
    assert env.step("Answer: 5\n")[1] == 1.0
    assert playing().step("hm\n") == ("", 0.0, True, False, {"stop_reason": "unparsable"})
    env = playing(forgiven_turns=1)
    assert env.step("Tool: add(2 + 3)\n")[0].startswith("Cannot be read: argument is a binop; expected a number")
    assert env.step("Tool: add(\n") == ("", 0.0, True, False, {"stop_reason": "unparsable"})


WITH_TOOLS = ("bfcl", "function_call", "retail", "retrieval", "word_problem_tool")
CASES = {name: case for name, case in table.cases().items() if name.split()[0] in WITH_TOOLS}


@pytest.mark.parametrize("name", CASES)
def test_episodes_vote_with_what_they_come_to(name):
    path, row = CASES[name]
    if absent := table.missing(row):
        pytest.skip(f"{', '.join(absent)} not installed")
    env, twin = (table.made(path, row, feedback_turns=0) for _ in range(2))
    prompt_id, another = islice(env.prompt_ids("train", 0), 2)
    turns = env.gold_turns(prompt_id)
    vote = env.vote(prompt_id, turns)
    assert vote is not None and vote == twin.vote(prompt_id, turns)
    assert env.vote(prompt_id, [""]) is None
    assert env.vote(prompt_id, env.gold_turns(another)) != vote or not vote


# As Qwen 2.5 writes tools and their results; a template of CHATML's kind otherwise.
QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\nTools:' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
PICKY = "{%- for m in messages %}{%- if m.role == 'tool' %}{{- raise_exception('no tools') }}{%- endif %}{%- endfor %}"
DEAF = QWEN.replace("+ m.content + '\n</tool", "+ '\n</tool")
REWRITING = QWEN.replace("{%- if tools %}", "{%- if tools and messages[-1].role != 'tool' %}")


def chat(template):
    return ChatTranscript(make_tokenizer(chat_template=template, with_bos=False))


def test_a_template_shows_tools_and_results():
    env = Sums({"num_shots": 0, "tools_in": "template", "call_format": "native"})
    reply = reset(env, Prompt("sums", "2 3"))
    assert reply.observation == "Question: 2 + 3?\n"
    schemas = json.loads(reply.tools)
    assert [schema["function"]["name"] for schema in schemas] == ["add", "keep", "hang", "fail"]
    transcript = chat(QWEN)
    stream = transcript.first(reply.observation, reply.tools)
    tokenizer = transcript._tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages = [{"role": "user", "content": "Question: 2 + 3?\n"}]
    for turn in env.gold_turns("2 3")[:1]:
        stream += tokenizer(turn, add_special_tokens=False)["input_ids"] + [end]
        answer = step(env, turn)
        assert (answer.observation, answer.role) == ("5", "tool")
        stream += transcript.later(answer.observation, stream[-1], answer.role)
        messages += [{"role": "assistant", "content": turn}, {"role": "tool", "content": "5"}]
    whole = tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(stream) == whole
    assert "<tool_response>\n5\n</tool_response>" in whole


@pytest.mark.parametrize(("template", "message"), [
    (CHATML, "omits the tools"),
    (QWEN + PICKY, "rejects the role 'tool'"),
    (DEAF, "omits messages of the role 'tool'"),
    (REWRITING, "changes earlier tokens when a tool answers"),
])  # fmt: skip
def test_a_template_that_cannot_show_tools_is_refused(template, message):
    transcript = chat(template)
    transcript.first("hello")  # fine without tools
    with pytest.raises(ValueError, match=message):
        transcript.first("hello", json.dumps([{"name": "f"}]))


@pytest.mark.parametrize("wrapper", [SelfIteration, SelfLabel])
def test_an_env_around_it_hands_its_tools_on(wrapper):
    inner = {"num_shots": 0, "tools_in": "template"}
    env = wrapper({"env": "tests.envs.test_env_tools:Sums", "env_config": inner})
    assert len(json.loads(reset(env, Prompt("sums", "2 3")).tools)) == 4
