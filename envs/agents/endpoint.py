"""The OpenAI-compatible endpoint of a process: one HTTP server on the loopback, a bearer token for each episode.

    agent ── POST /v1/chat/completions ──> Call ──> Session.wait() in the environment's thread ──> engine
          <── completion or stream ─────────────── Call.answer(...)

The server does not know the engine. A request becomes a `Call` of the session that its token names, and waits for
whoever plays the episode. A token is valid until its session is closed; without one there is nothing to read but 401.
A library that keeps one key for all episodes sends the key of the process, and the name of an episode in a header.
Calls of a session that wait are limited to `MAX_WAITING`, all else as in `web.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import queue
import secrets
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rllib_srl.envs.agents import web
from rllib_srl.envs.agents.requests import SAMPLING, ChatRequest, RequestError, read_request
from rllib_srl.envs.agents.responses import Answer, completion, events
from rllib_srl.envs.agents.web import Refusal, digest_of

logger = logging.getLogger(__name__)

MAX_WAITING = 64  # calls of one episode that wait at the same time; further ones get 429
CALL_TIMEOUT_S = 3600.0  # of a call; episodes end long before
SESSION_HEADER = "X-Session-ID"  # names the episode of a call with the key of the process


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
        the written answer is on its way is not: only a reply of the client would tell.
        """
        self.end(answer)
        try:
            return self._is_written.result(web.WRITE_TIMEOUT_S)
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
                return Refusal(429, "too_many_calls", f"{MAX_WAITING} calls of this episode are already waiting")
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
    """The HTTP server of a process, in its own thread. Invariant: it listens on 127.0.0.1 only."""

    def __init__(self) -> None:
        """Start the server.

        Raises:
            RuntimeError: it does not start.
        """
        self._sessions: dict[bytes, Session] = {}
        self._named: dict[str, Session] = {}
        self.key = secrets.token_urlsafe(32)  # of calls that name their episode by `SESSION_HEADER`
        self._numbers = itertools.count()
        self._warned: set[str] = set()
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        app = web.application(routes, refusals={RequestError: web.refused_request})
        self.url = f"http://{web.serve_in_thread(app, 'agent-endpoint')}/v1"

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

    def _session_of(self, request: Request) -> Session:
        token = web.bearer_of(request.headers)
        if web.is_same(token, self.key):
            session = self._named.get(request.headers.get(SESSION_HEADER, ""))
        else:
            session = self._sessions.get(digest_of(token))
        if session is None:
            expected = "expected the header 'Authorization: Bearer KEY' with the key of an episode"
            raise Refusal(401, "invalid_api_key", expected)
        return session

    async def _models(self, request: Request) -> Response:
        self._session_of(request)
        return JSONResponse(web.MODELS)

    async def _chat(self, request: Request) -> Response:
        session = self._session_of(request)
        call = Call(read_request(await web.body_of(request)))
        self._warn(call.request)
        media_type = "text/event-stream" if call.request.stream else "application/json"
        headers: dict[str, str] = {}
        return web.Stream(self._answered(request, session, call, headers), media_type, headers)

    async def _answered(
        self, request: Request, session: Session, call: Call, headers: dict[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of the answer, and report to the call whether they were written."""
        asked, number = call.request, f"{next(self._numbers):08d}"
        try:
            outcome: Answer | Refusal = session.put(call) or await call.outcome()
            if isinstance(outcome, Refusal):
                raise outcome
            await asyncio.sleep(0)  # the loop looks at its connections: this one may have been closed
            if asked.stream:
                for event in events(outcome, asked, number):
                    yield event
            else:
                body = json.dumps(completion(outcome, asked, number), ensure_ascii=False).encode()
                headers["content-length"] = str(len(body))
                yield body
            call.written(web.is_open(request))  # a client may close the connection after the last piece
        finally:
            session.done(call)
            call.written(False)

    def _warn(self, asked: ChatRequest) -> None:
        """Log once for each of `SAMPLING` that an agent gives."""
        for name in set(asked.sampling()) - self._warned:
            self._warned.add(name)
            logger.warning(
                "the agent's %s is not used: the policy is sampled by the settings of the run (%s)",
                name, ", ".join(SAMPLING),
            )  # fmt: skip


_lock = threading.Lock()
_endpoints: dict[int, Endpoint] = {}  # by process id: a forked process has no thread of its parent


def endpoint() -> Endpoint:
    """Return the endpoint of this process; the first call starts it."""
    with _lock:
        if os.getpid() not in _endpoints:
            _endpoints.clear()
            _endpoints[os.getpid()] = Endpoint()
        return _endpoints[os.getpid()]
