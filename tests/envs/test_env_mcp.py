"""The environment `mcp` and `ToolEnvironment(mcp=...)` against servers of the package mcp and one that is published."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rllib_srl import ToolEnvironment
from rllib_srl.common.environments import resolve
from rllib_srl.envs.tools.calls import ToolServerError
from tests.machine import processes_below, still_alive
from tests.waiting import wait_until

pytest.importorskip("mcp", reason="mcp is not installed: rllib_srl[mcp]")
SERVER = str(Path(__file__).with_name("mcp_tools.py"))
COMMAND = [sys.executable, SERVER]
TASKS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(2, 12) for b in range(2, 12)]
SLOW = {"start_timeout_s": 60.0, "call_timeout_s": 60.0}  # on a busy machine


def made(**settings: Any) -> Any:
    return resolve("mcp")({"command": COMMAND, "tasks": TASKS, **SLOW, **settings})


def asked(env: Any) -> str:
    return env.reset(options={"prompt_id": next(iter(env.prompt_ids("train", seed=1)))})[0]


@pytest.fixture(scope="module")
def env() -> Any:
    return made()


@pytest.mark.slow
def test_tools_are_listed_typed_and_called(env: Any) -> None:
    prompt = asked(env)
    assert "add(a: int, b: int = 1)" in prompt and "Add two numbers." in prompt and "counts()" in prompt
    assert env.step("Tool: add(4, b=5)\n")[:3] == ("Result: 9\n", 0.0, False)
    assert env.step("Tool: add('x')\n")[0] == "Result: Error: add: a: 'x' is not of type 'integer'\n"
    assert env.step("Tool: add(1, c=2)\n")[0].startswith("Result: Error: add: c is unknown.")
    observation, reward, is_over, *_ = env.step("Tool: fails('no luck')\n")
    assert observation.startswith("Result: Error: ") and "no luck" in observation and not is_over and reward == 0
    env = made(max_result_chars=50)
    asked(env)
    assert env.step("Tool: long(num=4000)\n")[0].endswith("[cut: the first 50 of 4000 characters]\n")
    a, _, b = env._question.text[8:-1].split()
    assert env.step(f"Answer: {int(a) + int(b)}\n")[1] == 1.0


@pytest.mark.slow
def test_a_server_a_runner_is_shared_and_one_an_episode_is_not(env: Any) -> None:
    other = made()
    numbers = []
    for each in (env, other):
        asked(each)
        numbers.append(int(each.step("Tool: counts()\n")[0].split()[1]))
    assert numbers[1] == numbers[0] + 1
    own = made(per_episode=True)
    for _ in range(2):
        asked(own)
        assert [own.step("Tool: counts()\n")[0] for _ in range(2)] == ["Result: 1\n", "Result: 2\n"]
    own.close()


@pytest.mark.slow
def test_what_ends_a_server_loses_the_episode_and_not_the_next_one() -> None:
    env = made(max_bytes=8192)
    for call, said in (("dies()", "it ended with status 3"), ("long(num=9000)", "it sent a message of more than")):
        asked(env)
        with pytest.raises(ToolServerError, match="MCP server '.*mcp_tools.py' failed: " + said) as caught:
            env.step(f"Tool: {call}\n")
        assert "\n" not in str(caught.value)
        asked(env)
        assert env.step("Tool: add(1)\n")[0] == "Result: 2\n"
    env = made(call_timeout_s=1.0, per_episode=True)
    asked(env)
    servers = still_alive(processes_below(os.getpid()))
    with pytest.raises(ToolServerError, match="it did not answer within 1 s"):
        env.step("Tool: hangs()\n")
    env.close()
    assert wait_until(lambda: len(still_alive(servers)) <= len(servers) - 2)  # it and its relay


def raw(tmp_path: Path, schema: Any) -> list[str]:
    """Return the command of a server without the package, which lists one tool with a schema."""
    file = tmp_path / "raw.py"  # in its own folder: servers of one command are one server
    tmp_path.mkdir(exist_ok=True)
    file.write_text(f"""
