"""The environment `agent`: real programs against the real server; the test plays the part of the policy."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from rllib_srl.envs.agents import endpoint as serving
from rllib_srl.envs.agents.agent import Agent
from rllib_srl.envs.agents.endpoint import Session, endpoint
from rllib_srl.envs.agents.environment import AgentError
from rllib_srl.envs.agents.tasks import Tasks
from rllib_srl.envs.agents.web import MAX_BODY_BYTES
from tests.waiting import wait_until

openai = pytest.importorskip("openai")  # vLLM brings it, or the extra `agents`

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [1, "ä"]}}\n</tool_call>'
LOG: list[Any] = []


# --- agents; `run` is one of them by its name in the task's row


def ask(client: Any, *contents: str, **how: Any) -> Any:
    messages = [{"role": "user", "content": content} for content in contents]
    return client.chat.completions.create(model="m", messages=messages, **how)


def plain(client: Any, task: dict[str, Any]) -> float:
    return float(ask(client, f"seed {task['seed']}").choices[0].message.content == "yes")


async def waiting(client: Any, task: dict[str, Any]) -> float:
    answers = await asyncio.gather(*(ask(client, f"question {n}") for n in range(3)))
    return sum(one.choices[0].message.content == "yes" for one in answers) / 3


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


def refused(client: Any, task: dict[str, Any]) -> float:
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, "hi")
    assert error.value.code == "out_of_calls" and "at most" in error.value.message
    return 0.75


@pytest.fixture
def agent() -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(function: Callable[..., Any] | None = None, **settings: Any) -> Agent:
        named = {"agent": f"{__name__}:{function.__name__}"} if function else {}
        made.append(Agent({**named, **settings}))
        return made[-1]

    LOG.clear()
    yield make
    for env in made:
        env.close()


def reset(env: Agent, prompt_id: str = "4") -> dict[str, Any]:
    return json.loads(env.reset(options={"prompt_id": prompt_id})[1]["conversation"])


# --- functions and commands


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
    (two, "4", "returned None, a NoneType"),
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
        errors: list[str] = []

        def step(env: Agent = env, errors: list[str] = errors) -> None:
            with suppress(AgentError):
                env.step("x")
            errors.append("over")

        LOG.clear()
        thread = threading.Thread(target=step)
        thread.start()
        assert wait_until(lambda: LOG != [])  # the agent loops or sleeps
        program = env._program
        env.abandon()
        thread.join(60)
        assert errors == ["over"]
        program._thread.join(60)
        assert not program._thread.is_alive()
    assert LOG[-1] == "cancelled"


def test_a_refused_call_is_a_bad_request_with_a_code(agent):
    env = agent(refused)
    reset(env)
    assert env.refuse_call("out_of_calls", "at most 2")[1:] == (0.75, True, False, {})


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
    thread = threading.Thread(target=_quiet, args=(env, str(tmp_path / "pids")))
    thread.start()
    assert wait_until(lambda: _read(tmp_path / "pids").endswith("\n"))
    env.abandon()
    thread.join(60)
    pids = _read(tmp_path / "pids").split()
    assert len(pids) == 2
    assert wait_until(lambda: not any(_is_running(int(pid)) for pid in pids))


def _quiet(env: Agent, turn: str) -> None:
    with suppress(AgentError):
        env.step(turn)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- settings and tasks


@pytest.mark.parametrize(("settings", "message"), [
    ({}, "expected one of the two"),
    ({"agent": "a:b", "agent_command": ["x"]}, "expected one of the two"),
    ({"agent": "run"}, "expected 'my_module:run'"),
    ({"agent": "no_such_module_here:run"}, "agent = 'no_such_module_here:run': there is no module"),
    ({"agent": "json:no_such"}, "agent = 'json:no_such': json has no 'no_such'"),
    ({"agent": "json:loads", "path": "no-such.jsonl"}, "no-such.jsonl"),
    ({"agent": "json:loads", "heldout_path": "x.jsonl"}, "heldout_path is given without path"),
    ({"agent_command": [1]}, "expected a list of texts"),
])  # fmt: skip
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Agent(settings)


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


# --- the server


@pytest.fixture
def session() -> Iterator[Session]:
    """Return a session whose calls are answered with "ok"."""
    opened = endpoint().open()

    def serve() -> None:
        while (call := opened.wait()) is not None:
            call.end(serving.Answer({"role": "assistant", "content": "ok"}, "stop", 3, 1))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield opened
    endpoint().close(opened)
    thread.join(60)


def post(
    token: str, body: bytes, path: str = "/chat/completions", method: str = "POST", **headers: str
) -> tuple[int, bytes]:
    parts = urlsplit(endpoint().url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # a body that is refused is not read to its end
            connection.request(method, parts.path + path, body, {"Authorization": f"Bearer {token}", **headers})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


BASE = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_requests_get_an_answer_or_a_reason(session):
    """The bodies that are taken and refused: test_agent_requests.py."""
    status, answer = post(session.token, json.dumps(BASE).encode())
    assert status == 200 and json.loads(answer)["choices"][0]["message"] == {"role": "assistant", "content": "ok"}
    streamed = {**BASE, "stream": True, "stream_options": {"include_usage": True}}
    lines = [line[6:] for line in post(session.token, json.dumps(streamed).encode())[1].decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]" and json.loads(lines[-2])["usage"]["total_tokens"] == 4
    for body in (b"", b"\xff\xfe", b"[" * 50_000, json.dumps({**BASE, "n": 2}).encode()):
        status, answer = post(session.token, body)
        error = json.loads(answer)["error"]
        assert status == 400 and error["type"] == "invalid_request_error" and len(error["message"]) > 10
    assert post(session.token, json.dumps(BASE).encode())[0] == 200  # and the server goes on


def test_a_body_has_a_limit_packed_too(session):
    large = json.dumps({**BASE, "user": "x" * 10_000_000}).encode()
    for body, headers in ((large, {}), (gzip.compress(large), {"Content-Encoding": "gzip"})):
        status, answer = post(session.token, body, **headers)
        assert status == 413 and "error" in json.loads(answer)
    assert len(large) > 2 * MAX_BODY_BYTES > 2 * len(gzip.compress(large))
    assert post(session.token, json.dumps(BASE).encode())[0] == 200


def test_only_tokens_of_episodes_under_way_are_valid(session):
    assert urlsplit(endpoint().url).hostname == "127.0.0.1"
    body, other = json.dumps(BASE).encode(), endpoint().open()
    endpoint().close(other)
    for token in ("", "x", "Bearer", "ä" * 30, "x" * 5000, other.token):
        for method, path in (("POST", "/chat/completions"), ("GET", "/models")):
            status, answer = post(token.encode().decode("latin-1"), body, path, method)
            assert status == 401 and json.loads(answer)["error"]["code"] == "invalid_api_key" and b"ok" not in answer
    assert post("x", body, Authorization=f"Basic {session.token}")[0] == 401
    assert post("x", body, Authorization=f"bearer {session.token}")[0] == 200
    for path, method, status in (
        ("/models", "GET", 200), ("/completions", "POST", 404), ("/chat/completions", "GET", 405),
        ("/../secret", "GET", 404), ("/models", "POST", 405),
    ):  # fmt: skip
        assert post(session.token, body, path, method)[0] == status


def test_the_key_of_the_process_needs_the_name_of_an_episode(session):
    body, key, other = json.dumps(BASE).encode(), endpoint().key, endpoint().open()
    for token, name in ((session.token, "mine"), (other.token, "other"), ("no such token", "nobody")):
        endpoint().name(token, name)
    endpoint().close(other)
    assert post(key, body)[0] == 401
    for token, name, status in (
        (key, "mine", 200), (key, "", 401), (key, "nobody", 401), (key, session.token, 401), (key, "other", 401),
        ("mine", "", 401), ("x", "mine", 401),  # a name is not a key
    ):  # fmt: skip
        assert post(token, body, **{"X-Session-ID": name})[0] == status


def test_an_ended_episode_answers_who_waits_and_a_crowd_is_refused():
    opened, body, statuses = endpoint().open(), json.dumps(BASE).encode(), []
    threads = [
        threading.Thread(target=lambda: statuses.append(post(opened.token, body)[0]))
        for _ in range(serving.MAX_WAITING + 3)
    ]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: len(statuses) >= 3)
    endpoint().close(opened)
    for thread in threads:
        thread.join(60)
    assert sorted(statuses) == [410] * serving.MAX_WAITING + [429] * 3


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_away_as_it_is_answered_has_no_answer(is_stream: bool):
    opened, parts = endpoint().open(), urlsplit(endpoint().url)
    answer = serving.Answer({"role": "assistant", "content": "ok"}, "stop", 3, 1)
    body = json.dumps({**BASE, "stream": is_stream})
    for is_gone in [True, False] * 10:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {opened.token}"})
        call = opened.wait()
        if is_gone:
            connection.close()
        assert call.answer(answer) is not is_gone
        if not is_gone:
            assert b"ok" in connection.getresponse().read()
            connection.close()
    endpoint().close(opened)
