"""Test that right answers earn 1 and wrong ones 0, over pairs of every class (tests/envs/grading_pairs.py)."""

from __future__ import annotations

import pytest

from rllib_srl.envs.math.final_answers import graded
from tests.envs.grading_pairs import PAIRS, TABLES

# What people reported as graded wrongly, with the deadline of a run.
WRONG = [
    ("1.6e-19", "1.7e-19"), ("1.6e-19", "0"), (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}"), ("50%", "5000%"),
    ("50%", "0.5%"), ("B", "The answer is A because B is too large."), ("5", r"\boxed{\log 5}"), ("5", r"\boxed{5!}"),
    ("5", "sin 5"), ("7", r"7.\overline{3}"), ("52_8", "52"), ("52_8", "52_{9}"), ("xyz", "zyx"),
    ("5", r"<think>\boxed{5}</think>I do not know."),
]  # fmt: skip
RIGHT = [
    ("50%", "50%"), ("50%", r"\frac12"), ("50%", "0.5"), ("A", "The answer is A because B is too large."),
    ("5", r"<think>Maybe \boxed{4}.</think>\boxed{5}"), ("2:30 PM", "2:30 PM"), ("1.5 million", "It is 1.5 million."),
    ("yes", "Yes, it is."), ("1331 and 1728", r"\boxed{1331, 1728}"),
    (r"1 \text{ or } -2", r"\boxed{a=1 \text{ or } a=-2}"), ("3, 5, 7", r"\boxed{3}, \boxed{5}, \boxed{7}"),
    ("2, 3", "x = 2 or x = 3"), (r"\frac{\pi}{2}", "pi/2"), (r"2\sqrt3", "2√3"), (r"\infty", "∞"),
    (r"35\text{ cm}^2", r"\boxed{35}"), ("24 square feet", r"\boxed{24}"), (r"\emptyset", r"\varnothing"),
    ("5/4", "1 1/4"), (r"\frac{100}{3}\%", r"33\frac{1}{3}\%"), ("1e22", r"\boxed{10^{22}}"), ("1234567", "1 234 567"),
]  # fmt: skip


def test_the_pairs_are_graded_as_worked_by_hand():
    assert [
        (gold, turn) for gold, turn, is_right in PAIRS if (graded(gold, turn, deadline_s=20.0).grade or 0.0) != is_right
    ] == []


@pytest.mark.parametrize(("gold", "turn", "is_right"), [*((*one, 0) for one in WRONG), *((*one, 1) for one in RIGHT)])
def test_reported_answers_are_graded_as_worked_by_hand(gold, turn, is_right):
    assert (graded(gold, turn).grade or 0.0) == is_right


def test_the_pairs_cover_every_class_and_weigh_wrong_answers_as_much_as_right_ones():
    assert len(PAIRS) >= 300 and len({(gold, turn) for gold, turn, _ in PAIRS}) == len(PAIRS)
    assert sum(is_right for *_, is_right in PAIRS) <= len(PAIRS) / 2
    assert all(any(wrong for *_, wrong in table) for table in TABLES.values())
