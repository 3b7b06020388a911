"""Rows as data sets, databases and exports have them: question, answer and what the answer earns; and broken ones."""

import json
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.envs.math.data_files import RowError
from rllib_srl.envs.math.final_answers import graded
from rllib_srl.envs.math.question_rows import Problem, problem_of

ARC = {"id": "Mercury_7175875", "question": "Which is a gas?", "answerKey": "B"}
ARC["choices"] = {"text": ["iron", "helium", "salt"], "label": ["A", "B", "C"]}
SAID = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
GSM8K = {
    "question": "A robe takes 2 bolts of blue fiber and half that much white fiber.  How many bolts does it take?",
    "answer": "It takes 2/2=<<2/2=1>>1 bolt of white\nSo the total is 2+1=<<2+1=3>>3 bolts\n#### 3",
}
MATH = {
    "problem": "Expand $(x+1)^2$.",
    "level": "Level 1",
    "type": "Algebra",
    "solution": r"We have $(x+1)(x+1)$, so $\boxed{x^2+2x+1}$.",
}
AIME = {"ID": "2024-I-1", "Problem": "Find $m+n$.", "Solution": r"It is \boxed{204}.", "Answer": 204}
CHAMP = {
    "identifier": "P_1", "_raw_text": "How many of @@{1, 2, 3}@@?", "_text": "How many of {1, 2, 3}?",
    "category": "Combinatorics",
    "solution": {"steps": [{"_raw_text": "@@a@@", "_text": "a"}, {"_raw_text": "b", "_text": "b"}]},
    "_raw_answer": "@@239@@", "_answer": "239",
}  # fmt: skip
LAYOUTS = [
    (GSM8K, Problem(GSM8K["question"], "3", "It takes 2/2=1 bolt of white\nSo the total is 2+1=3 bolts")),
    (MATH, Problem(MATH["problem"], "x^2+2x+1", MATH["solution"])),
    (AIME, Problem("Find $m+n$.", "204", r"It is \boxed{204}.")),
    (CHAMP, Problem("How many of {1, 2, 3}?", "239", "a\nb")),
    ({"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}, Problem("2+2?", "4")),
    ({"messages": [*SAID, {"role": "assistant", "content": "The answer is 4."}]},
     Problem("2 + 2?", "4.", "The answer is 4.", system="Be short.")),
    ({"prompt": [{"role": "user", "content": "2+2?"}], "answer": 4.0}, Problem("2+2?", "4")),
    ({"question": "q", "answer": 0.5, "solution": None}, Problem("q", "0.5")),
]  # fmt: skip


def test_layouts_by_hand() -> None:
    for row, expected in LAYOUTS:
        assert problem_of(row) == expected


NUMBERED = {**ARC, "choices": {**ARC["choices"], "label": ["1", "2", "3"]}}
# letter -> rows; "Which?" is asked where nothing is
CHOICES = {
    "A": [{"options": "['x', 'y']", "answer": "0"}],
    "B": [
        ARC, {**NUMBERED, "answerKey": "2"}, {**NUMBERED, "answerKey": 2},  # a label, no position
        {"choices": ["x", "y", "z"], "answer": 1}, {"choices": ["x", "y", "z"], "answer": "1"},
        {"options": ["x", "y"], "answer": "(B)"}, {"options": {"A": "x", "B": "y"}, "answer_idx": "B"},
        {"options": ["x", "y"], "correct": "B"}, {"options": '["x", "y"]', "answer": "y"},
        {"A": "x", "B": "y", "answer": "B"}, {"choices": ["x", "y"], "answer": "['B']"},
        {"choices": ["x", "y"], "answer": ["B"]}, {"choices": ["x", "y"], "answer": "B. y"},
        {"choices": ["A) x", "B) y"], "correct": "B"}, {"choices": ["No", "Yes"], "answer": True},
        {"choices": ["true", "false"], "answer": False}, {"choices": ["x", "y"], "answer": "Y"},
        {"options": {"A": "x", "B": "y", "C": "z", "D": None, "E": None}, "answer": "B"},  # as Parquet has them
        {"options": ["x", "y", None], "answer": 1}, {"options": [("A", "x"), ("B", "y"), ("C", None)], "answer": "B"},
        {"choices": {"text": ["x", "y", None], "label": ["1", "2", None]}, "answer": "2"},
        *({**columns, "answer": answer} for answer in ("b", "1", 1, "y", "(B)", "B.", "B")
          for columns in ({"A": "x", "B": "y", "C": None}, {"option_a": "x", "option_b": "y"})),
        {"a": "x", "b": "y", "answer": "(b)"},
    ],
    "C": [
        {"question_stem": "Which?", "choices": ARC["choices"], "answerKey": "C"},
        {"choices": ["3", "2", "1"], "answer": "1"},  # the text of one comes before a position
        {"choices": ["x", "y", "z"], "answer": "2.0"}, {"choices": ["x", "y", "z"], "answer": 2.0},
    ],
}  # fmt: skip


def test_choices_of_every_form_have_a_letter() -> None:
    for letter, row in ((letter, row) for letter, rows in CHOICES.items() for row in rows):
        problem = problem_of(row if "question_stem" in row else {"question": "Which?", **row})
        assert (problem.answer, problem.is_choice) == (letter, True), row
        assert "\nA. " in problem.question and "\nB. " in problem.question and ")" not in problem.question
    assert problem_of(ARC).question == "Which is a gas?\nA. iron\nB. helium\nC. salt"
    truth = problem_of({"question": "Which?", "A": "x", "B": "y", "truth": "y", "answer": "A"}, answer_field="truth")
    assert truth.answer == "B"


def test_columns_named_by_letters_that_may_be_no_choices_are_not_shown_and_noted() -> None:
    for columns, answer, note in (
        ({"a": 3, "b": 4}, "7", None),  # numbers that the question names
        ({"a": 3, "b": 4}, "4", "has the columns a, b, which are not shown as choices: name them A, B if they are"),
        ({"A": "x", "B": "y"}, "z", "has the columns A, B, which are not shown as choices: the answer is none of them"),
        ({"A": "x", "B": "y"}, "C", "has the columns A, B, which are not shown as choices: the answer is none of them"),
        ({"A": "x", "B": None, "C": "z"}, "C", "has the columns A, B, C, which are not shown as choices: B is empty"),
    ):
        problem = problem_of({"question": "q", **columns, "answer": answer})
        assert (problem.question, problem.answer, problem.is_choice) == ("q", answer, False)
        assert problem.notes == ((note,) if note else ())


# row, its answer, a turn that earns 1, one that earns 0
ANSWERS = [
    ({"question": "q?", "final_answer": ["2"], "solution": ["So it is 2."]}, "2", "2", "3"),
    ({"question": "q?", "final_answer": ["$\\frac{1}{2}$"]}, "$\\frac{1}{2}$", "0.5", "2"),
    ({"question": "q?", "final_answer": ["2", "3"]}, "2, 3", "3 and 2", "2"),
    ({"question": "q?", "answer": "TRUE"}, "TRUE", "yes", "no"),
    ({"question": "q?", "answer": "['2']"}, "2", "2", "3"),
    ({"question": "q?", "answer": '["2"]'}, "2", "2", "3"),
    ({"question": "is it?", "answer": True}, "yes", "Yes.", "no"),
    ({"question": "is it?", "answer": False}, "no", "No.", "yes"),
    ({"question": "is it?", "answer": "True"}, "True", "yes", "no"),
    ({"question": "q?", "answer": [True]}, "yes", "yes", "no"),
    ({"question": "q?", "answer": Decimal("12.50")}, "12.5", "12.50", "12.6"),
    ({"question": "q?", "answer": Decimal("3.00")}, "3", "3", "300"),
    ({"question": "q?", "answer": Decimal("1E+3")}, "1000", "1000", "1"),
    *(({"problem": "q?", "solution": r"So $\boxed{7}$.", "answer": empty}, "7", "7", "8")
      for empty in ("", "  ", [], float("nan"), "notfound")),
    ({"problem": "q?", "answer": "", "final_answer": "7"}, "7", "7", "8"),
    ({"problem": "q?", "solution": r"Hence it is \boxed 2 in all."}, "2", "2", "3"),
    ({"problem": "q?", "solution": r"Hence $x = \boxed 12$."}, "12", "12", "1"),
    ({"problem": "q?", "solution": r"Hence $\boxed\frac12$."}, r"\frac12", "0.5", "12"),
    ({"problem": "q?", "solution": r"so \boxed{3} and \boxed{5}"}, "3, 5", "3, 5", "5"),
    ({"problem": "q?", "solution": r"$x = \boxed{3}$ or $\boxed{5}$"}, "3, 5", "5, 3", "5"),
    ({"problem": "q?", "solution": r"\boxed{5}, that is \boxed{5}"}, "5", "5", "3"),
]  # fmt: skip


def test_answers_of_every_form_are_read_and_graded() -> None:
    for row, answer, right, wrong in ANSWERS:
        problem = problem_of(row)
        assert (problem.answer, problem.notes) == (answer, ()), row
        assert [graded(answer, turn, deadline_s=20.0).grade for turn in (right, wrong)] == [1.0, 0.0], row


# row, question, answer
FORMS = [
    ({"question": {"stem": "q", "choices": [{"label": "A", "text": "x"}, {"label": "B", "text": "y"}]},
      "answerKey": "B"}, "q\nA. x\nB. y", "B"),
    ({"question": "q", "option_a": "x", "option_b": "y", "answer": "B"}, "q\nA. x\nB. y", "B"),
    ({"prompt": SAID, "completion": [{"role": "assistant", "content": "#### 4"}]}, "2 + 2?", "4"),
    ({"messages": {"role": ["system", "user"], "content": ["Be short.", "2 + 2?"]}, "answer": 4}, "2 + 2?", "4"),
    ({"prompt": SAID[1], "answer": "4"}, "2 + 2?", "4"),
    ({"prompt": json.dumps(SAID[1]), "answer": "4"}, "2 + 2?", "4"),
    ({"prompt": [SAID], "answer": "4"}, "2 + 2?", "4"),
    ({"prompt": [{"role": "User", "content": {"type": "text", "text": "2 + 2?"}}], "answer": "4"}, "2 + 2?", "4"),
    ({"question": "q", "answer": r"So it is \boxed{5}."}, "q", "5"),
    ({"question": "q", "answer": r"<think>\boxed{4}?</think>So it is \boxed{5}."}, "q", "5"),
    ({"question": "q", "answer": "N/A", "solution": r"So it is \boxed{5}."}, "q", "5"),
    ({"question": "q", "answer": "none", "solution": "There are none."}, "q", "none"),
    ({"question": "is it wet", "title": "Water", "answer": True, "passage": "Water is wet."},
     "Water is wet.\nis it wet", "yes"),  # BoolQ
    ({"Body": "Ann has 3 pens and buys 2.", "Question": "How many has she?", "Answer": 5.0},
     "Ann has 3 pens and buys 2.\nHow many has she?", "5"),  # SVAMP
]  # fmt: skip


def test_further_forms_of_questions_and_answers() -> None:
    for row, question, answer in FORMS:
        problem = problem_of(row)
        assert (problem.question, problem.answer, problem.notes) == (question, answer, ()), row
    placed = problem_of({"question": "is it", "answer": True, "passage": "It is."}, others=("passage",))
    assert (placed.question, dict(placed.fields)) == ("is it", {"passage": "It is."})


PROMPTS = [
    SAID,
    [SAID[0], {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]}],
    [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in SAID],
    json.dumps(SAID),
    str(SAID),  # as pandas writes it
    [{"role": "developer", "content": "Be short."}, SAID[1]],
    [{"from": "system", "value": "Be short."}, {"from": "human", "value": "2 + 2?"}],
]


def test_messages_of_every_form_are_the_same_prompt_and_doubtful_columns_a_warning() -> None:
    for prompt in PROMPTS:
        problem = problem_of({"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "4"}})
        assert (problem.question, problem.system, problem.answer) == ("2 + 2?", "Be short.", "4"), prompt
    problem = problem_of({"question": "q", "Answer": "3", "answer": "2"})
    assert problem.answer == "2"
    assert problem.notes == ("has columns that differ only in case or blanks, 'Answer', 'answer': 'answer' counts",)


BROKEN = [
    ([1], "field '(row)' is of type list; expected an object"),
    ({"q": "x", "answer": "1"}, "field 'question' is missing; the row has q, answer"),
    ({"question": "", "answer": "1"}, "field 'question' is empty; expected text"),
    ({"question": 5, "answer": ["1", "2"]}, "field 'answer' = ['1', '2']; expected text or a number, or a list of"),
    ({"question": "q", "answer": {"value": 1}}, "field 'answer' = {'value': 1}; expected text or a number"),
    ({"question": "q"}, "field 'answer' is missing, and there is no solution; the row has question"),
    ({"question": "q", "answer": "so\n####"}, "field 'answer' has nothing after '####'"),
    ({"problem": "q", "solution": "It is hard."}, "field 'solution' states no answer; expected \\boxed{...}"),
    ({"problem": "q", "solution": {"steps": [1]}}, "field 'solution' = {'steps': [1]}; expected text"),
    ({"question": "q", "answer": "\ud800"}, "field 'answer' contains a lone surrogate"),
    ({"question": "q", "choices": ["a"], "answer": 0}, "field 'choices' = ['a']; expected a list of 2 to 10 texts"),
    ({"question": "q", "choices": "ab", "answer": 0}, "field 'choices' = 'ab'; expected a list"),
    ({"question": "q", "choices": ["a", "b"], "answer": 2}, "field 'answer' = 2; expected one of the 2 choices"),
    ({"question": "q", "answer": float("nan")}, "field 'answer' = nan; expected a finite number"),
    ({"messages": [{"role": "user"}], "answer": "1"}, "field 'messages' has the message {'role': 'user'}"),
    ({"messages": [], "answer": "1"}, "field 'messages' is empty"),
    ({"prompt": "[{'role': 'user', 'content': 'x'}\n {'role': 'user'}]", "answer": "4"},
     "looks like a list of messages but is not JSON; exp"),
    ({"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "answer": "4"},
     "a part of type 'image_url'; expec"),
]  # fmt: skip


def test_a_broken_row_names_its_field() -> None:
    for row, message in BROKEN:
        with pytest.raises(RowError) as caught:
            problem_of(row)
        assert message in str(caught.value), row


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["question", "messages", "answer", "solution", "choices", "role", "content", "text", "label"])

HELD = PLAIN | st.dictionaries(NAMES, PLAIN) | st.lists(st.dictionaries(NAMES, PLAIN), max_size=3)


@settings(max_examples=30)
@given(st.dictionaries(NAMES, HELD, max_size=5))
def test_any_row_is_a_problem_or_an_error(row):
    try:
        problem = problem_of(row)
    except RowError:
        return
    assert problem.question and problem.answer
