"""scripts/broken_requests.py sees what is wrong; its requests are sent to vLLM by scripts/nothing_lost.py."""

from __future__ import annotations

import json

import pytest

from scripts.broken_requests import fault_of

WHOLE = {"choices": [{"message": {"content": "A pear."}, "finish_reason": "stop"}]}
PIECE = {"choices": [{"delta": {"content": "A pear."}, "finish_reason": "stop"}]}


def stream_of(*values, end=b"data: [DONE]\n\n"):
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values) + end


@pytest.mark.parametrize(
    ("status", "body", "is_fault"),
    [
        (200, json.dumps(WHOLE).encode(), False),
        (200, stream_of(PIECE), False),
        (400, b'{"error": {"message": "no"}}', False),
        (400, b"no", True),
        (500, json.dumps(WHOLE).encode(), True),
        (200, stream_of(PIECE, PIECE, end=b""), True),
        (200, stream_of({"error": {"message": "cut"}}), True),
        (200, json.dumps({**WHOLE, "prompt_token_ids": [1]}).encode(), True),
        (200, stream_of({"choices": [{"delta": {"content": "A"}, "finish_reason": None}]}), True),
    ],
)
def test_a_reply_is_an_error_in_a_form_or_a_whole_answer(status, body, is_fault):
    assert bool(fault_of(status, body)) is is_fault
