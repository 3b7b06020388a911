r"""Test the kinds of answers that people reported as graded wrongly: each line by its value."""

from __future__ import annotations

import pytest

from rllib_srl.envs.math.final_answers import graded

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


@pytest.mark.parametrize(("gold", "turn"), WRONG)
def test_a_wrong_answer_earns_nothing(gold, turn):
    assert not graded(gold, turn).grade


@pytest.mark.parametrize(("gold", "turn"), RIGHT)
def test_a_right_answer_earns_1(gold, turn):
    assert graded(gold, turn).grade == 1.0
