"""One session of an OpenEnv server, over a WebSocket or over HTTP.

    ws://host:8000/ws       {"type": "reset", "data": {"seed": 3}}     {"type": "observation", "data": {...}}
    http://host:8000        POST /reset {"seed": 3, "episode_id": "a"}, POST /step {"action": {...}, "episode_id": "a"}

A connection of the first kind is a session. Of the second kind a server must tell sessions apart by `episode_id`, which
servers of the package openenv do not: they make a new environment for each HTTP request. GET /state shows it.

A reset is repeated after failures that may pass, until its time is over; a step is sent once, since it may have been
taken. Source: the protocol of openenv 0.10, https://github.com/meta-pytorch/OpenEnv.
"""

from __future__ import annotations

import http.client
import json
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from rllib_srl.envs.optional import imported
from rllib_srl.envs.posting import PostError, get, post, seconds_left

_FIRST_WAIT_S = 0.1
_MOST_BYTES = 4 << 20  # of a message
_BAD_ACTION, _FULL = "VALIDATION_ERROR", "CAPACITY_REACHED"


class ServerError(RuntimeError):
    """The server failed; the episode is lost."""


class ActionError(ServerError):
    """The server refuses an action: its fields are not those that the environment takes."""


class SessionError(ServerError):
    """The server mixes up episodes; no run makes sense with it."""

    ends_run = True


@dataclass(frozen=True)
class Shown:
    """What a server answers to a reset or a step."""

    observation: dict[str, Any]
    reward: float
    is_done: bool


class Link(Protocol):
    """A session. Invariant: a call ends within `timeout_s`, with an answer or an error."""

    def reset(self, options: Mapping[str, Any]) -> Shown:
        """Begin an episode."""

    def step(self, action: Mapping[str, Any]) -> Shown:
        """Take an action.

        Raises:
            ActionError: the server refuses it.
            ServerError: the server failed.
        """

    def check(self) -> None:
        """Check that the episode is still the one of this session."""

    def close(self) -> None:
        """End the session."""


