"""Requests that are broken at random: their bytes, or single values of their JSON."""

from __future__ import annotations

import copy
import json
import re

HEAD = "{} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Which is largest: 17, 93 or 40?"}], "max_tokens": 5}
# Values that parsers, tokenizers and engines stumble over.
ODD = (
    None, True, 0, -1, 1, 2, 2**31, 2**63, 10**30, 0.5, -0.0, 1e-320, 1e308, "", "\n", "\0", "\ud800", "x" * 60_000,
    "\u202e\U0001f600" * 20, "<|im_end|>", "<s>", [], [[]], {}, {"a": None}, ["\n"], ["a"] * 20, [""], [1, "a"],
    [{"type": "text", "text": "hello"}], [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
)  # fmt: skip
FIELDS = (
    "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "stop", "n", "seed",
    "stream", "stream_options", "tools", "tool_choice", "logprobs", "response_format", "metadata", "user", "min_p",
    "logit_bias", "prompt_logprobs", "lora_path", "presence_penalty",
)  # fmt: skip


def request_of(first, token, body):
    """Return the bytes of a request, which may be changed."""
    return HEAD.format(first, token, len(body)).encode() + body


def with_other_bytes(rng, data):
    """Return a request with some bytes changed, doubled or dropped: of its body alone, or anywhere."""
    data = bytearray(data)
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


def may_wait(data):
    """Return whether a server may wait for more of these bytes: no head that is still ours, or a body that is short."""
    head, end, body = data.partition(b"\r\n\r\n")
    announced = re.search(rb"\r\nContent-Length: ([0-9]+)\r\n", head + b"\r\n")
    return not end or b"\r\nHost: x\r\n" not in head or not announced or len(body) < int(announced[1])


def with_other_value(rng):
    """Return the body of a chat with an odd value somewhere."""
    body = copy.deepcopy(CHAT) | ({"stream": True} if rng.random() < 0.4 else {})
    value, kind = rng.choice(ODD), rng.randrange(4)
    if kind < 2:
        body[rng.choice(FIELDS)] = value
    elif kind == 2:
        body["messages"][0][rng.choice(("role", "content", "name", "tool_calls"))] = value
    else:
        message = {"role": rng.choice(("system", "user", "assistant", "developer", "tool")), "content": value}
        body["messages"].insert(rng.randrange(2), message)
    return json.dumps(body).encode()
