"""What is uncertain about a right answer, by hand."""

from __future__ import annotations

import pytest

from rllib_srl.envs.math.doubts import doubt_about


@pytest.mark.parametrize(("gold", "reason"), [
    ("1,234", "a number with a thousands separator; or the list 1, 234"),
    (r"\int_0^1 x\,dx", "a formula that only math-verify can compare"),
    ("COVID-19", "words, although it has digits"), ("because it is the only prime", "a sentence of 6 words"),
    ("xyz", "letters without a vowel"), ("$xyz$", "a product of letters"), ("B", "a letter, read as a choice"),
    ("3:20", "a time of day; or a ratio"), ("(1, 2)", "a tuple or an interval"),
    ("5 apples", "a number with a noun as its unit"), ("50%", "a percentage"), ("1, 2", "a list"),
])  # fmt: skip
def test_doubts_by_hand(gold, reason):
    doubt = doubt_about(gold)
    assert doubt is not None and doubt.reason.startswith(reason)


@pytest.mark.parametrize(
    "gold", ["21", "-0.5", "1/2", "5 cm", "Paris", "yes", r"2\sqrt{3}", "[1, 2)", "x = 5", "2:30 PM"]
)
def test_a_plain_answer_leaves_no_doubt(gold):
    assert doubt_about(gold) is None


def test_a_kind_settles_a_doubt():
    assert doubt_about("B", "choice") is None
    assert doubt_about("COVID-19", "text") is None
