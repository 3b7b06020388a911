"""vLLM's replies without vLLM: an HTTP server on a Unix socket, for tests of the gateway.

    @gateway(after=1)
    async def test_it(parts, monkeypatch): ...      with both running
"""

import asyncio
import inspect
import json
import socket
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from rllib_srl.cli.serving.gateway import Gateway
from rllib_srl.cli.serving.job import Job, ServedSettings
from rllib_srl.cli.serving.served_directory import ServedDirectory
from rllib_srl.cli.serving.serving import Serving
from rllib_srl.cli.serving.training import Training
from rllib_srl.cli.serving.translation import SamplingDefaults
from rllib_srl.cli.serving.version_files import ServedContinuation
from rllib_srl.cli.serving.vllm_server import ServerError, VLLMServer
from rllib_srl.cli.shared.access import Access
from rllib_srl.envs.agents.web import Server, listen
from rllib_srl.people.served_store import StoreThread

TOKEN = "a-token-of-the-tests-0123456789"
FIXED = ServedSettings(model="small", rank=8, context=64, temperature=1.0)


def choice_of(token, logp, name, text):
    listed = {"content": [{"token": text, "logprob": logp}]}
    return {"index": 0, name: {"role": "assistant", "content": text}, "token_ids": [token], "logprobs": listed}


def chat_of(question, **more):
    return {"model": "any", "messages": [{"role": "user", "content": question}], **more}


class SmallEngine(VLLMServer):
    """Answers over the same connection. `error`: "" or how answers fail; `canary_shift`: nats by which it is off."""

    def __init__(self, path):
        super().__init__(FIXED, path, True)
        self.path, self.error, self.loaded, self.http = str(path), "", [], None
        self.bodies, self.canary_shift, self.is_dead, self.num_starts = [], 0.0, False, 0
        self.load_error = ""
        self.texts = []  # of the next answers that are no streams

    async def start(self):
        self.num_starts += 1
        self.is_dead = False
        listening = socket.socket(socket.AF_UNIX)
        Path(self.path).unlink(missing_ok=True)
        listening.bind(self.path)
        listening.listen()
        app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])
        self.http = await Server(app, listening).__aenter__()
        self.connect(self.path)

    async def stop(self):
        await super().stop()
        if self.http is not None:
            await self.http.__aexit__()
            self.http = None

    def has_ended(self):
        return self.is_dead

    async def load(self, name, directory):
        if self.load_error:
            raise ServerError(self.load_error)
        self.loaded.append(name)

    async def unload(self, name):
        self.loaded.remove(name)

    async def continuations(self, name, expected):
        shift = self.canary_shift
        tops = [[{t: p + shift} for t, p in zip(one.ids, one.logps, strict=True)] for one in expected]
        return [ServedContinuation(one.ids, one.logps, top) for one, top in zip(expected, tops, strict=True)]

    async def _chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.error == "500":
            return JSONResponse({"error": {"message": "out of order"}}, 500)
        if self.error == "400":
            return JSONResponse({"error": {"message": "too long"}}, 400)
        if body["n"] > 1 or "tools" in body:
            text = self.texts.pop(0) if self.texts else " 93"
            whole = {**choice_of(5, -0.5, "message", text), "finish_reason": "stop"}
            listed = [{**whole, "index": at} for at in range(body["n"])]
            return JSONResponse({"id": "x", "model": "v0", "prompt_token_ids": [1, 2], "choices": listed})
        pieces = [choice_of(5, -0.5, "delta", " 9"), {**choice_of(6, -0.25, "delta", "3"), "finish_reason": "stop"}]
        if not body["stream"]:
            whole = choice_of(5, -0.5, "message", " 93") | {"token_ids": [5, 6], "finish_reason": "stop"}
            whole["logprobs"]["content"].append({"token": "3", "logprob": -0.25})
            if self.texts:
                await asyncio.sleep(0.05)
                whole["message"]["content"] = self.texts.pop(0)
            return JSONResponse({"id": "x", "model": "v0", "prompt_token_ids": [1, 2], "choices": [whole]})
        if self.error == "long":
            pieces = [choice_of(5, -0.5, "delta", "x" * 100_000)] * 200 + pieces[1:]
        return StreamingResponse(self._events(pieces))

    async def _events(self, pieces):
        for at, piece in enumerate(pieces):
            head = {"id": "x", "choices": [piece], **({} if at else {"prompt_token_ids": [1, 2]})}
            yield b"data: " + json.dumps(head).encode() + b"\n\n"
            if self.error == "cut":
                await asyncio.sleep(0.05)
                raise ConnectionError("cut")
            await asyncio.sleep(0 if self.error == "long" else 0.01)
        yield b"data: [DONE]\n\n"


class Parts:
    """What `served_with` starts."""

    def __init__(self, **parts):
        vars(self).update(parts)

    def ask(self, question="Which?", token=TOKEN, **more):
        return self.send("POST", "/v1/chat/completions", token, json=chat_of(question, **more))

    def stream(self, question="Which?"):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return self.client.stream("POST", "/v1/chat/completions", headers=headers, json=chat_of(question, stream=True))

    def rate(self, name, **body):
        return self.send("PUT", f"/v1/conversations/{name}/rating", json=body)

    def send(self, method, path, token=TOKEN, **more):
        headers = {"Authorization": f"Bearer {token}".strip().encode(), **more.pop("headers", {})}
        return self.client.request(method, path, headers=headers, **more)


@asynccontextmanager
async def served_with(directory, after=0, shows_tools=False, scheme=""):
    served = ServedDirectory(directory / "served")
    served.fix_settings(FIXED)
    db, engine = StoreThread(served.path, scheme), SmallEngine(directory / "e.sock")
    parts = []
    serving = Serving(engine, served, db, lambda is_busy: parts[0].on_busy(is_busy))
    parts.append(training := Training(served, db, serving, Job(served=FIXED), after))
    listening = listen("127.0.0.1", 0)
    access = Access(TOKEN, port=listening.getsockname()[1])
    usual = SamplingDefaults(1.0, 16, (), (), shows_tools, False)
    gateway = Gateway(access, "small", serving, db, training, usual)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        async with Server(gateway.app, listening) as http, httpx.AsyncClient(base_url=url, timeout=200) as client:
            await serving.start()
            of_server = {"gateway": gateway, "port": http.port, "client": client}
            yield Parts(engine=engine, db=db, serving=serving, training=training, served=served, **of_server)
    finally:
        await engine.stop()
        db.close()


def run(directory, body, limit_s=240, **how):
    async def all_of_it():
        async with served_with(directory, **how) as parts:
            await body(parts)

    asyncio.run(asyncio.wait_for(all_of_it(), limit_s))


def gateway(**how):
    """Make a test of a coroutine, which gets what `served_with` starts, and fixtures by their names."""

    def made(body):
        def test(tmp_path, **fixtures):
            run(tmp_path, partial(body, **fixtures), **how)

        _, *asked = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature([*list(inspect.signature(test).parameters.values())[:1], *asked])
        return test

    return made