import json, sys
schema = json.loads({json.dumps(schema)!r})
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        about = {{"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {{"tools": {{}}}}}}
        result = about | {{"serverInfo": {{"name": "raw", "version": "1"}}}}
    elif asked["method"] == "tools/list":
        result = {{"tools": [{{"name": "odd", "inputSchema": schema}}]}}
    elif asked["method"] == "tools/call":
        result = {{"content": "no list"}}
    else:
        result = None
    answer = {{"error": {{"code": -32601, "message": "none"}}}} if result is None else {{"result": result}}
    print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], **answer}}), flush=True)
""")
    return [sys.executable, str(file)]


@pytest.mark.slow
def test_a_server_that_lies_is_one_line(tmp_path: Path) -> None:
    odd: Any = {"type": "object", "properties": {"a": {"type": "integr"}}}
    for number, schema in enumerate((odd, {"type": "array"}, "text")):
        with pytest.raises(ValueError, match="tool 'odd' cannot be used|MCP server '.*raw.py' failed: ") as caught:
            made(command=raw(tmp_path / str(number), schema))
        assert "\n" not in str(caught.value)
    env = made(command=raw(tmp_path, {"type": "object", "properties": {}}))
    asked(env)
    with pytest.raises(ToolServerError, match="raw.py' failed: ") as lost:  # the episode, by an invalid answer
        env.step("Tool: odd()\n")
    assert "\n" not in str(lost.value)


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "said"), [
    ({"command": ["/none/here"]}, "MCP server '/none/here' failed: it cannot be started: .*No such file"),
    ({"command": [sys.executable, "-c", "import sys; sys.exit('no key')"]}, "it ended with status 1: no key"),
    ({"command": ["sleep", "100"], "start_timeout_s": 1.0}, "it did not start within start_timeout_s = 1"),
    ({"command": [], "url": ""}, "env_config of mcp: command = .*expected one of them"),
    ({"tasks": []}, "env_config of mcp: tasks is missing; expected rows"),
])  # fmt: skip
def test_a_server_that_does_not_start_is_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        made(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_server_over_http_and_tools_of_both_kinds() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)

    def is_up() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    def twice(a: int) -> int:
        """Double a number."""
        return 2 * a

    try:
        assert wait_until(is_up, 60)
        mcp = {"url": f"http://127.0.0.1:{port}/mcp", "start_timeout_s": 60.0}
        env = ToolEnvironment([twice], TASKS, mcp=mcp, call_timeout_s=60.0)
        prompt = asked(env)
        assert "twice(a: int)" in prompt and "add(a: int, b: int = 1)" in prompt
        assert [env.step(f"Tool: {call}\n")[0] for call in ("twice(4)", "add(4)")] == ["Result: 8\n", "Result: 5\n"]
    finally:
        server.kill()
        server.wait(60)
    with pytest.raises(ToolServerError, match=f"MCP server 'http://127.0.0.1:{port}/mcp' failed"):
        env.step("Tool: add(4)\n")


@pytest.mark.slow
def test_a_published_server() -> None:
    command = os.environ.get("MCP_SERVER_TIME", "mcp-server-time")  # pip install mcp-server-time
    if not Path(command).is_file():
        pytest.skip("mcp-server-time is not installed; see scripts/test.sh")
    env = made(command=[command, "--local-timezone=UTC"])
    prompt = asked(env)
    assert "get_current_time(timezone: str)" in prompt
    call = "convert_time(source_timezone='Europe/Paris', time='16:30', target_timezone='Asia/Tokyo')"
    found = json.loads(env.step(f"Tool: {call}\n")[0].removeprefix("Result: "))
    assert found["target"]["timezone"] == "Asia/Tokyo" and found["target"]["datetime"][11:16] in ("23:30", "00:30")
    assert env.step("Tool: get_current_time('Mars/Base')\n")[0].startswith("Result: Error: ")
