"""The environment `agent`: real programs against the real server; the test plays the part of the policy."""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from rllib_srl.envs.agents import programs
from rllib_srl.envs.agents.agent import Agent
from rllib_srl.envs.agents.environment import AgentError
from rllib_srl.envs.agents.programs import MAX_TASK_BYTES, bypass_proxy
from rllib_srl.envs.agents.tasks import Tasks
from tests.machine import still_alive
from tests.waiting import wait_until

openai = pytest.importorskip("openai")  # vLLM brings it, or the extra `agents`

ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [1, "ä"]}}\n</tool_call>'
LOG: list[Any] = []
USER = {"role": "user", "content": "hi"}
SENT: dict[str, Any] = {}  # what `sending` sends
GOT: list[Any] = []


def ask(client: Any, *contents: str, **how: Any) -> Any:
    messages = [{"role": "user", "content": content} for content in contents]
    return client.chat.completions.create(model="m", messages=messages, **how)


def plain(client: Any, task: dict[str, Any]) -> float:
    return float(ask(client, f"seed {task['seed']}").choices[0].message.content == "yes")


def crashing(client: Any, task: dict[str, Any]) -> float:
    ask(client, "hi")
    raise KeyError("no luck")


def looping(client: Any, task: dict[str, Any]) -> float:
    ask(client, "hi")
    while True:
        LOG.append(0)
        time.sleep(0.001)


async def sleeping(client: Any, task: dict[str, Any]) -> float:
    await ask(client, "hi")
    try:
        LOG.append("asleep")
        await asyncio.sleep(60)
    finally:
        LOG.append("cancelled")
    return 1.0


def two(client: Any, task: dict[str, Any]) -> Any:
    ask(client, "hi")
    return [2, float("nan"), None, "1", True, -0.1][task["seed"] // 2]


def calling(client: Any, task: dict[str, Any]) -> float:
    messages: list[Any] = [{"role": "user", "content": "2 + 3?"}]
    first = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.content == "I add."
    (call,) = message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2, "b": [1, "ä"]}
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    last = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0]
    assert last.finish_reason == "stop" and last.message.tool_calls is None
    return float(last.message.content == "5")


def streaming(client: Any, task: dict[str, Any]) -> float:
    how = {"tools": TOOLS, "stop": ["END"]}
    whole = ask(client, "hi", **how)
    chunks = list(ask(client, "hi", stream=True, stream_options={"include_usage": True}, **how))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    message = whole.choices[0].message
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "") and deltas[0].role == "assistant"
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    told = [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
    assert [(one.function.name, one.function.arguments) for one in calls] == told
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage) and whole.usage.total_tokens == 12
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    LOG.append((len(chunks), message.content))
    return 1.0


def sending(client: Any, task: dict[str, Any]) -> float:
    """Send what the test says; keep the tokens that come back."""
    extra = {"return_token_ids": True, **SENT.pop("extra_body", {})}
    reply = client.chat.completions.create(**{"model": "m", "messages": [USER], **SENT, "extra_body": extra})
    parts = list(reply) if SENT.get("stream") else [reply]
    ids = [one for part in parts for choice in part.choices for one in choice.token_ids]
    GOT.append((parts[0].prompt_token_ids, ids))
    return 1.0


def bringing_its_own(client: Any, task: dict[str, Any]) -> float:
    own = openai.OpenAI(base_url=str(client.base_url), api_key=client.api_key, max_retries=0, timeout=60)
    return float(own.chat.completions.create(model="m", messages=[USER]).choices[0].message.content == "yes")


@pytest.fixture
def agent() -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(function: Callable[..., Any] | None = None, **settings: Any) -> Agent:
        named = {"agent": f"{__name__}:{function.__name__}"} if function else {}
        made.append(Agent({**named, **settings}))
        return made[-1]

    for one in (LOG, SENT, GOT):
        one.clear()
    yield make
    for env in made:
        env.close()


def reset(env: Agent, prompt_id: str = "4") -> dict[str, Any]:
    return json.loads(env.reset(options={"prompt_id": prompt_id})[1]["conversation"])


def step_to_its_end(env: Agent, turn: str) -> None:
    with suppress(AgentError):
        env.step(turn)


def test_an_agent_gets_a_turn_and_gives_a_reward(agent):
    env = agent(plain)
    for turn, reward in (("yes", 1.0), ("no", 0.0)):
        observation, info = env.reset(options={"prompt_id": "8"})
        assert observation == "seed 8" and json.loads(info["conversation"]) == {
            "messages": [{"role": "user", "content": "seed 8"}], "tools": "", "max_tokens": None, "stop": [],
            "refuses_rewriting": False,
        }  # fmt: skip
        answered = {"answered": json.dumps({"role": "assistant", "content": turn})}
        assert env.step(turn) == ("", reward, True, False, answered)


