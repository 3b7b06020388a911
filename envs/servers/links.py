"""One session of an OpenEnv server, over a WebSocket.

    ws://host:8000/ws       {"type": "reset", "data": {"seed": 3}}     {"type": "observation", "data": {...}}

A connection is a session. The same servers make a new environment for each HTTP request, so they are not asked by HTTP.

A reset is repeated after failures that may pass, until its time is over; a step is sent once, since it may have been
taken. Source: the protocol of openenv 0.10, https://github.com/meta-pytorch/OpenEnv.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rllib_srl.envs.optional import imported
from rllib_srl.envs.posting import seconds_left

_FIRST_WAIT_S = 0.1
_MOST_BYTES = 4 << 20  # of a message
_BAD_ACTION, _FULL = "VALIDATION_ERROR", "CAPACITY_REACHED"


class ServerError(RuntimeError):
    """The server failed; the episode is lost."""


class ActionError(ServerError):
    """The server refuses an action: its fields are not those that the environment takes."""


@dataclass(frozen=True)
class Shown:
    """What a server answers to a reset or a step."""

    observation: dict[str, Any]
    reward: float
    is_done: bool


class SocketLink:
    """A session, opened by the first reset and kept for later episodes.

    Invariant: a call ends within `timeout_s`, with an answer or an error.
    """

    def __init__(self, url: str, timeout_s: float):
        imported("websockets", "openenv_experimental")
        self.url, self.timeout_s = url, timeout_s
        self._socket: Any = None

    def reset(self, options: Mapping[str, Any]) -> Shown:
        """Begin an episode.

        Raises:
            ServerError: the server failed until the time was over.
        """
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
        """Take an action.

        Raises:
            ActionError: the server refuses it.
            ServerError: the server failed.
        """
        if self._socket is None:
            raise ServerError(f"{self.url}: the connection is closed")
        return _shown(self._exchanged("step", action, time.monotonic() + self.timeout_s))

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
        cause = answer.get("data") if isinstance(answer, dict) else None
        code = cause.get("code") if isinstance(cause, dict) else None
        message = f"{self.url}: {kind} failed: {json.dumps(cause if cause is not None else answer, default=str)[:300]}"
        message += "; set max_concurrent_episodes to the number of sessions that it takes" if code == _FULL else ""
        raise (ActionError if code == _BAD_ACTION else ServerError)(message)


def _shown(data: Any) -> Shown:
    """Return the parts of an answer.

    Raises:
        ServerError: it has not the form of OpenEnv.
    """
    is_valid = isinstance(data, dict) and isinstance(data.get("observation"), dict)
    reward = data.get("reward") if is_valid else None
    if not is_valid or isinstance(reward, str | list | dict) or not isinstance(data.get("done", False), bool):
        text = json.dumps(data, default=str)[:120]
        form = '{"observation": {...}, "reward": .., "done": ..}'
        raise ServerError(f"the answer {text} is not valid; expected {form}")
    return Shown(data["observation"], float(reward or 0.0), bool(data.get("done", False)))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
