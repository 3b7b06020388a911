"""Requests to a served model that are broken at random: their bytes, or single values of their JSON.

`broken_requests` sends them to a server, and returns what is wrong with the replies: each must be a 4xx in OpenAI's
form or an answer, and there must be none without the token.
"""

from __future__ import annotations

import copy
import http.client
import json
import random
import re
import socket
from collections import Counter
from typing import Any
from urllib.parse import SplitResult

HEAD = "{} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n"
QUESTION = {"role": "user", "content": "Which is largest: 17, 93 or 40?"}
CHAT: dict[str, Any] = {"model": "m", "messages": [QUESTION], "max_tokens": 5}
# Values that parsers, tokenizers and engines stumble over.
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2, 2**31, 2**63, 10**30, 0.5, -0.0, 1e-320, 1e308, "", "\n", "\0", "\ud800", "x" * 60_000,
    "\u202e\U0001f600" * 20, "<|im_end|>", "<s>", [], [[]], {}, {"a": None}, ["\n"], ["a"] * 20, [""], [1, "a"],
    [{"type": "text", "text": "hello"}], [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
)  # fmt: skip
FIELDS = (
    "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "stop", "n", "seed",
    "stream", "stream_options", "tools", "tool_choice", "logprobs", "response_format", "metadata", "user", "min_p",
    "logit_bias", "prompt_logprobs", "lora_path", "presence_penalty",
)  # fmt: skip

ANSWER_S = 60.0
PLACES = (
    ("POST /v1/chat/completions", json.dumps(CHAT).encode()),
    ("POST /v1/chat/completions", json.dumps({**CHAT, "stream": True}).encode()),
    ("PUT /v1/conversations/{name}/rating", b'{"rating": "good", "rater": "ann"}'),
    ("GET /v1/conversations/{name}", b""),
    ("POST /v1/rollback", b'{"reason": "it is rude", "version": 3}'),
    ("POST /v1/training", b'{"paused": false}'),
    ("GET /v1/status", b""),
    ("GET /v1/versions", b""),
)


def request_of(first: str, token: str, body: bytes) -> bytes:
    """Return the bytes of a request, which may be changed."""
    return HEAD.format(first, token, len(body)).encode() + body


def with_other_bytes(rng: random.Random, request: bytes) -> bytes:
    """Return a request with some bytes changed, doubled or dropped: of its body alone, or anywhere."""
    data = bytearray(request)
    first = data.index(b"\r\n\r\n") + 3 if rng.random() < 0.6 else 0
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(first, len(data) - 1), len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randint(1, 20)]
        elif kind == 2:
            data[at:at] = data[at : at + rng.randint(1, 20)]
        else:
            data[at:at] = bytes(rng.randrange(256) for _ in range(3))
    return bytes(data)


def may_wait(data: bytes) -> bool:
    """Return whether a server may wait for more of these bytes: no head that is still ours, or a body that is short."""
    head, end, body = data.partition(b"\r\n\r\n")
    announced = re.search(rb"\r\nContent-Length: ([0-9]+)\r\n", head + b"\r\n")
    return not end or b"\r\nHost: x\r\n" not in head or not announced or len(body) < int(announced[1])


def with_other_value(rng: random.Random) -> bytes:
    """Return the body of a chat with an odd value somewhere."""
    body: dict[str, Any] = copy.deepcopy(CHAT) | ({"stream": True} if rng.random() < 0.4 else {})
    value, kind = rng.choice(ODD), rng.randrange(4)
    if kind < 2:
        body[rng.choice(FIELDS)] = value
    elif kind == 2:
        body["messages"][0][rng.choice(("role", "content", "name", "tool_calls"))] = value
    else:
        message = {"role": rng.choice(("system", "user", "assistant", "developer", "tool")), "content": value}
        body["messages"].insert(rng.randrange(2), message)
    return json.dumps(body).encode()


def replied(url: SplitResult, data: bytes) -> tuple[int, bytes] | None:
    """Send bytes; return status and body of the reply, None if the server may wait for more of them.

    Raises:
        OSError: there is no reply.
    """
    with socket.create_connection((url.hostname, url.port), ANSWER_S) as connection:
        connection.sendall(data)
        connection.settimeout(0.1 if may_wait(data) else ANSWER_S)
        reply = http.client.HTTPResponse(connection)
        try:
            reply.begin()
            return reply.status, reply.read()
        except TimeoutError:
            if not may_wait(data):
                raise
            return None


def error_of(status: int, body: bytes) -> str:
    """Return what is wrong with a reply to a chat: "" for an error in OpenAI's form, or a whole answer."""
    try:
        if 400 <= status < 500:
            return "" if json.loads(body)["error"]["message"] else "an error without a message"
        events = [body] if body.startswith(b"{") else body.strip().split(b"\n\n")
        if status != 200 or (len(events) > 1 and events.pop() != b"data: [DONE]"):
            return f"status {status}, or a stream without its end"
        values = [json.loads(event.removeprefix(b"data: ")) for event in events]
        choices = [choice for value in values for choice in value["choices"]]
    except (ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    is_whole = bool(choices) and choices[-1]["finish_reason"] in ("stop", "length")
    said = [choice.get("message", choice.get("delta")).get("content") for choice in choices]
    is_text = all(isinstance(text, str) for text in said if text is not None)
    return "" if is_whole and is_text and b"token_ids" not in body else "no whole answer, or one with its tokens"


def broken_requests(url: SplitResult, token: str, name: str, secret: bytes, num: int) -> tuple[Counter[int], list[str]]:
    """Send requests with odd values, with odd bytes, and without the token; return statuses, and what is wrong.

    Args:
        url: of the server.
        token: of the server.
        name: of a conversation.
        secret: a word of it, which nobody may read without the token.
        num: of requests.
    """
    rng, statuses, errors = random.Random(5), Counter[int](), []
    for at in range(num):
        kind = ("value", "bytes", "token")[at % 3]
        place, body = PLACES[0] if kind == "value" else rng.choice(PLACES)
        sent = request_of(place.format(name=name), token, with_other_value(rng) if kind == "value" else body)
        if kind == "token":
            wrong = rng.choice(("", "none", token[:-1], token + "x", token.swapcase(), "\t", "é"))
            sent = request_of(place.format(name=name), wrong, body)
        if kind == "bytes" or (kind == "token" and rng.random() < 0.5):
            sent = with_other_bytes(rng, sent)
        try:
            status, reply = replied(url, sent) or (0, b"")
        except OSError as error:
            errors.append(f"{error!r} to {sent[:200]!r}")
            continue
        statuses[status] += 1
        reason = error_of(status, reply) if kind == "value" else "failed" if status >= 500 else ""
        if kind == "token" and (not (status == 0 or 400 <= status < 500) or secret in reply):
            reason = "it was read without the token"
        errors += [f"{reason}: {status} {reply[:200]!r} to {sent[:200]!r}"] if reason else []
    return statuses, errors
