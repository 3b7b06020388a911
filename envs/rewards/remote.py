"""A reward function behind a URL.

    POST http://localhost:9000/score   {"prompt": "...", "answer": "...", "row": {...}}
    200                                {"reward": 0.5}, or 0.5 alone

A request that fails for a reason that may pass (no connection, status 429 or 5xx) is sent again, `retries` times at
most, after .2, .4, .8 ... seconds. All of it, with the wait for one of the `concurrency` connections of this process,
ends by the deadline. A server on another machine must be on the user's list of endpoints: see envs/allowed.py.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

from rllib_srl.envs.allowed import error_of
from rllib_srl.envs.posting import PostError, post, seconds_left

_FIRST_WAIT_S = 0.2
_connections: dict[tuple[str, int], threading.BoundedSemaphore] = {}  # shared by all environments of a process
_lock = threading.Lock()


class RemoteError(RuntimeError):
    """The server gave no reward; the message says how often it was asked, and what the last failure was."""


class RemoteReward:
    """The function f(prompt, answer, row) of a server. Invariant: at most `concurrency` requests are open."""

    def __init__(self, url: str, retries: int, concurrency: int):
        """Check that the user allows the address.

        Raises:
            ValueError: it is not the URL of an endpoint, or not on the user's list.
        """
        if error := error_of("reward", url):
            raise ValueError(error)
        self.url, self.retries = url, retries
        with _lock:
            self._open = _connections.setdefault((url, concurrency), threading.BoundedSemaphore(concurrency))

    def __call__(self, prompt: str, answer: str, row: dict[str, Any], deadline: float) -> Any:
        """Request the reward of an answer, by `deadline` on the clock of `time.monotonic`.

        Raises:
            TimeoutError: the deadline has passed.
            RemoteError: the server failed, or its reply is not a reward.
        """
        body = json.dumps({"prompt": prompt, "answer": answer, "row": row}, default=str).encode()
        if not self._open.acquire(timeout=seconds_left(deadline)):
            raise TimeoutError
        try:
            return _reward_in(self._posted(body, deadline))
        finally:
            self._open.release()

    def _posted(self, body: bytes, deadline: float) -> bytes:
        for attempt in range(self.retries + 1):
            try:
                return post(self.url, body, {}, deadline)
            except TimeoutError:
                raise
            except (PostError, OSError, http.client.HTTPException) as error:
                may_pass = not isinstance(error, PostError) or error.status == 429 or error.status >= 500
                wait_s = _FIRST_WAIT_S * 2**attempt
                if attempt == self.retries or not may_pass or time.monotonic() + wait_s >= deadline:
                    said = str(error) if isinstance(error, PostError) else f"{type(error).__name__}: {error}"
                    raise RemoteError(f"{said} (asked {attempt + 1} times)") from error
                time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")


def _reward_in(reply: bytes) -> Any:
    try:
        answer = json.loads(reply)
        return answer["reward"] if isinstance(answer, dict) else answer
    except (ValueError, KeyError, RecursionError) as error:
        raise RemoteError(f'the reply {reply[:80]!r} holds no reward; expected {{"reward": 0.5}}') from error
