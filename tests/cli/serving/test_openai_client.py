"""The client of OpenAI against the gateway: what its calls get back, and what is trained on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from rllib_srl.engine.models import local_model
from tests.cli.serving import small_engine

openai = pytest.importorskip("openai")  # vLLM brings it, or the extra `agents`

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
ASKED = {"model": "m", "messages": [{"role": "user", "content": "2 + 3?"}]}
TEMPLATE = """{%- if tools %}{% for tool in tools %}{{ tool.function.name }}
{% endfor %}{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def run(directory, body):
    async def with_client(parts):
        url = f"http://127.0.0.1:{parts.port}/v1"
        async with openai.AsyncOpenAI(api_key=small_engine.TOKEN, base_url=url, max_retries=0, timeout=200) as client:
            await body(parts, client.chat.completions)

    small_engine.run(directory, with_client, shows_tools=True)


MARKED = (  # more of them are in test_translation.py
    ({"seed": 3, "stop": ["x"], "logprobs": True, "top_logprobs": 0}, "yes"),
    ({"n": 2}, "no; reason=n = 2; expected 1"),
)


def test_an_answer_says_whether_it_can_be_trained_on(tmp_path):
    async def body(parts, completions):
        for fields, marked in MARKED:
            raw = await completions.with_raw_response.create(**ASKED, **fields)
            reply = raw.parse()
            assert [one.message.content for one in reply.choices] == [" 93"] * fields.get("n", 1)
            assert raw.headers["X-SRL-Trained"] == marked
            stored = await parts.db.run(parts.db.store.find, reply.id)
            assert (stored.tokens is not None) == (marked == "yes")
            assert stored.untrainable == marked.partition("reason=")[2]
            assert (reply.choices[0].logprobs is not None) == ("logprobs" in fields)
            assert ("seed" in raw.headers.get("X-SRL-Ignored", "")) == ("seed" in fields)
            assert "seed" not in parts.engine.bodies[-1]

    run(tmp_path, body)


def test_tools_there_and_back_and_in_a_stream(tmp_path):
    async def body(parts, completions):
        parts.engine.texts = [f"I add. {CALL}", f"I add. {CALL}", "5"]
        message = (await completions.create(**ASKED, tools=TOOLS)).choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 2}') and message.content == "I add."
        stream = await completions.create(**ASKED, tools=TOOLS, stream=True)
        chunks = [chunk async for chunk in stream]
        said = chunks[0].choices[0].delta
        assert said.content == "I add." and said.tool_calls[0].function.arguments == '{"a": 2}'
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        messages = [*ASKED["messages"], message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        last = await completions.create(model="m", messages=messages, tools=TOOLS)
        assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("5", "stop")
        stored, *_ = (await parts.send("GET", "/v1/conversations?q=add")).json()["conversations"]
        called = {"role": "assistant", "content": "I add.", "tool_calls": [call.model_dump(exclude={"index"})]}
        assert stored["messages"] == [ASKED["messages"][0], called, messages[2]]
        assert stored["id"] == last.id and not stored["untrainable"]
        again = [*stored["messages"], {"role": "assistant", "content": "5"}, {"role": "user", "content": "3 + 4?"}]
        await completions.create(model="m", messages=again)
        assert parts.engine.bodies[-1]["messages"] == again

    run(tmp_path, body)


@contextmanager
def served_by_vllm(directory):
    """Run `srl serve` on the tiny model with a chat template that shows tools; yield a client."""
    model, out = directory / "model", directory / "served"
    shutil.copytree(local_model("tiny"), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "rllib_srl.cli", "serve", str(model), "--out", str(out), "--port", "0"]
    with (directory / "errors.txt").open("w") as errors:
        process = subprocess.Popen([*command, "--train-after", "0"], stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        url = re.match(r"serving (\S+)", process.stdout.readline())[1]
        with openai.OpenAI(api_key=(out / "token").read_text().strip(), base_url=url, timeout=120) as client:
            yield client.chat.completions.with_raw_response
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0
    assert os.path.getsize(directory / "errors.txt") < 2000, (directory / "errors.txt").read_text()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vllm_takes_all_of_it_and_its_tokens_are_logged_where_they_are_trained_on(tmp_path):
    schema = {"type": "string", "enum": ["yes"]}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    with served_by_vllm(tmp_path) as client:

        def ask(is_trained, **fields):
            raw = client.create(**ASKED, max_completion_tokens=16, **fields)
            assert raw.headers["X-SRL-Trained"].startswith("yes" if is_trained else "no; reason="), raw.headers
            return raw.parse().choices

        assert len(ask(True)) == 1
        assert len(ask(False, n=3)) == 3
        assert len(ask(True, seed=3)) == 1
        (listed,) = ask(True, logprobs=True, top_logprobs=3)
        assert len(listed.logprobs.content[0].top_logprobs) == 3 and listed.logprobs.content[0].logprob <= 0
        assert json.loads(ask(False, response_format=form)[0].message.content) == "yes"
        for choice in ("auto", "none"):
            assert len(ask(True, tools=TOOLS, tool_choice=choice)) == 1
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            assert ask(False, tools=TOOLS, tool_choice=choice)[0].message is not None
        texts = {one.message.content for one in ask(False, n=4, temperature=2.0)}
        assert len(texts) > 1
        for fields in ({}, {"n": 2}, {"tools": TOOLS}):
            chunks = list(client.create(**ASKED, max_completion_tokens=8, stream=True, **fields).parse())
            assert {one.index for chunk in chunks for one in chunk.choices} == set(range(fields.get("n", 1)))
