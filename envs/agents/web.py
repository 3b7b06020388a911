"""What every HTTP server here shares: Starlette's requests and errors, uvicorn on a socket, and limits on both.

    app = application(routes)                         errors in OpenAI's form; application(..., middleware) for a token
    async with Server(app, listen("127.0.0.1", 0)):   in the caller's event loop
    url = serve_in_thread(app, "a name")              in a daemon thread with its own event loop

    body_of(request)       the body: at most MAX_BODY_BYTES once unpacked, within BODY_TIMEOUT_S
    Stream(pieces)         a response in pieces; the generator goes on once its last piece was written

A handler is cancelled when its client closes the connection. A connection is closed if it waits for the head of a
request, the first one or another, or does not read what is written to it, for longer than the limits below.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import hashlib
import hmac
import socket
import threading
import zlib
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rllib_srl.envs.agents.requests import RequestError

MAX_BODY_BYTES = 4 << 20
HEAD_TIMEOUT_S = 60.0  # for a connection without a whole head of a request, the first one or another
BODY_TIMEOUT_S = 30.0  # to receive a body
WRITE_TIMEOUT_S = 30.0  # to write a piece of an answer
START_TIMEOUT_S = 30.0
BACKLOG = 128  # connections that wait to be accepted
MODEL = "policy"  # the name under which a model is listed; requests may use any
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "rllib_srl"}]}
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


# --- errors and tokens -----------------------------------------------------------------------------


class Refusal(HTTPException):
    """A request that is not answered; `param` names the field at fault, if there is one."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(status, message)
        self.code, self.param = code, param


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error, as OpenAI's server writes it."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failed(error: HTTPException) -> JSONResponse:
    """Return an error as a response in OpenAI's form."""
    code, param = getattr(error, "code", error.detail.lower().replace(" ", "_")), getattr(error, "param", None)
    return JSONResponse(error_body(error.status_code, error.detail, code, param), error.status_code, error.headers)


def refused_request(error: RequestError) -> Refusal:
    """Return the refusal of a request that is malformed."""
    return Refusal(400, "invalid_request", str(error), error.param)


def application(
    routes: Sequence[Route],
    middleware: Sequence[Middleware] = (),
    refusals: Mapping[type[Exception], Callable[[Any], Refusal]] | None = None,
) -> Starlette:
    """Return an application whose errors have OpenAI's form.

    Args:
        routes: its addresses.
        middleware: around all of them, also around unknown addresses.
        refusals: what the handlers may raise -> its refusal; a sub-class is refused as its base.
    """

    def handler_of(refused: Callable[[Any], Refusal]) -> Callable[[Request, Exception], Response]:
        return lambda _, error: failed(refused(error))

    handlers: dict[Any, Any] = {HTTPException: lambda _, error: failed(error)}
    handlers[Exception] = handler_of(lambda _: Refusal(500, "internal_error", "the server failed; see its log"))
    handlers |= {kind: handler_of(refused) for kind, refused in (refusals or {}).items()}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


def bearer_of(headers: Headers) -> str:
    """Return the bearer token of a request, "" without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def is_same(one: str, other: str) -> bool:
    """Return whether two texts are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


