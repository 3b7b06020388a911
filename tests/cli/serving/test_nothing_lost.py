"""scripts/nothing_lost.py finds what is lost, and takes half a stream for no answer."""

from __future__ import annotations

import json

import pytest

from scripts.nothing_lost import Cut, Ledger, lost_of, whole_of

ANSWERS, VALUES = {"a": "A pear.", "b": "Red."}, {"a": "good"}


@pytest.mark.parametrize(
    ("answers", "possible", "lost"),
    [
        ({"a": "A pear."}, {"a": {"good"}, "b": {"none", "bad"}}, []),  # the second was not acknowledged
        ({"c": "x"}, {}, ["answer c"]),
        ({"a": "A plum."}, {}, ["answer a"]),
        ({}, {"a": {"bad"}}, ["rating of a: good; expected bad"]),
        ({}, {"b": {"good", "bad"}}, ["rating of b: none; expected bad or good"]),
    ],
)
def test_what_is_lost_is_found(answers, possible, lost):
    assert lost_of(Ledger(answers, possible), ANSWERS, VALUES) == lost


def test_half_a_stream_is_no_answer():
    def event(text):
        return b"data: " + json.dumps({"id": "a", "choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"

    end = b"data: [DONE]\n\n"
    assert whole_of(event("A ") + event("pear.") + end) == ("a", "A pear.")
    for body in (b"", event("A "), event("A ") + b'data: {"error": {}}\n\n' + end):
        with pytest.raises(Cut):
            whole_of(body)
