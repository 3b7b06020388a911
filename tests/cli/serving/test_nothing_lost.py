"""scripts/nothing_lost.py finds what is lost, and what is wrong with a reply."""

import json

import pytest

from scripts.broken_requests import error_of
from scripts.nothing_lost import Cut, Ledger, lost_of, whole_of

ANSWERS, VALUES = {"a": "A pear.", "b": "Red."}, {"a": "good"}
WHOLE = {"id": "a", "choices": [{"message": {"content": "A pear."}, "finish_reason": "stop"}]}
HALF = {"id": "a", "choices": [{"delta": {"content": "A "}, "finish_reason": None}]}
REST = {"id": "a", "choices": [{"delta": {"content": "pear."}, "finish_reason": "stop"}]}
END = b"data: [DONE]\n\n"


def stream_of(*values, end=END):
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values) + end


@pytest.mark.parametrize(("answers", "possible", "lost"), [
    ({"a": "A pear."}, {"a": {"good"}, "b": {"none", "bad"}}, []),  # the second was not acknowledged
    ({"c": "x"}, {}, ["answer c"]),
    ({"a": "A plum."}, {}, ["answer a"]),
    ({}, {"a": {"bad"}}, ["rating of a: good; expected bad"]),
    ({}, {"b": {"good", "bad"}}, ["rating of b: none; expected bad or good"]),
])  # fmt: skip
def test_what_is_lost_is_found(answers, possible, lost):
    assert lost_of(Ledger(answers, possible), ANSWERS, VALUES) == lost


def test_half_a_stream_is_no_answer():
    assert whole_of(stream_of(HALF, REST)) == ("a", "A pear.")
    for body in (b"", stream_of(HALF, end=b""), stream_of(HALF, {"error": {}})):
        with pytest.raises(Cut):
            whole_of(body)


@pytest.mark.parametrize(("status", "body", "is_error"), [
    (200, json.dumps(WHOLE).encode(), False),
    (200, stream_of(HALF, REST), False),
    (400, b'{"error": {"message": "no"}}', False),
    (400, b"no", True),
    (500, json.dumps(WHOLE).encode(), True),
    (200, stream_of(HALF), True),
    (200, stream_of(HALF, REST, end=b""), True),
    (200, json.dumps({**WHOLE, "prompt_token_ids": [1]}).encode(), True),
])  # fmt: skip
def test_a_reply_is_an_error_in_a_form_or_a_whole_answer(status, body, is_error):
    assert bool(error_of(status, body)) is is_error
