r"""The one grading order: which answers of a turn count, and which of them are right. Every row is worked by hand.

The rules are those of docs/grading.md. A row with grade None is an answer that cannot be read, which earns 0.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.envs.math.classes import class_of
from rllib_srl.envs.math.final_answers import graded, read, shown

ASKED = "Tom has 10 apples. He gets 11 more. How many apples has he now?"

NUMBERS = [
    # The answer alone.
    ("21", "21", 1), (" 21. ", "21", 1), ("210", "21", 0), ("2 1", "21", 0), ("-21", "21", 0), ("21", "-21", 0),
    ("-21", "-21", 1), ("\u221221", "-21", 1), ("minus 21", "21", 0), ("minus 21", "-21", 1), ("+21", "21", 1),
    ("", "21", None), ("   \n", "21", None), ("many", "21", None),
    # Marked.
    (r"\boxed{21}", "21", 1), (r"So it is $\boxed{21}$.", "21", 1), (r"\boxed{20}", "21", 0),
    (r"\boxed{x = 21}", "21", 1), (r"\boxed{21\text{ apples}}", "21", 1), ("<answer>21</answer>", "21", 1),
    ("<answer> 21 </answer> done in 3 steps", "21", 1), ("<answer>12</answer>", "21", 0),
    ("10 + 11 = 21\n#### 21", "21", 1), ("#### 22", "21", 0),
    ("#### 1. Add\n10 + 11\n#### 21", "21", 1),  # a heading
    ("The answer is 21.", "21", 1), ("The answer is: 21 apples", "21", 1), ("**Answer:** 21", "21", 1),
    ("The answer is 21 because 3 rows of 7 are there", "21", 1), ("The answer is 3 rows of 7", "21", 0),
    ("The answer is 10 + 11 = 21", "21", 1),
    # Bare: the last number.
    ("10 + 11 equals 21.", "21", 1), ("The sum is 21", "21", 1), ("So he has 21 apples now.", "21", 1),
    ("It is 21!", "21", 1), ("He had 10, so 10 + 11 = 22", "21", 0), ("x = 21", "21", 1), ("21 = 10 + 11", "21", 1),
    ("10 + 11\n21", "21", 1), ("It was 21, and then he ate 3", "21", 0),
    # Two different ones.
    ("I am not sure, 21 or 22", "21", 0), ("I am not sure, 21 or 22", "22", 0), ("21 or maybe 22", "21", 0),
    ("21, perhaps 22", "22", 0), ("19, 20, 21", "21", 0), ("19,20,21", "21", 0), ("20 and 21", "21", 0),
    ("20\n21", "21", 0), ("Answer: 20\nAnswer: 21", "21", 0), ("Answer: 21 Answer: 20", "21", 0),
    ("Answer: 21\nAnswer: 21.0", "21", 1), (r"\boxed{20} or \boxed{21}", "21", 0),
    (r"\boxed{21 \text{ or } 22}", "21", 0), ("<answer>20</answer><answer>21</answer>", "21", 0),
    (r"\boxed{20}" "\n#### 21", "21", 0), (r"\boxed{20}" "\n#### 21", "20", 0), ("#### 20\n#### 21", "21", 0),
    ("<answer>20</answer>\nThe answer is 21", "20", 0),
    ("The answer is 3 less than 24: <answer>21</answer>", "21", 1),  # a phrase in front of a mark is reasoning
    # Rejected, asked, copied, not carried out.
    ("It is not 21", "21", 0), ("It isn't 21.", "21", 0), ("The answer is not 21", "21", 0),
    ("I don't think the answer is 21", "21", 0), ("21 is wrong", "21", 0), ("21 is wrong; the answer is 22", "21", 0),
    ("21 is wrong; the answer is 22", "22", 1), ("It is 21, not 22.", "21", 1), ("It is not 20, it is 21", "21", 1),
    (r"not \boxed{21}", "21", 0), ("Is it 21?", "21", None), (ASKED, "11", None), (ASKED, "10", None),
    (ASKED + " 21", "21", 1), ("10 + 11", "21", None), ("10 plus 11", "11", None), ("3 x 7", "7", None),
    ("42/2", "21", None), (r"\frac{42}{2}", "21", None), ("2^10", "1024", None), ("Not 21 but 22", "22", 1),
    ("It is neither 20 nor 21", "21", 0), ("The answer isn't 20, it's 21", "21", 1),
    ("21 is definitely not the answer", "21", 0), ("21 cannot be right", "21", 0), ("anything but 21", "21", 0),
    ("The wrong answer is 21", "21", 0), ("I was wrong; the answer is 21", "21", 1), ("21 (not 22)", "21", 1),
    ("It is between 20 and 21", "21", 0), ("20-21", "21", None),
    # Units, separators, other digits; more in test_grading_pairs.py.
    ("5", "5 apples", 1), ("15 apples", "5 apples", 0), ("21 percent", "0.21", 1), ("21", "0.21", 0), ("$21", "21", 1),
    (r"$-\frac{1}{2}$", "0.5", 0), (r"-2\frac{1}{2}", "-2.5", 1), ("21 million", "21", 0), ("2 dozen", "2", None),
    ("21 hours and 30 minutes", "21", 0), (r"\approx 21", "21", 1), ("21,000", "21", 0), ("\u2014 21", "21", 1),
    ("between 1 and 1000", "21", 0), ("21x", "21", None), ("x21", "21", None), ("the 21st", "21", None),
    ("it is > 21", "21", None), ("3:21", "21", None), ("\u0662\u0661", "21", None), ("\uff12\uff11", "21", None),
    ("21\u00b2", "21", None),
]  # fmt: skip
SYMBOLS = [
    (r"So it is $2\pi$.", "6.283185", 1), (r"\pm 21", "21", 0), ("So we get $2x + 3$.", "2x+3", 1),
    ("the result is 2x+3", "2x+3", 1), ("The answer is 2x + 3. It was easy.", "2x+3", 1),
    ("It is $2x+3$ or $2x+4$", "2x+3", 0), ("It is $2x+4$ or $2x+3$", "2x+3", 0), ("2x+3 or 2x+4", "2x+3", 0),
    ("It is not $2x+3$", "2x+3", 0), ("yx", "$xy$", 1), ("yx", "xy", 0),
]  # fmt: skip
WORDS = [
    ("Paris", "Paris", 1), ("paris.", "Paris", 1), ("**Paris**", "Paris", 1), (r"\boxed{\text{Paris}}", "Paris", 1),
    ("<answer>Paris</answer>", "Paris", 1), ("I know.\nParis", "Paris", 1),
    ("The answer is Paris. It is on the Seine.", "Paris", 1), ("Answer: St. Louis", "St. Louis", 1),
    ("The capital is Paris", "Paris", 0), ("Paris, Texas", "Paris", 0), ("Paris or Rome", "Paris", 0),
    ("Answer: Rome\nAnswer: Paris", "Paris", 0), ("Answer: not Paris", "Paris", 0), ("Parisian", "Paris", 0),
    ("I do not know", "no", 0), ("No.", "no", 1), ("on", "no", 0), ("post", "stop", 0), ("silent", "listen", 0),
    ("not guilty", "not guilty", 1), ("guilty", "not guilty", 0), ("May 21", "June 21", 0), ("21", "June 21", 0),
    ("June 21", "June 21", 1), ("2018", "2024-01-05", 0), ("", "Paris", None),
]  # fmt: skip
CHOICES = [
    ("B", "B", 1), ("(B) Paris", "B", 1), ("I think it is B.", "B", 1), ("The answer is (B).", "B", 1), ("C", "B", 0),
    ("A or B", "B", 0), ("B, or A", "B", 0), ("It is not B", "B", 0), ("A quick look says B", "B", 1),
    ("Banana", "B", None),
]  # fmt: skip


@pytest.mark.parametrize(("turn", "gold", "expected"), NUMBERS + WORDS + CHOICES)
def test_answers_by_hand(turn, gold, expected):
    assert graded(gold, turn, question=ASKED).grade == expected


@pytest.mark.parametrize(("turn", "gold", "expected"), SYMBOLS)
def test_formulas_by_hand(turn, gold, expected):
    assert graded(gold, turn, deadline_s=20.0).grade == expected


def rows_of_the_docs():
    """Return (turn, right answer, what it earns) of each example in the table "What is right"."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "grading.md").read_text(encoding="utf-8")
    rows = []
    for line in page.partition("## What is right")[2].splitlines():
        cells = [re.findall("`([^`]+)`", cell) for cell in line.strip("| ").split(" | ")]
        if len(cells) == 4 and len(cells[1]) == 1:
            rows += [(turn, cells[1][0], earned) for earned, column in ((1.0, 2), (0.0, 3)) for turn in cells[column]]
    return rows


