"""The OpenAI-compatible endpoint of a process: one HTTP server on the loopback, a bearer token for each episode.

    agent ── POST /v1/chat/completions ──> Call ──> Session.wait() in the environment's thread ──> engine
          <── completion or stream ─────────────── Call.answer(...)

The server does not know the engine. A request becomes a `Call` of the session that its token names, and waits for
whoever plays the episode. A token is valid until its session is closed; without one there is nothing to read but 401.
A library that keeps one key for all episodes sends the key of the process, and the name of an episode in a header.
Bodies are limited to `MAX_BODY_BYTES`, calls of a session that wait to `MAX_WAITING`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import queue
import secrets
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from rllib_srl.envs.agents.requests import SAMPLING, ChatRequest, RequestError, read_request
from rllib_srl.envs.agents.responses import Answer, completion, error_body, events

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
MAX_WAITING = 64  # calls of one episode that wait at the same time; further ones get 429
HEAD_TIMEOUT_S = 60.0  # for a connection without a whole head of a request, the first one or another
BODY_TIMEOUT_S = 30.0  # to receive a body
CALL_TIMEOUT_S = 3600.0  # of a call; episodes end long before
START_TIMEOUT_S = 30.0
WRITE_TIMEOUT_S = 30.0  # to write an answer
SESSION_HEADER = "X-Session-ID"  # names the episode of a call with the key of the process
MODEL = "policy"  # the name under which the model is listed; requests may use any

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Refusal:
    """A call that gets no turn."""

    status: int
    code: str
    message: str


class Call:
    """A request that waits for its answer. Invariant: it is answered or refused at most once."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.is_gone = False  # whether the client has closed the connection
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Answer | Refusal] = self._loop.create_future()
        self._is_written: Future[bool] = Future()

    async def outcome(self) -> Answer | Refusal:
        """Wait for the answer."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._future), CALL_TIMEOUT_S)
        except asyncio.CancelledError:
            self.is_gone = True
            raise
        except TimeoutError:
            self.is_gone = True
            return Refusal(408, "timeout", f"there was no answer within {CALL_TIMEOUT_S:g} s")

    def answer(self, answer: Answer) -> bool:
        """Answer the call, from another thread than the server's; return whether the answer was written.

        A client that closes its connection before this call is noticed, whatever the timing. One that closes it while
        the written answer is on its way is not: nothing short of a reply of its own would tell.
        """
        self.end(answer)
        try:
            return self._is_written.result(WRITE_TIMEOUT_S)
        except TimeoutError:
            return False

    def written(self, is_written: bool) -> None:
        """Report whether the answer was written; the first report counts."""
        if not self._is_written.done():
            self._is_written.set_result(is_written)

    def end(self, outcome: Answer | Refusal) -> None:
        """Answer or refuse the call, from any thread."""
        self._loop.call_soon_threadsafe(self._set, outcome)

    def _set(self, outcome: Answer | Refusal) -> None:
        if not self._future.done():
            self._future.set_result(outcome)


@dataclass(frozen=True)
class Ended:
    """The end of an agent: what it returned, or how it failed."""

    value: Any = None
    error: str = ""


class Session:
    """One episode: its token, and what its agent does, in order. Invariant: after `close` every call is refused."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.names: list[str] = []
        self._events: queue.SimpleQueue[Call | Ended | None] = queue.SimpleQueue()
        self._waiting: set[Call] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, call: Call) -> Refusal | None:
        """Add a call, or return why it is refused."""
        with self._lock:
            if self._is_closed:
                return _OVER
            if len(self._waiting) >= MAX_WAITING:
                return Refusal(429, "too_many_calls", f"{MAX_WAITING} calls of this episode are waiting already")
            self._waiting.add(call)
        self._events.put(call)
        return None

    def end(self, ended: Ended) -> None:
        """Report the end of the agent."""
        self._events.put(ended)

    def wait(self) -> Call | Ended | None:
        """Return the next call or the agent's end; None once the session is closed."""
        while True:
            try:
                event = self._events.get(timeout=1.0)
            except queue.Empty:
                event = None
            if self._is_closed:
                return None
            if isinstance(event, Ended) or (isinstance(event, Call) and not event.is_gone):
                return event
            if event is not None:
                self.done(event)

    def done(self, call: Call) -> None:
        """Forget a call that was answered or refused."""
        with self._lock:
            self._waiting.discard(call)

    def close(self) -> None:
        """Refuse all calls, present and future."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, set()
        for call in waiting:
            call.end(_OVER)
        self._events.put(None)


_OVER = Refusal(410, "episode_over", "the episode of this token has ended")


class Endpoint:
    """The HTTP server of a process, in a thread of its own. Invariant: it listens on 127.0.0.1 only."""

    def __init__(self) -> None:
        """Start the server.

        Raises:
            RuntimeError: it does not start.
        """
        self._sessions: dict[bytes, Session] = {}
        self._named: dict[str, Session] = {}
        self.key = secrets.token_urlsafe(32)  # of calls that name their episode by `SESSION_HEADER`
        self._numbers = itertools.count()
        self._has_started = threading.Event()
        self._fault: BaseException | None = None
        self._warned: set[str] = set()
        self.url = ""
        threading.Thread(target=self._serve, daemon=True, name="agent-endpoint").start()
        if not self._has_started.wait(START_TIMEOUT_S) or self._fault is not None:
            raise RuntimeError(f"the endpoint for agents did not start: {self._fault or 'timeout'}")

    def open(self) -> Session:
        """Return a new session."""
        session = Session(secrets.token_urlsafe(32))
        self._sessions[digest_of(session.token)] = session
        return session

    def name(self, token: str, name: str) -> None:
        """Give the open session of a token a name for `SESSION_HEADER`."""
        if session := self._sessions.get(digest_of(token)):
            session.names.append(name)
            self._named[name] = session

    def close(self, session: Session) -> None:
        """Close a session; its token and its names are not valid any more."""
        self._sessions.pop(digest_of(session.token), None)
        for name in session.names:
            self._named.pop(name, None)
        session.close()

    def _serve(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._start())
        except BaseException as error:  # the constructor raises it
            self._fault = error
            self._has_started.set()
            return
        self._has_started.set()
        loop.run_forever()

    async def _start(self) -> None:
        hush_malformed_requests()
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[as_json])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        runner = runner_of(app, shutdown_timeout_s=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"

    def _session_of(self, request: web.Request) -> Session | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        if secrets.compare_digest(digest_of(token.strip()), digest_of(self.key)):
            return self._named.get(request.headers.get(SESSION_HEADER, ""))
        return self._sessions.get(digest_of(token.strip()))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if self._session_of(request) is None:
            return failed(_UNKNOWN)
        listed = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rllib_srl"}
        return web.json_response({"object": "list", "data": [listed]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        if session is None:
            return failed(_UNKNOWN)
        try:
            asked = read_request(await body_of(request))
        except RequestError as error:
            return failed(Refusal(400, "invalid_request", str(error)), error.param)
        self._warn(asked)
        call = Call(asked)
        outcome: Answer | Refusal | None = session.put(call)
        try:
            outcome = outcome or await call.outcome()
            if isinstance(outcome, Refusal):
                return failed(outcome)
            await asyncio.sleep(0)  # the loop looks at its connections: this one may have been closed
            return await self._answered(request, call, outcome)
        finally:
            session.done(call)
            call.written(False)

    async def _answered(self, request: web.Request, call: Call, answer: Answer) -> web.StreamResponse:
        """Write an answer, and report it to the call once it is written; a closed connection raises."""
        number = f"{next(self._numbers):08d}"
        asked = call.request
        response: web.StreamResponse
        if not asked.stream:
            response = web.json_response(completion(answer, asked, number))
            await response.prepare(request)
            await response.write_eof()
            call.written(_is_open(request))
            return response
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in events(answer, asked, number):
            await response.write(event)
        call.written(_is_open(request))  # a client may close the connection after the last event
        await response.write_eof()
        return response

    def _warn(self, asked: ChatRequest) -> None:
        """Log once for each of `SAMPLING` that an agent gives."""
        for name in set(asked.sampling()) - self._warned:
            self._warned.add(name)
            logger.warning(
                "the agent's %s is not used: the policy is sampled by the settings of the run (%s)",
                name, ", ".join(SAMPLING),
            )  # fmt: skip


def _is_open(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


_UNKNOWN = Refusal(401, "invalid_api_key", "expected the header 'Authorization: Bearer KEY' with the key of an episode")


@web.middleware
async def as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Write the server's own errors, such as 404 and 413, as OpenAI's server does."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return failed(Refusal(error.status, error.reason.lower().replace(" ", "_"), error.reason))


def runner_of(app: web.Application, shutdown_timeout_s: float) -> web.AppRunner:
    """Return the server of an application, which closes connections that wait for a head for `HEAD_TIMEOUT_S`.

    Args:
        app: the application.
        shutdown_timeout_s: for requests under way at the end.
    """
    how: dict[str, Any] = {"access_log": None, "handler_cancellation": True, "keepalive_timeout": HEAD_TIMEOUT_S}
    return web.AppRunner(app, **how, shutdown_timeout=shutdown_timeout_s)


def failed(refusal: Refusal, param: str | None = None) -> web.Response:
    body = error_body(refusal.status, refusal.message, refusal.code, param)
    return web.json_response(body, status=refusal.status)


async def body_of(request: web.Request) -> bytes:
    """Return the body of a request.

    Raises:
        RequestError: it cannot be read, or the client has gone.
        web.HTTPRequestTimeout: it does not arrive within `BODY_TIMEOUT_S`.
    """
    try:
        return await asyncio.wait_for(request.read(), BODY_TIMEOUT_S)
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except (web.RequestPayloadError, ConnectionError) as error:  # its Content-Encoding or Transfer-Encoding; no client
        raise RequestError(f"the body cannot be read: {' '.join(str(error).split())}") from None


def hush_malformed_requests() -> None:
    """Keep requests that are no HTTP out of the log: aiohttp writes a traceback with their bytes, secrets included.

    Whoever sent one has the reply, with status 400.
    """
    logging.getLogger("aiohttp.server").addFilter(_is_no_malformed_request)


def _is_no_malformed_request(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def digest_of(token: str) -> bytes:
    """Return a hash: a look-up by it reveals nothing of other tokens by its duration."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


_lock = threading.Lock()
_endpoints: dict[int, Endpoint] = {}  # by process id: a forked process has no thread of its parent


def endpoint() -> Endpoint:
    """Return the endpoint of this process; the first call starts it."""
    with _lock:
        if os.getpid() not in _endpoints:
            _endpoints.clear()
            _endpoints[os.getpid()] = Endpoint()
        return _endpoints[os.getpid()]