@pytest.mark.parametrize(("function", "prompt_id", "message"), [
    (crashing, "0", "KeyError: 'no luck'"),
    (two, "0", "returned 2, a int; expected its reward, a number from 0 to 1"),
    (two, "2", "returned nan, a float"),
    (two, "6", "returned '1', a str"),
    (two, "10", "returned -0.1, a float"),
])  # fmt: skip
def test_a_failure_after_a_call_says_what_it_was(agent, function, prompt_id, message):
    env = agent(function)
    reset(env, prompt_id)
    with pytest.raises(AgentError, match=message):
        env.step("x")
    reset(env, "8")  # and the next episode starts


def test_abandoning_wakes_the_waiting_thread_and_ends_the_agent(agent):
    for function in (looping, sleeping):
        env = agent(function)
        reset(env)
        LOG.clear()
        thread = threading.Thread(target=step_to_its_end, args=(env, "x"))
        thread.start()
        assert wait_until(lambda: LOG != [])  # the agent loops or sleeps
        program = env._program
        env.abandon()
        thread.join(60)
        assert not thread.is_alive()
        program._thread.join(60)
        assert not program._thread.is_alive()
    assert LOG[-1] == "cancelled"


def test_tools_go_there_and_back(agent):
    env = agent(calling)
    first = reset(env)
    assert json.loads(first["tools"])[0]["function"]["name"] == "add"
    info = env.answer_call(f"I add. {CALL}", "stop", 5, 7)[4]
    second = json.loads(info["conversation"])["messages"]
    assert second[:2] == [*first["messages"], json.loads(info["answered"])]  # equal, so the conversation is continued
    assert second[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": [1, "ä"]}}
    assert second[2] == {"role": "tool", "content": "5", "tool_call_id": "call_1_0"}
    assert env.answer_call("5", "stop", 5, 7)[1] == 1.0


@pytest.mark.parametrize(("turn", "content", "num_chunks"), [
    ("Hello  big\n world ENDx", "Hello  big\n world ", 7),
    ("", "", 3),
    (f"so {CALL}{CALL}", "so", 6),
    ("add(", "add(", 4),
])  # fmt: skip
def test_a_stream_is_what_is_not_streamed(agent, turn, content, num_chunks):
    env = agent(streaming)
    assert reset(env)["stop"] == ["END"]
    env.answer_call(turn, "stop", 5, 7)
    assert env.answer_call(turn, "stop", 5, 7)[1] == 1.0
    (logged,) = LOG
    assert logged == (num_chunks, content)


SCRIPT = """
import json, os, sys, urllib.request
task = json.loads(os.environ["SRL_TASK"])
if task["seed"] == 2: sys.exit("bad luck")
body = {"model": "m", "messages": [{"role": "user", "content": "seed"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
if task["seed"] == 4:
    import subprocess, time
    child = subprocess.Popen(["sleep", "60"])
    print(os.getpid(), child.pid, file=open(answer, "w"), flush=True)
    time.sleep(60)
print("x" * 300000)
print("a note")
print("nothing" if task["seed"] == 6 else json.dumps({"reward": len(answer) / 10}) if answer else 0.25)
"""


def test_a_command_is_an_agent(agent, tmp_path: Path):
    (tmp_path / "program.py").write_text(SCRIPT)
    env = agent(agent_command=[sys.executable, str(tmp_path / "program.py")])
    for turn, reward in (("four", 0.4), ("", 0.25)):
        reset(env, "8")
        assert env.step(turn)[1:3] == (reward, True)
    with pytest.raises(AgentError, match="exit status 1: bad luck"):
        env.reset(options={"prompt_id": "2"})
    reset(env, "6")
    with pytest.raises(AgentError, match="last line is 'nothing'; expected its reward"):
        env.step("x")
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        agent(agent_command=["no-such-program"]).reset(options={"prompt_id": "8"})


def test_a_stopped_command_leaves_no_process(agent, tmp_path: Path):
    (tmp_path / "program.py").write_text(SCRIPT)
    env = agent(agent_command=[sys.executable, str(tmp_path / "program.py")])
    reset(env, "4")
    thread, pids = threading.Thread(target=step_to_its_end, args=(env, str(tmp_path / "pids"))), tmp_path / "pids"
    thread.start()
    assert wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    env.abandon()
    thread.join(60)
    processes = [int(one) for one in pids.read_text().split()]
    assert len(processes) == 2 and wait_until(lambda: still_alive(processes) == [])


@pytest.mark.parametrize("stream", [False, True])
def test_the_template_gets_its_arguments_and_the_client_its_tokens(agent, stream: bool) -> None:
    thought = {"role": "assistant", "content": "a", "reasoning": "I see."}
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    SENT.update(stream=stream, messages=[USER, thought, USER], reasoning_effort="low", extra_body=extra)
    env = agent(sending)
    asked = reset(env)
    assert json.loads(asked["template"]) == {"enable_thinking": False, "reasoning_effort": "low"}
    assert asked["messages"][1] == {"role": "assistant", "content": "a", "reasoning_content": "I see."}
    assert env.answer_call("yes", "stop", 2, 3, [7, 8], [1, 2, 3])[1:3] == (1.0, True)
    assert GOT == [([7, 8], [1, 2, 3])]


def test_an_agents_own_client_reaches_the_endpoint_behind_a_proxy(agent, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens
    env = agent(bringing_its_own)
    env.reset(options={"prompt_id": "4"})
    assert env.step("yes")[1:3] == (1.0, True)


@pytest.mark.parametrize(("upper", "lower", "wanted"), [
    (None, None, "127.0.0.1,localhost"),
    ("corp.example, 10.0.0.1", None, "corp.example,10.0.0.1,127.0.0.1,localhost"),
    (None, "corp.example", "corp.example,127.0.0.1,localhost"),
    ("a.example", "b.example,127.0.0.1", "a.example,b.example,127.0.0.1,localhost"),
    ("*", "", "*"),
])  # fmt: skip
def test_hosts_without_a_proxy_stay_so(monkeypatch, upper, lower, wanted):
    environment = {name: one for name, one in (("NO_PROXY", upper), ("no_proxy", lower)) if one is not None}
    monkeypatch.setattr(programs.os, "environ", environment)
    for _ in range(2):
        bypass_proxy()
        assert environment == {"NO_PROXY": wanted, "no_proxy": wanted}


PROGRAM = """
import json, os, openai
task = json.load(open(os.environ["SRL_TASK_FILE"], encoding="utf-8"))
assert ("SRL_TASK" in os.environ) == (len(task["text"]) < 1000), sorted(os.environ)
assert json.loads(os.environ.get("SRL_TASK", json.dumps(task))) == task
answer = openai.OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": task["text"][:9]}])
print(open(answer.choices[0].message.content, "w").write(os.environ["SRL_TASK_FILE"]) > 0 and len(task["text"]) / 1e6)
"""


@pytest.mark.parametrize("text", ["short ä", "half of a pair: \ud83d" + "ä" * 200_000])
def test_a_task_of_any_size_reaches_a_command(agent, tmp_path: Path, text: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "other"}) + "\n")
    env = agent(agent_command=[sys.executable, str(tmp_path / "program.py")], path=str(tmp_path / "tasks.jsonl"))
    every = [one for split in ("train", "heldout") for one in env.prompt_ids(split, 0)]
    prompt_id = next(one for one in every if env.tasks().task(one)["text"] == text)
    observation, _ = env.reset(options={"prompt_id": prompt_id})
    assert observation == text[:9]
    assert env.step(str(tmp_path / "name"))[1] == len(text) / 1e6
    assert not os.path.exists((tmp_path / "name").read_text())  # the file of the task is gone with its program
    assert (len(json.dumps({"text": text}, ensure_ascii=False)) > MAX_TASK_BYTES) == (len(text) > 1000)


