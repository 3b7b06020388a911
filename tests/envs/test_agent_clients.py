"""What clients and frameworks send by themselves, behind whatever proxy: the real client against the real endpoint."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from rllib_srl.envs.agents import programs
from rllib_srl.envs.agents.agent import Agent
from rllib_srl.envs.agents.programs import MAX_TASK_BYTES, bypass_proxy

openai = pytest.importorskip("openai")  # vLLM brings it, or the extra `agents`

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "hi"}
SENT: dict[str, Any] = {}  # what `sending` sends
GOT: list[Any] = []


def sending(client: Any, task: dict[str, Any]) -> float:
    given = {"model": "m", "messages": [USER], **SENT}
    try:
        GOT.append(client.chat.completions.create(**given))
    except openai.BadRequestError as error:
        GOT.append(error)
        client.chat.completions.create(model="m", messages=[USER])
    return 1.0


def bringing_its_own(client: Any, task: dict[str, Any]) -> float:
    own = openai.OpenAI(base_url=str(client.base_url), api_key=client.api_key, max_retries=0, timeout=60)
    return float(own.chat.completions.create(model="m", messages=[USER]).choices[0].message.content == "yes")


@pytest.fixture
def agent() -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(**settings: Any) -> Agent:
        made.append(Agent(settings))
        return made[-1]

    SENT.clear()
    GOT.clear()
    yield make
    for env in made:
        env.close()


def played(agent: Callable[..., Agent], turn: str = "yes", **sent: Any) -> tuple[Any, dict[str, Any]]:
    """Let the real client send a request; return its reply or error, and the conversation that the player got."""
    SENT.update(sent)
    env = agent(agent=f"{__name__}:sending")
    info = env.reset(options={"prompt_id": "4"})[1]
    assert env.answer_call(turn, "stop", 2, 3, [7, 8], [1, 2, 3])[1:3] == (1.0, True)
    return GOT[0], json.loads(info["conversation"])


def test_the_real_clients_fields_are_taken_or_refused(agent: Callable[..., Agent]) -> None:
    """Which ones: test_agent_requests.py."""
    reply, _ = played(agent, parallel_tool_calls=False, tools=[TOOL], logit_bias={}, extra_body={"min_p": 0})
    assert reply.choices[0].message.content == "yes"
    GOT.clear()
    SENT.clear()
    reply, _ = played(agent, presence_penalty=0.5)
    assert isinstance(reply, openai.BadRequestError) and reply.param == "presence_penalty"


def test_the_template_gets_its_arguments_and_earlier_thoughts(agent: Callable[..., Agent]) -> None:
    thought = {"role": "assistant", "content": "a", "reasoning": "I see."}
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    _, asked = played(agent, messages=[USER, thought, USER], reasoning_effort="low", extra_body=extra)
    assert json.loads(asked["template"]) == {"enable_thinking": False, "reasoning_effort": "low"}
    assert asked["messages"][1] == {"role": "assistant", "content": "a", "reasoning_content": "I see."}


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_returned_to_who_asks_for_them(agent: Callable[..., Agent], stream: bool) -> None:
    env = agent(agent=f"{__name__}:asking_for_tokens")
    SENT["stream"] = stream
    env.reset(options={"prompt_id": "4"})
    env.answer_call("yes", "stop", 2, 3, [7, 8], [1, 2, 3])
    assert GOT == [([7, 8], [1, 2, 3])]


def asking_for_tokens(client: Any, task: dict[str, Any]) -> float:
    how = {"model": "m", "messages": [USER], "extra_body": {"return_token_ids": True}}
    reply = client.chat.completions.create(**how, **SENT)
    parts = list(reply) if SENT["stream"] else [reply]
    ids = [one for part in parts for choice in part.choices for one in choice.token_ids]
    GOT.append((parts[0].prompt_token_ids, ids))
    return 1.0


def test_an_agents_own_client_reaches_the_endpoint_behind_a_proxy(agent, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens
    env = agent(agent=f"{__name__}:bringing_its_own")
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
def test_a_task_of_any_size_reaches_a_command(agent: Callable[..., Agent], tmp_path: Path, text: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "other"}) + "\n")
    env = agent(
        agent_command=[sys.executable, str(tmp_path / "program.py")], path=str(tmp_path / "tasks.jsonl"),
    )  # fmt: skip
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
