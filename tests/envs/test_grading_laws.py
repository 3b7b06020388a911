r"""Laws of grading: a right answer stays right under rewriting, a wrong one stays wrong; hostile text costs no time."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.envs.math.final_answers import graded
from rllib_srl.envs.math.formula import read_formula
from rllib_srl.envs.math.grading import grade
from rllib_srl.envs.math.number_words import spelled
from rllib_srl.envs.math.values import FormulaError
from tests.envs.test_grading_pairs import PAIRS

LATEX = [(gold, turn, is_right) for gold, turn, is_right in PAIRS if turn.startswith(r"\boxed{") and "and" not in turn]
REWRITINGS = {
    "spaces": lambda inside: f"  {inside} ",
    "thin spaces": lambda inside: rf"\, {inside} \;",
    "dfrac": lambda inside: inside.replace(r"\frac", r"\dfrac"),
    "brackets": lambda inside: inside.replace("(", r"\left(").replace(")", r"\right)"),
    "dollars": lambda inside: f"${inside}$",
    "a full stop": lambda inside: f"{inside}.",
}
BARE = {
    "a box": lambda answer: rf"So it is $\boxed{{{answer}}}$.",
    "tags": lambda answer: f"<answer> {answer} </answer>",
    "hashes": lambda answer: f"Thus:\n#### {answer}",
    "thoughts": lambda answer: rf"<think>Is it \boxed{{17}}?</think>\boxed{{{answer}}}",
    "a phrase": lambda answer: f"The answer is {answer}.",
}
INTEGERS = st.integers(-(10**9), 10**9)


def earned(gold, turn):
    return graded(gold, turn, deadline_s=20.0).grade or 0.0


@pytest.mark.parametrize("name", REWRITINGS)
def test_a_box_earns_the_same_however_it_is_written(name):
    for gold, turn, is_right in LATEX:
        if turn.count(r"\boxed{") > 1 or r"\left" in turn:
            continue
        inside = turn.removeprefix(r"\boxed{").removesuffix("}")
        rewritten = REWRITINGS[name](inside)
        assert earned(gold, rf"\boxed{{{rewritten}}}") == is_right, (gold, rewritten)


@given(INTEGERS, INTEGERS, st.sampled_from(sorted(BARE)), st.sampled_from(["", " cm", r"\text{ apples}", "{}"]))
def test_an_integer_keeps_its_grade_in_every_mark_with_every_unit(gold, other, mark, unit):
    for answer in (gold, other, gold + 1):
        for written in (str(answer), f"{answer:,}", f"{answer:,}".replace(",", r"\,"), f"{answer}.0"):
            assert earned(str(gold), BARE[mark](written + unit.replace("{}", ""))) == float(answer == gold)


@given(st.fractions(min_value=-50, max_value=50, max_denominator=60), st.integers(1, 40))
def test_a_fraction_keeps_its_grade(gold, more):
    def spellings(value):
        sign, over, under = "-" * (value < 0), abs(value.numerator), value.denominator
        whole, rest = divmod(over, under)
        yield rf"{sign}\frac{{{over}}}{{{under}}}" if under > 1 else f"{value}"
        yield rf"{sign}\dfrac{{ {over} }}{{ {under} }}" if under > 1 else f"{value}.0"
        yield rf"{sign}{whole}\frac{{{rest}}}{{{under}}}" if whole and rest else f"{value}"
        yield f"{sign}{whole} {rest}/{under}" if whole and rest else f"{value}"

    for value in (gold, gold + Fraction(1, more)):
        for written in spellings(value):
            assert earned(str(gold), rf"\boxed{{{written}}}") == float(value == gold), (gold, written)


@given(st.integers(1, 99), st.integers(-300, 300), st.integers(1, 9))
def test_a_power_of_ten_has_its_place(digits, exponent, more):
    gold = f"{digits}e{exponent}"
    for written in (
        rf"{digits} \times 10^{{{exponent}}}",
        rf"{digits} \cdot 10^{{{exponent}}}",
        f"{digits}E{exponent}",
    ):
        assert earned(gold, rf"\boxed{{{written}}}") == 1.0
    for written in (rf"{digits} \times 10^{{{exponent + more}}}", rf"{digits + more} \times 10^{{{exponent}}}", "0"):
        assert earned(gold, rf"\boxed{{{written}}}") == 0.0


@given(
    st.integers(2, 10**6), st.sampled_from(["\\log {}", "\\sqrt{{{}}}x", "{}!!", "{}\\pi", "\\sin {}", "{}_7", "{}x"])
)
def test_a_piece_of_a_formula_is_not_the_answer(gold, formula):
    assert earned(str(gold), rf"\boxed{{{formula.format(gold)}}}") == 0.0


@given(
    st.lists(st.integers(-99, 99), min_size=2, max_size=6, unique=True),
    st.randoms(),
    st.sampled_from([", ", " and ", "; "]),
)
def test_a_list_has_its_items_in_any_order(items, random, between):
    gold = ", ".join(map(str, items))
    shuffled = random.sample(items, len(items))
    right = between.join(map(str, shuffled))
    assert earned(gold, rf"\boxed{{{right}}}") == 1.0
    assert earned(gold, ", ".join(rf"\boxed{{{item}}}" for item in shuffled)) == 1.0
    for wrong in (shuffled[1:], [*shuffled, 100], [shuffled[0] + 200, *shuffled[1:]]):
        assert earned(gold, rf"\boxed{{{between.join(map(str, wrong))}}}") == 0.0


@given(st.integers(-99, 99), st.integers(1, 99), st.sampled_from("(["), st.sampled_from(")]"))
def test_an_interval_has_its_ends_and_its_brackets(start, length, opened, closed):
    end = start + length
    gold = f"{opened}{start}, {end}{closed}"
    signs = "<" if opened == "(" else r"\le ", "<" if closed == ")" else r"\leq "
    assert earned(gold, rf"\boxed{{\left{opened}{start},{end}\right{closed}}}") == 1.0
    assert earned(gold, rf"\boxed{{{start} {signs[0]} x {signs[1]} {end}}}") == 1.0
    flipped = {"(": "[", "[": "(", ")": "]", "]": ")"}
    for wrong in (f"{flipped[opened]}{start}, {end}{closed}", f"{opened}{start}, {end + 1}{closed}", f"{start}, {end}"):
        assert earned(gold, rf"\boxed{{{wrong}}}") == 0.0


@given(st.lists(st.integers(-9, 9), min_size=2, max_size=5), st.integers(1, 9))
def test_a_polynomial_is_its_values(coefficients, more):
    def written(terms):
        return " + ".join(f"({value}) x^{{{power}}}" for power, value in terms)

    terms = list(enumerate(coefficients))
    changed = [(0, coefficients[0] + more), *terms[1:]]
    assert grade(f"{written(terms)} + y", rf"y + {written(terms[::-1])}") == 1.0
    assert grade(f"{written(terms)} + y", f"y + {written(changed)}") == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "(" * 60 + "x" + ")" * 60, "9^" * 300 + "9", "-" * 999, "x" * 999, "1," * 499, "2^{9999}" * 100, "3000!" * 150,
        "|" * 999,
    ]
    + [r"\sqrt{" * 150, r"\frac{1}{" * 100, "1 " * 499, "a and " * 150, r"\pm 1," * 100, "sin " * 240, "7.(3)" * 190]
    + [
        "((((((((((2^{9999})^{9999})", "1.5 million " * 80, "one hundred and " * 60, "x<" * 490, "{" * 999,
        "[1,2]," * 160,
    ],
)  # fmt: skip
def test_hostile_answers_cost_no_time(answer):
    for gold in ("42", "1, 2", "x + 1", "x > 3", "(1, 2)", r"\{1, 2\}", "y = 2x", "Paris", "B", "yes", "$abc$"):
        started = time.thread_time()
        assert grade(gold, answer) in (None, 0.0)
        assert time.thread_time() - started < 10.0


@pytest.mark.parametrize(("text", "value"), [
    ("one hundred and twenty-three", 123), ("two and a half", Fraction(5, 2)), ("minus two", -2), ("a million", 10**6),
    ("two thousand five hundred one", 2501), ("3 and a half", Fraction(7, 2)), ("zero", 0), ("hundred", 100),
    ("forty apples", None), ("twenty twelve", None), ("one two", None), ("and", None), ("5", None), ("third", None),
    ("forty zero", None), ("five and", None), ("", None),
])  # fmt: skip
def test_number_words_by_hand(text, value):
    assert spelled(text) == value


@pytest.mark.parametrize(
    "text", ["7 8", "1.2.3", "1,2", "12,34", "", "()", r"\frac{1}{", "x2", "52_8", "x'", "+", "the word", "5!!"]
)
def test_a_broken_formula_is_refused(text):
    with pytest.raises(FormulaError):
        read_formula(text)
