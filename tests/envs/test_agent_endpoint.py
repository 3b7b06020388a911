"""The endpoint of the agents: who may ask it what, and what it does with those who wait, go away or come in a crowd."""

import gzip
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from rllib_srl.envs.agents import endpoint as serving
from rllib_srl.envs.agents.endpoint import Session, endpoint
from rllib_srl.envs.agents.responses import event
from rllib_srl.envs.agents.web import MAX_BODY_BYTES
from tests.waiting import wait_until


@pytest.fixture
def session() -> Iterator[Session]:
    """Return a session whose calls are answered with "ok"."""
    opened = endpoint().open()

    def serve() -> None:
        while (call := opened.wait()) is not None:
            call.end(serving.Answer({"role": "assistant", "content": "ok"}, "stop", 3, 1))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield opened
    endpoint().close(opened)
    thread.join(60)


def post(
    token: str, body: bytes, path: str = "/chat/completions", method: str = "POST", **headers: str
) -> tuple[int, bytes]:
    parts = urlsplit(endpoint().url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # a body that is refused is not read to its end
            connection.request(method, parts.path + path, body, {"Authorization": f"Bearer {token}", **headers})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


BASE = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_requests_get_an_answer_or_a_reason_and_a_body_has_a_limit(session):
    """The bodies that are taken and refused: test_agent_requests.py."""
    status, answer = post(session.token, json.dumps(BASE).encode())
    assert status == 200 and json.loads(answer)["choices"][0]["message"] == {"role": "assistant", "content": "ok"}
    streamed = {**BASE, "stream": True, "stream_options": {"include_usage": True}}
    lines = [line[6:] for line in post(session.token, json.dumps(streamed).encode())[1].decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]" and json.loads(lines[-2])["usage"]["total_tokens"] == 4
    for body in (b"", b"\xff\xfe", b"[" * 50_000, json.dumps({**BASE, "n": 2}).encode()):
        status, answer = post(session.token, body)
        error = json.loads(answer)["error"]
        assert status == 400 and error["type"] == "invalid_request_error" and len(error["message"]) > 10
    assert post(session.token, json.dumps(BASE).encode())[0] == 200  # and the server goes on
    large = json.dumps({**BASE, "user": "x" * 10_000_000}).encode()
    for body, headers in ((large, {}), (gzip.compress(large), {"Content-Encoding": "gzip"})):
        status, answer = post(session.token, body, **headers)
        assert status == 413 and "error" in json.loads(answer)
    assert len(large) > 2 * MAX_BODY_BYTES > 2 * len(gzip.compress(large))
    assert post(session.token, json.dumps(BASE).encode())[0] == 200


def test_an_event_is_one_line_for_a_client_that_splits_at_every_end_of_a_line():
    assert event({"a": "1\u20282\u20293\x854"}).decode().splitlines() == [r'data: {"a": "1\u20282\u20293\u00854"}', ""]


def test_only_tokens_of_episodes_under_way_are_valid(session):
    assert urlsplit(endpoint().url).hostname == "127.0.0.1"
    body, other = json.dumps(BASE).encode(), endpoint().open()
    endpoint().close(other)
    for token in ("", "x", "Bearer", "ä" * 30, "x" * 5000, other.token):
        for method, path in (("POST", "/chat/completions"), ("GET", "/models")):
            status, answer = post(token.encode().decode("latin-1"), body, path, method)
            assert status == 401 and json.loads(answer)["error"]["code"] == "invalid_api_key" and b"ok" not in answer
    assert post("x", body, Authorization=f"Basic {session.token}")[0] == 401
    assert post("x", body, Authorization=f"bearer {session.token}")[0] == 200
    for path, method, status in (
        ("/models", "GET", 200), ("/completions", "POST", 404), ("/chat/completions", "GET", 405),
        ("/../secret", "GET", 404), ("/models", "POST", 405),
    ):  # fmt: skip
        assert post(session.token, body, path, method)[0] == status


def test_the_key_of_the_process_needs_the_name_of_an_episode(session):
    body, key, other = json.dumps(BASE).encode(), endpoint().key, endpoint().open()
    for token, name in ((session.token, "mine"), (other.token, "other"), ("no such token", "nobody")):
        endpoint().name(token, name)
    endpoint().close(other)
    assert post(key, body)[0] == 401
    for token, name, status in (
        (key, "mine", 200), (key, "", 401), (key, "nobody", 401), (key, session.token, 401), (key, "other", 401),
        ("mine", "", 401), ("x", "mine", 401),  # a name is not a key
    ):  # fmt: skip
        assert post(token, body, **{"X-Session-ID": name})[0] == status


def test_an_ended_episode_answers_who_waits_and_a_crowd_is_refused():
    opened, body, statuses = endpoint().open(), json.dumps(BASE).encode(), []
    threads = [
        threading.Thread(target=lambda: statuses.append(post(opened.token, body)[0]))
        for _ in range(serving.MAX_WAITING + 3)
    ]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: len(statuses) >= 3)
    endpoint().close(opened)
    for thread in threads:
        thread.join(60)
    assert sorted(statuses) == [410] * serving.MAX_WAITING + [429] * 3


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_away_as_it_is_answered_has_no_answer(is_stream: bool):
    opened, parts = endpoint().open(), urlsplit(endpoint().url)
    answer = serving.Answer({"role": "assistant", "content": "ok"}, "stop", 3, 1)
    body = json.dumps({**BASE, "stream": is_stream})
    for is_gone in [True, False] * 10:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {opened.token}"})
        call = opened.wait()
        if is_gone:
            connection.close()
        assert call.answer(answer) is not is_gone
        if not is_gone:
            assert b"ok" in connection.getresponse().read()
            connection.close()
    endpoint().close(opened)