def digest_of(token: str) -> bytes:
    """Return a hash: a look-up by it reveals nothing of other tokens by its duration."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


# --- requests and responses ------------------------------------------------------------------------


async def body_of(request: Request, limit: int | None = None) -> bytes:
    """Return the body of a request, unpacked if its Content-Encoding is gzip or deflate.

    Args:
        request: not read yet.
        limit: most bytes; `MAX_BODY_BYTES` by default.

    Raises:
        Refusal: it is too large, too slow, or cannot be unpacked.
    """
    limit = MAX_BODY_BYTES if limit is None else limit
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", *_WBITS):
        raise _unreadable(f"Content-Encoding = {encoding[:40]!r}; expected gzip, deflate, or none")
    packed = zlib.decompressobj(_WBITS[encoding]) if encoding in _WBITS else None
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += packed.decompress(piece, limit + 1 - len(body)) if packed and piece else piece
                if len(body) > limit:
                    raise Refusal(413, "too_large", f"the body is too large; expected at most {limit} bytes")
    except TimeoutError:
        raise Refusal(408, "timeout", f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except zlib.error as error:
        raise _unreadable(str(error)) from None
    if packed and (not packed.eof or packed.unused_data):
        raise _unreadable(f"expected one complete {encoding} stream")
    return bytes(body)


def _unreadable(reason: str) -> Refusal:
    return Refusal(400, "invalid_request", f"the body cannot be read: {reason}")


def is_open(request: Request) -> bool:
    """Return whether the client of a request has not closed its connection."""
    open_: bool = request.scope["is_open"]()
    return open_


class Stream(Response):
    """A response whose pieces come one by one.

    What the generator raises before its first piece is an ordinary error, with its own status. `headers` are read
    when the first piece comes, so the generator can fill them. If the client goes away, the generator is closed.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        media_type: str = "text/event-stream",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._pieces, self._late_headers = pieces, {} if headers is None else headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the pieces."""
        is_started = False
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                if not is_started:
                    self.headers.update(self._late_headers)
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    is_started = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


# --- servers ---------------------------------------------------------------------------------------


class _Connection(H11Protocol):
    """uvicorn's connection, which also limits the time for a head and for a write, and cancels abandoned handlers."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._answered_by, self.app = self.app, self._answer
        self._handlers: set[asyncio.Task[Any]] = set()
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._time_head()
        for task in self._handlers:
            task.cancel()

    def _time_head(self) -> None:
        """Start the timer, or end it if a head has come; bytes of half a head do not start it again."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or self.transport.is_closing():
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await send(message)
            except TimeoutError:
                self.transport.abort()
                raise ClientDisconnect from None

        try:
            await self._answered_by({**scope, "is_open": self._is_open}, receive, send_in_time)
        except (asyncio.CancelledError, ClientDisconnect):
            if not self.transport.is_closing():
                raise
        finally:
            self._handlers.discard(task)

    def _is_open(self) -> bool:
        return not self.transport.is_closing()


class Server(uvicorn.Server):
    """A server on a socket that listens: `async with` in a loop that does more, else `run` until SIGINT or SIGTERM."""

    def __init__(self, app: ASGIApp, listening: socket.socket, grace_s: float = 1.0, **options: Any) -> None:
        """Prepare a server.

        Args:
            app: the application.
            listening: closed at the end.
            grace_s: for requests under way at the end; then they are cancelled.
            options: further fields of uvicorn's configuration.
        """
        fixed: dict[str, Any] = {"http": _Connection, "ws": "none", "lifespan": "on", "server_header": False}
        fixed |= {"access_log": False, "log_config": None, "log_level": "error"}  # a log has tokens and bodies
        fixed |= {"timeout_keep_alive": HEAD_TIMEOUT_S, "timeout_graceful_shutdown": grace_s, "backlog": BACKLOG}
        super().__init__(uvicorn.Config(app, **{**fixed, **options}))
        self._listening, self._grace_s = listening, grace_s
        self.port = int(listening.getsockname()[1]) if listening.family != socket.AF_UNIX else 0
        self._serving: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """End at a signal, if `run` is all that the program does; else signals are the program's."""
        with super().capture_signals() if self._serving is None else nullcontext():
            yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit`."""
        await super().serve(sockets or [self._listening])

    async def __aenter__(self) -> Server:
        """Start.

        Raises:
            RuntimeError: it does not start.
        """
        self._serving = asyncio.create_task(self.serve())
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while not self.started:
            if self._serving.done():
                self._serving.result()
            if self._serving.done() or asyncio.get_running_loop().time() > deadline:
                raise RuntimeError(f"the HTTP server did not start within {START_TIMEOUT_S:g} s")
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop: no further requests, and those under way have `grace_s`."""
        self.should_exit = True
        assert self._serving is not None
        await asyncio.wait({self._serving}, timeout=self._grace_s + START_TIMEOUT_S)
        if tasks := set(self.server_state.tasks):  # they were cancelled
            await asyncio.wait(tasks, timeout=START_TIMEOUT_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)


def serve_in_thread(app: ASGIApp, name: str) -> str:
    """Serve on a free port of the loopback, in a daemon thread until the process ends; return host:port.

    Raises:
        RuntimeError: the server does not start.
    """
    listening = listen("127.0.0.1", 0)
    host, port = listening.getsockname()
    server, errors = Server(app, listening), []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:  # the caller raises it
            errors.append(error)

    def stop() -> None:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)

    thread = threading.Thread(target=run, daemon=True, name=name)
    thread.start()
    atexit.register(stop)  # a thread that wakes while the interpreter ends may crash it
    waited = threading.Event()
    for _ in range(int(START_TIMEOUT_S / 0.01)):
        if server.started:
            return f"{host}:{port}"
        if not thread.is_alive():
            break
        waited.wait(0.01)
    raise RuntimeError(f"the HTTP server '{name}' did not start: {errors[0] if errors else 'timeout'}")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ValueError: the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        remedy = "--port (0 takes a free one)" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ValueError(f"{host}:{port} cannot be used: {error.strerror or error}; choose another {remedy}") from error
