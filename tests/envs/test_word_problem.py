"""Word problems and their calculator: values by hand, hostile expressions, and episodes with calls."""

import operator
import re
import time
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.envs.tools.calculator import CalculatorError, evaluate, shown
from rllib_srl.envs.tools.word_problem import TEMPLATES, WordProblem
from tests.envs.play import first_ids, play

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
TREES = st.recursive(
    st.integers(0, 99).map(lambda value: (str(value), Fraction(value))),
    lambda inner: (
        st.tuples(inner, st.sampled_from(sorted(OPERATIONS)), inner)
        .filter(lambda parts: not (parts[1] == "/" and parts[2][1] == 0))
        .map(lambda p: (f"({p[0][0]} {p[1]} {p[2][0]})", OPERATIONS[p[1]](p[0][1], p[2][1])))
    ),
    max_leaves=10,
)


@given(TREES)
def test_arithmetic_is_that_of_fractions(tree):
    expression, value = tree
    assert evaluate(expression) == value


@pytest.mark.parametrize("expression", [
    "", " ", "9**9**9**9", "9**999", "2 ** 2 ** 30", "(2**1000) ** 2", "2 ** 0.5", "0 ** -1", "1 / 0", "1 // 0",
    "1 % 0", "1e999", "1j", "True", "'a' * 9", "x", "__import__('os')", "(1).__class__", "[1][0]", "1 if 1 else 2",
    "1 < 2", "1, 2", "1 +", "(" * 150, "(" * 90 + "1" + ")" * 90 + "(", "1" + "+1" * 500, "9" * 201, "\u0663 + 1",
    "\uff17", "1 \x00", "\ud800", "lambda: 1", "1 << 9", "~1", "1;2", "1\n2",
])  # fmt: skip
def test_other_text_is_refused_at_once(expression):
    start = time.thread_time()
    with pytest.raises(CalculatorError):
        evaluate(expression)
    assert time.thread_time() - start < 5


def oracle(asked):
    """Solve a word problem from its text alone, by rules that share nothing with the environment's."""
    numbers = [int(number) for number in re.findall(r"\d+", asked)]
    a, b, *more = numbers
    if "finds" in asked:
        return a + b
    if "bags of" in asked:
        return a * b
    if "gives" in asked and not more:
        return a - b
    if "shares" in asked and not more:
        return a // b if a % b == 0 else None
    (c,) = more
    if "boxes of" in asked:
        return a * b + c
    if "old and" in asked:
        return (a + b) * c
    if "keeps" in asked:
        return (a - b) // c if (a - b) % c == 0 else None
    return a - b - c


@pytest.mark.parametrize("num_steps", [1, 2])
def test_word_problems_are_solved_by_reading_them(num_steps):
    env = WordProblem({"num_steps": num_steps, "num_shots": 2})
    templates = Counter()
    for prompt_id in first_ids(env, count=300):
        question = env.question(prompt_id)
        assert str(oracle(question.text)) == question.answer == shown(evaluate(question.expression))
        assert int(question.answer) >= 1 and question.wrong != question.answer
        templates[prompt_id.split()[0]] += 1
    assert len(templates) == len(TEMPLATES[num_steps]) and min(templates.values()) > 40


def test_episodes_with_a_call_and_without_by_hand():
    env, prompt_id = WordProblem({"num_shots": 0}), "2.0 4 12 7 Mia pencils"
    observation, _ = env.reset(options={"prompt_id": prompt_id})
    asked = "Mia has 4 boxes of 12 pencils and 7 more pencils. How many pencils does Mia have?"
    assert observation.endswith(f"Question: {asked}\n")
    assert env.gold_turns(prompt_id) == ["Tool: 4 * 12 + 7\n", "Answer: 55\n"]
    for call in ("Tool: 4 * 12 + 7\n", "Tool: calculator(4 * 12 + 7)\n", "Tool: calculator('4 * 12 + 7')\n"):
        env.reset(options={"prompt_id": prompt_id})
        assert env.step(call)[:4] == ("Result: 55\n", 0.0, False, False), call
        assert env.step("Answer: 55\n")[:4] == ("", 1.0, True, False)
    assert play(env, ["Answer: 54\n"], prompt_id)[1:3] == ([0.0], True)
    assert play(env, ["Answer: many\n"], prompt_id)[3]["stop_reason"] == "unparsable"
    env, prompt_id = WordProblem({"num_shots": 0, "reward_without_call": 0.25}), "1.0 4 12 Mia pencils"
    assert play(env, ["Answer: 16\n"], prompt_id)[1] == [0.25]
    assert play(env, ["Tool: 4 + 12\n", "Answer: 16\n"], prompt_id)[1] == [0.0, 1.0]