def test_a_program_does_not_inherit_the_path_of_this_package(monkeypatch):
    """It may run another Python, for which the packages here are not made."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).resolve().parents[2]), "/of/the/user"]))
    ended: Queue = Queue()
    program = "import os; print(float(os.environ['PYTHONPATH'] == '/of/the/user'))"
    programs.CommandProgram([sys.executable, "-c", program], "http://127.0.0.1:1", "token", {}, ended.put).start()
    assert float(ended.get(timeout=60).value) == 1.0


def test_tasks_are_rows_in_two_splits(tmp_path: Path, agent):
    rows = [{"n": n, "text": "ä"} for n in range(200)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    tasks = Tasks(str(tmp_path / "tasks.jsonl"))
    train, heldout = ([*tasks.prompt_ids(split, 1)] for split in ("train", "heldout"))
    assert len({*train, *heldout}) == len(train) + len(heldout) == 200 and 15 <= len(heldout) <= 45
    assert sorted(tasks.task(one)["n"] for one in train + heldout) == list(range(200))
    assert train != [*tasks.prompt_ids("train", 2)] and {*train} == {*tasks.prompt_ids("train", 2)}
    (tmp_path / "held.jsonl").write_text(json.dumps(rows[3]) + "\n")
    both = Tasks(str(tmp_path / "tasks.jsonl"), str(tmp_path / "held.jsonl"))
    assert [both.task(one)["n"] for one in both.prompt_ids("heldout", 1)] == [3]
    assert 3 not in [both.task(one)["n"] for one in both.prompt_ids("train", 1)]
    with pytest.raises(ValueError, match="expected one of the 200 tasks"):
        tasks.task("x")
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    with pytest.raises(ValueError, match="row 1 is"):
        Tasks(str(tmp_path / "bad.jsonl"))
    numbered = agent(plain)
    first = [next(numbered.prompt_ids("train", 1)), next(numbered.prompt_ids("heldout", 1))]
    assert [int(one) % 2 for one in first] == [0, 1]
    with pytest.raises(ValueError, match="history has 1 turns; expected none"):
        numbered.reset(options={"prompt_id": "2", "history": ["x"]})
