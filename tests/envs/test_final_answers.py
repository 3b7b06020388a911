r"""The one grading order: which answers of a turn count, and which of them are right. Every row is worked by hand:

    (gold, turns that are right, turns that are wrong, turns that cannot be read, which earn 0)

The rules are those of docs/grading.md.
"""

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.envs.math.final_answers import graded, read

ASKED = "Tom has 10 apples. He gets 11 more. How many apples has he now?"

NUMBERS = [
    # The answer alone.
    ("21", ["21", " 21. ", "+21"], ["210", "2 1", "-21", "minus 21"], ["", "   \n", "many"]),
    ("-21", ["-21", "\u221221", "minus 21"], ["21"]),
    # Marked.
    ("21", [r"\boxed{21}", r"So it is $\boxed{21}$.", r"\boxed{x = 21}", r"\boxed{21\text{ apples}}",
     "<answer>21</answer>", "<answer> 21 </answer> done in 3 steps", "10 + 11 = 21\n#### 21",
     "#### 1. Add\n10 + 11\n#### 21", "The answer is 21.", "The answer is: 21 apples", "**Answer:** 21",
     "The answer is 21 because 3 rows of 7 are there", "The answer is 10 + 11 = 21"], [r"\boxed{20}",
     "<answer>12</answer>", "#### 22", "The answer is 3 rows of 7"]),
    # Bare: the last number.
    ("21", ["10 + 11 equals 21.", "The sum is 21", "So he has 21 apples now.", "It is 21!", "x = 21", "21 = 10 + 11",
     "10 + 11\n21"], ["He had 10, so 10 + 11 = 22", "It was 21, and then he ate 3"]),
    # Two different ones.
    ("21", ["Answer: 21\nAnswer: 21.0", "The answer is 3 less than 24: <answer>21</answer>"],
     ["I am not sure, 21 or 22", "21 or maybe 22", "19, 20, 21", "19,20,21", "20 and 21", "20\n21",
     "Answer: 20\nAnswer: 21", "Answer: 21 Answer: 20", r"\boxed{20} or \boxed{21}", r"\boxed{21 \text{ or } 22}",
     "<answer>20</answer><answer>21</answer>", r"\boxed{20}" "\n#### 21", "#### 20\n#### 21"]),
    ("22", [], ["I am not sure, 21 or 22", "21, perhaps 22"]),
    ("20", [], [r"\boxed{20}" "\n#### 21", "<answer>20</answer>\nThe answer is 21"]),
    # Rejected, asked, copied, not carried out.
    ("21", ["It is 21, not 22.", "It is not 20, it is 21", ASKED + " 21", "The answer isn't 20, it's 21",
     "I was wrong; the answer is 21", "21 (not 22)"], ["It is not 21", "It isn't 21.", "The answer is not 21",
     "I don't think the answer is 21", "21 is wrong", "21 is wrong; the answer is 22", r"not \boxed{21}",
     "It is neither 20 nor 21", "21 is definitely not the answer", "21 cannot be right", "anything but 21",
     "The wrong answer is 21", "It is between 20 and 21"], ["Is it 21?", "10 + 11", "42/2", r"\frac{42}{2}", "20-21"]),
    ("22", ["21 is wrong; the answer is 22", "Not 21 but 22"], []), ("11", [], [], [ASKED, "10 plus 11"]),
    ("10", [], [], [ASKED]), ("7", [], [], ["3 x 7"]), ("1024", [], [], ["2^10"]),
    # Units, separators, other digits; more in test_grading_pairs.py.
    ("5 apples", ["5"], ["15 apples"]), ("0.21", ["21 percent"], ["21"]),
    ("21", ["$21", r"\approx 21", "\u2014 21"], ["21 million", "21 hours and 30 minutes", "21,000",
     "between 1 and 1000"], ["21x", "x21", "the 21st", "it is > 21", "3:21", "\u0662\u0661", "\uff12\uff11",
     "21\u00b2"]),
    ("0.5", [], [r"$-\frac{1}{2}$"]), ("-2.5", [r"-2\frac{1}{2}"], []), ("2", [], [], ["2 dozen"]),
]  # fmt: skip
SYMBOLS = [
    ("6.283185", [r"So it is $2\pi$."], []), ("21", [], [r"\pm 21"]),
    ("2x+3", ["So we get $2x + 3$.", "the result is 2x+3", "The answer is 2x + 3. It was easy."],
     ["It is $2x+3$ or $2x+4$", "It is $2x+4$ or $2x+3$", "2x+3 or 2x+4", "It is not $2x+3$"]),
    ("$xy$", ["yx"], []), ("xy", [], ["yx"]),
]  # fmt: skip
WORDS = [
    ("Paris", ["Paris", "paris.", "**Paris**", r"\boxed{\text{Paris}}", "<answer>Paris</answer>", "I know.\nParis",
     "The answer is Paris. It is on the Seine."], ["The capital is Paris", "Paris, Texas", "Paris or Rome",
     "Answer: Rome\nAnswer: Paris", "Answer: not Paris", "Parisian"], [""]),
    ("St. Louis", ["Answer: St. Louis"], []), ("no", ["No."], ["I do not know", "on"]), ("stop", [], ["post"]),
    ("listen", [], ["silent"]), ("not guilty", ["not guilty"], ["guilty"]), ("June 21", ["June 21"], ["May 21", "21"]),
    ("2024-01-05", [], ["2018"]),
]  # fmt: skip
CHOICES = [
    ("B", ["B", "(B) Paris", "I think it is B.", "The answer is (B).", "A quick look says B"], ["C", "A or B",
     "B, or A", "It is not B"], ["Banana"]),
]  # fmt: skip


@pytest.mark.parametrize("table", [NUMBERS, WORDS, CHOICES, SYMBOLS], ids=["numbers", "words", "choices", "formulas"])
def test_answers_by_hand(table):
    expected = [
        (gold, turn, grade) for gold, *lists in table for grade, turns in zip((1, 0, None), lists) for turn in turns
    ]
    found = [(gold, turn, graded(gold, turn, question=ASKED, deadline_s=20.0).grade) for gold, turn, _ in expected]
    assert found == expected


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