def test_the_docs_say_what_is_done():
    rows = rows_of_the_docs()
    assert len(rows) >= 60
    found = [(turn, gold, graded(gold, turn, deadline_s=20.0).grade or 0.0) for turn, gold, _ in rows]
    assert found == rows


@pytest.mark.parametrize(("gold", "name"), [
    ("21", "number"), ("$1,234", "number"), ("50%", "number"), ("1/2", "number"), ("5 apples", "number"),
    ("forty-two", "number"), ("2.4 million", "number"), (r"35\text{ cm}^2", "number"), ("12 Main Street", "word"),
    ("52_8", "base"), ("3:2", "ratio"), ("3:30", "time"), ("7 pm", "time"), ("2x", "expression"),
    ("x", "expression"), ("xy", "word"), ("$xy$", "product"), (r"\boxed{xy}", "product"),
    (r"\boxed{\text{east}}", "word"), (r"\sqrt{2}", "expression"), (r"10 \cdot 7", "expression"),
    ("sin(x)", "expression"), ("pi", "expression"), ("(1,2)", "bracket"), ("[1, 2)", "bracket"),
    (r"\{1, 2\}", "set"), (r"\emptyset", "set"), ("1, 2", "list"), ("x = 2 or x = 3", "list"), (r"\pm 2", "list"),
    ("A, C", "list"), ("x < 1 or x > 3", "union"), ("x > 3", "relation"), ("y = 2x", "relation"),
    (r"\{x : x > 3\}", "relation"), (r"\int_0^1 x\,dx", "formula"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "formula"), ("Paris", "word"), ("red and blue", "word"),
    ("no", "yes or no"), ("June 21", "word"), ("COVID-19", "word"), ("2024-01-05", "word"), ("B", "choice"),
    ("(B)", "choice"),
])  # fmt: skip
def test_classes_by_hand(gold, name):
    assert class_of(gold) == name
    assert [class_of(gold, kind) for kind in ("number", "text", "choice")] == ["number", "word", "choice"]