class SocketLink:
    """A session over a WebSocket, opened by the first reset and kept for later episodes."""

    def __init__(self, url: str, timeout_s: float):
        imported("websockets", "openenv_experimental")
        self.url, self.timeout_s = url, timeout_s
        self._socket: Any = None

    def reset(self, options: Mapping[str, Any]) -> Shown:
        """Begin an episode; see `Link`."""
        deadline, wait_s, attempts = time.monotonic() + self.timeout_s, _FIRST_WAIT_S, 0
        while True:
            attempts += 1
            try:
                self._open(deadline)
                return _shown(self._exchanged("reset", options, deadline))
            except ActionError:
                raise
            except ServerError as error:
                self.close()
                if time.monotonic() + wait_s >= deadline:
                    raise ServerError(f"{error} (tried {attempts} times in {self.timeout_s:g} s)") from error
                time.sleep(wait_s)
                wait_s *= 2

    def step(self, action: Mapping[str, Any]) -> Shown:
        """Take an action; see `Link`."""
        if self._socket is None:
            raise ServerError(f"{self.url}: the connection is closed")
        return _shown(self._exchanged("step", action, time.monotonic() + self.timeout_s))

    def check(self) -> None:
        """Do nothing: a connection has its own session."""

    def close(self) -> None:
        """Close the connection."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(Exception):  # the server may be gone already, in any way
                socket.send(json.dumps({"type": "close"}))
            with suppress(Exception):
                socket.close()

    def _open(self, deadline: float) -> None:
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        if self._socket is not None:
            return
        try:
            self._socket = connect(
                self.url, open_timeout=seconds_left(deadline), close_timeout=1.0, max_size=_MOST_BYTES, proxy=None
            )
        except (OSError, TimeoutError, WebSocketException) as error:
            raise ServerError(f"{self.url}: no connection ({_said(error)})") from error

    def _exchanged(self, kind: str, data: Mapping[str, Any], deadline: float) -> Any:
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            with suppress(ConnectionClosed):  # the last message of a server that has closed it says why
                self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            answer = json.loads(self._socket.recv(timeout=seconds_left(deadline)))
        except TimeoutError as error:
            self.close()  # a late answer would be taken for the next one
            raise ServerError(f"{self.url}: no answer to a {kind} within timeout_s = {self.timeout_s:g}") from error
        except (OSError, WebSocketException) as error:
            self.close()
            raise ServerError(f"{self.url}: the connection broke during a {kind} ({_said(error)})") from error
        except (ValueError, RecursionError) as error:
            self.close()
            raise ServerError(f"{self.url}: the answer to a {kind} is not JSON") from error
        if isinstance(answer, dict) and answer.get("type") == "observation":
            return answer.get("data")
        told = answer.get("data") if isinstance(answer, dict) else None
        code = told.get("code") if isinstance(told, dict) else None
        message = f"{self.url}: {kind} failed: {json.dumps(told if told is not None else answer, default=str)[:300]}"
        message += "; set max_concurrent_episodes to the number of sessions that it takes" if code == _FULL else ""
        raise (ActionError if code == _BAD_ACTION else ServerError)(message)


class HttpLink:
    """A session over HTTP, named by `episode_id` in each request."""

    def __init__(self, url: str, timeout_s: float):
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._episode = ""

    def reset(self, options: Mapping[str, Any]) -> Shown:
        """Begin an episode; see `Link`."""
        deadline, wait_s, attempts = time.monotonic() + self.timeout_s, _FIRST_WAIT_S, 0
        while True:
            attempts += 1
            self._episode = uuid.uuid4().hex
            try:
                shown = _shown(self._posted("reset", {**options, "episode_id": self._episode}, deadline))
                self.check()
                return shown
            except (ActionError, SessionError):
                raise
            except ServerError as error:
                if time.monotonic() + wait_s >= deadline:
                    raise ServerError(f"{error} (tried {attempts} times in {self.timeout_s:g} s)") from error
                time.sleep(wait_s)
                wait_s *= 2

    def step(self, action: Mapping[str, Any]) -> Shown:
        """Take an action; see `Link`."""
        deadline = time.monotonic() + self.timeout_s
        return _shown(self._posted("step", {"action": dict(action), "episode_id": self._episode}, deadline))

    def check(self) -> None:
        """Check that GET /state has the episode of this session.

        Raises:
            SessionError: it has another one.
        """
        deadline = time.monotonic() + self.timeout_s
        place = f"{self.url}/state?episode_id={quote(self._episode)}"
        state = _loaded(_exchanged(lambda: get(place, deadline), f"{self.url}/state", self.timeout_s))
        if not isinstance(state, dict) or state.get("episode_id") != self._episode:
            raise SessionError(
                f"{self.url} does not keep a separate session for episode_id = {self._episode!r}: GET /state has "
                f"{json.dumps(state, default=str)[:100]}; expected a server that does, or its ws:// address"
            )

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _posted(self, kind: str, body: Mapping[str, Any], deadline: float) -> Any:
        place = f"{self.url}/{kind}"
        return _loaded(_exchanged(lambda: post(place, json.dumps(body).encode(), {}, deadline), place, self.timeout_s))


def _exchanged(request: Any, place: str, timeout_s: float) -> bytes:
    try:
        body: bytes = request()
        return body
    except TimeoutError as error:
        raise ServerError(f"{place}: no answer within timeout_s = {timeout_s:g}") from error
    except PostError as error:
        raise (ActionError if error.status == 422 else ServerError)(f"{place}: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"{place}: no connection ({_said(error)})") from error


def _loaded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"the answer {body[:80]!r} is not JSON") from error


def _shown(data: Any) -> Shown:
    """Return the parts of an answer.

    Raises:
        ServerError: it has not the form of OpenEnv.
    """
    is_valid = isinstance(data, dict) and isinstance(data.get("observation"), dict)
    reward = data.get("reward") if is_valid else None
    if not is_valid or isinstance(reward, str | list | dict) or not isinstance(data.get("done", False), bool):
        told = json.dumps(data, default=str)[:120]
        form = '{"observation": {...}, "reward": .., "done": ..}'
        raise ServerError(f"the answer {told} is not valid; expected {form}")
    return Shown(data["observation"], float(reward or 0.0), bool(data.get("done", False)))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
