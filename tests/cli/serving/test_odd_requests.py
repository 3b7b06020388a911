"""200 broken requests to `srl serve` with vLLM behind it: 4xx or an answer, and nothing without the token."""

from __future__ import annotations

import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests.cli.serving.mutations import CHAT, may_wait, request_of, with_other_bytes, with_other_value

NUM_BYTES, NUM_VALUES, NUM_WITHOUT_TOKEN = 80, 90, 30
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


@contextmanager
def served(out):
    """Run `srl serve` without training; yield its address and its token."""
    command = [sys.executable, "-m", "rllib_srl.cli", "serve", "tiny", "--out", str(out), "--port", "0"]
    errors = out.with_name("errors.txt").open("w")
    process = subprocess.Popen([*command, "--train-after", "0"], stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        url = re.match(r"serving (\S+)", process.stdout.readline())[1]
        yield urlsplit(url), (out / "token").read_text().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def replied(url, data):
    """Send bytes; return status and body of the reply, None if the server waits for more of them."""
    with socket.create_connection((url.hostname, url.port), ANSWER_S) as connection:
        connection.sendall(data)
        connection.settimeout(0.1 if may_wait(data) else ANSWER_S)
        reply = http.client.HTTPResponse(connection)
        try:
            reply.begin()
            return reply.status, reply.read()
        except TimeoutError:
            assert may_wait(data), f"no reply to {data[:300]!r}"
            return None


def asked(url, token, question):
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": question}]}).encode()
    status, body = replied(url, request_of("POST /v1/chat/completions", token, body))
    assert status == 200
    return json.loads(body)


def check_chat(status, body, sent):
    """Check that a reply is an error in OpenAI's form, or an answer with a text and a reason for its end."""
    if 400 <= status < 500:
        assert json.loads(body)["error"]["message"], sent
        return
    assert status == 200, f"{status} {body[:300]!r} to {sent[:300]!r}"
    events = [body] if body.startswith(b"{") else body.strip().split(b"\n\n")
    assert len(events) == 1 or events.pop() == b"data: [DONE]", sent
    values = [json.loads(one.removeprefix(b"data: ")) for one in events]
    assert not any("error" in value for value in values), f"{body[-300:]!r} to {sent[:300]!r}"
    choices = [choice for value in values for choice in value["choices"]]
    assert choices[-1]["finish_reason"] in ("stop", "length")
    said = [choice.get("message", choice.get("delta")).get("content") for choice in choices]
    assert all(isinstance(one, str) for one in said if one is not None) and b"token_ids" not in body


@pytest.mark.engine
@pytest.mark.slow
def test_broken_requests_get_4xx_or_an_answer_and_nothing_is_read_without_the_token(tmp_path):
    rng, statuses = random.Random(5), Counter()
    with served(tmp_path / "served") as (url, token):
        name = asked(url, token, "What is in the attic?")["id"]
        for _ in range(NUM_VALUES):
            sent = with_other_value(rng)
            status, body = replied(url, request_of("POST /v1/chat/completions", token, sent))
            check_chat(status, body, sent)
            statuses[status] += 1
        assert statuses[200] > 10 and statuses[400] > 30, statuses
        for _ in range(NUM_BYTES):
            place, body = rng.choice(PLACES)
            sent = with_other_bytes(rng, request_of(place.format(name=name), token, body))
            status, body = replied(url, sent) or (0, b"")
            assert status < 500 and (status != 200 or b"/chat/" not in sent or b"error" not in body), (sent, body)
            statuses[status] += 1
        assert statuses[401] > 2, statuses
        for _ in range(NUM_WITHOUT_TOKEN):
            place, body = rng.choice(PLACES)
            wrong = rng.choice(("", "none", token[:-1], token + "x", token.swapcase(), "\t", "é"))
            sent = request_of(place.format(name=name), wrong, body)
            for data in (sent, with_other_bytes(rng, sent)):
                status, body = replied(url, data) or (408, b"")
                assert 400 <= status < 500 and b"attic" not in body and b'"id"' not in body, (data, body)
        told = replied(url, request_of("GET /v1/status", token, b""))
        assert told[0] == 200 and json.loads(told[1])["is_ready"] is True
        shown = replied(url, request_of(f"GET /v1/conversations/{name}", token, b""))
        assert b"attic" in shown[1]  # so it was there to be read
        assert asked(url, token, "Which?")["choices"][0]["finish_reason"] in ("stop", "length")
    for path in (tmp_path / "errors.txt", tmp_path / "served" / "engine.log"):
        assert "Traceback" not in path.read_text()