def test_what_was_read_is_told():
    assert shown(read("It is 20 or\n 21", "number").answers) == "20 | 21"
    assert read("It is not 21", "number").is_rejected
    assert read("#### 21", "number", "boxed").marker == "hashes"
    assert read(r"#### 20 \boxed{21}", "number", "hashes").marker == "hashes"
    assert shown(()) == ""


@settings(max_examples=30)
@given(st.text(max_size=60))
def test_whatever_is_graded_ends_in_a_grade(text):
    assert graded("21", text, kind="number").grade in (None, 0.0, 1.0)
    assert graded("Paris", text).grade in (None, 0.0, 1.0)


@pytest.mark.parametrize(
    "piece",
    ["7", "7 ", "7,", "not 7 ", "7 or ", r"\boxed{", r"\boxed{7}", "<answer>", "<answer>7</answer>", "#### 7\n", "####"]
    + ["answer is ", "answer: 7\n", " ", "$", "7?", "{", "*", "n't ", "A, ", "7/", "- 7"],
)
def test_reading_takes_time_in_proportion_to_the_text(piece):
    start = time.thread_time()
    for sort in ("number", "list", "word", "choice"):
        read(piece * (200_000 // len(piece)), sort)
    assert time.thread_time() - start < 10.0  # of a tenth of a second; its square is minutes
