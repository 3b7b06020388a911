"""Rows in the forms of published data sets, databases and exports: question, answer and what the answer earns."""

from __future__ import annotations

import json
from decimal import Decimal

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from rllib_srl.algorithm.own_data import data_settings
from rllib_srl.envs.math.data_files import RowFault
from rllib_srl.envs.math.question_file import QuestionFile
from rllib_srl.envs.math.question_rows import problem_of
from rllib_srl.rollout import ChatTranscript
from rllib_srl.rollout.player import first_ids
from rllib_srl.rollout.replies import reset
from rllib_srl.types import Prompt
from tests.rollout.fakes import CHATML, make_tokenizer

ARC = {"id": "Mercury_7175875", "question": "Which is a gas?", "answerKey": "B"}
ARC["choices"] = {"text": ["iron", "helium", "salt"], "label": ["A", "B", "C"]}
SAID = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]


def world_of(tmp_path, rows, **settings) -> QuestionFile:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return QuestionFile({"path": str(path), "num_shots": 0, **settings})


def reward_of(world, turn: str) -> float:
    world.reset(options={"prompt_id": world._ids[0]})
    return world.step(f" {turn}\n")[1]


@pytest.mark.parametrize(("row", "letter"), [
    (ARC, "B"),
    ({**ARC, "answerKey": "2", "choices": {**ARC["choices"], "label": ["1", "2", "3"]}}, "B"),
    ({**ARC, "answerKey": 2, "choices": {**ARC["choices"], "label": ["1", "2", "3"]}}, "B"),  # a label, no position
    ({"question_stem": "Which?", "choices": ARC["choices"], "answerKey": "C"}, "C"),
    ({"question": "Which?", "choices": ["x", "y", "z"], "answer": 1}, "B"),
    ({"question": "Which?", "choices": ["x", "y", "z"], "answer": "1"}, "B"),
    ({"question": "Which?", "choices": ["3", "2", "1"], "answer": "1"}, "C"),  # the text of one comes first
    ({"question": "Which?", "options": ["x", "y"], "answer": "(B)"}, "B"),
    ({"question": "Which?", "options": {"A": "x", "B": "y"}, "answer_idx": "B"}, "B"),
    ({"question": "Which?", "options": ["x", "y"], "correct": "B"}, "B"),
    ({"question": "Which?", "options": '["x", "y"]', "answer": "y"}, "B"),
    ({"question": "Which?", "options": "['x', 'y']", "answer": "0"}, "A"),
    ({"question": "Which?", "A": "x", "B": "y", "answer": "B"}, "B"),
    ({"question": "Which?", "choices": ["x", "y", "z"], "answer": "2.0"}, "C"),
    ({"question": "Which?", "choices": ["x", "y", "z"], "answer": 2.0}, "C"),
    ({"question": "Which?", "choices": ["x", "y"], "answer": "['B']"}, "B"),
    ({"question": "Which?", "choices": ["x", "y"], "answer": ["B"]}, "B"),
    ({"question": "Which?", "choices": ["x", "y"], "answer": "B. y"}, "B"),
    ({"question": "Which?", "choices": ["A) x", "B) y"], "correct": "B"}, "B"),
    ({"question": "Which?", "choices": ["No", "Yes"], "answer": True}, "B"),
    ({"question": "Which?", "choices": ["true", "false"], "answer": False}, "B"),
    ({"question": "Which?", "choices": ["x", "y"], "answer": "Y"}, "B"),
], ids=str)  # fmt: skip
def test_choices_of_every_form_have_a_letter(row, letter) -> None:
    problem = problem_of(row)
    assert (problem.answer, problem.is_choice) == (letter, True)
    assert "\nA. " in problem.question and "\nB. " in problem.question and ")" not in problem.question


def test_arc_is_graded_without_settings(tmp_path) -> None:
    world = world_of(tmp_path, [ARC])
    assert world.question(world._ids[0]).text == "Which is a gas?\nA. iron\nB. helium\nC. salt"
    assert [reward_of(world, turn) for turn in ("B", "The answer is B.", "A")] == [1.0, 1.0, 0.0]


def test_numbers_named_a_and_b_are_not_choices() -> None:
    assert problem_of({"question": "3 + 4?", "a": 3, "b": 4, "answer": "7"}).answer == "7"


@pytest.mark.parametrize(("row", "answer", "right", "wrong"), [
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
    ({"problem": "q?", "solution": r"So $\boxed{7}$.", "answer": ""}, "7", "7", "8"),
    ({"problem": "q?", "solution": r"So $\boxed{7}$.", "answer": "  "}, "7", "7", "8"),
    ({"problem": "q?", "solution": r"So $\boxed{7}$.", "answer": []}, "7", "7", "8"),
    ({"problem": "q?", "solution": r"So $\boxed{7}$.", "answer": float("nan")}, "7", "7", "8"),
    ({"problem": "q?", "solution": r"So $\boxed{7}$.", "answer": "notfound"}, "7", "7", "8"),
    ({"problem": "q?", "answer": "", "final_answer": "7"}, "7", "7", "8"),
    ({"problem": "q?", "solution": r"Hence it is \boxed 2 in all."}, "2", "2", "3"),
    ({"problem": "q?", "solution": r"Hence $x = \boxed 12$."}, "12", "12", "1"),
    ({"problem": "q?", "solution": r"Hence $\boxed\frac12$."}, r"\frac12", "0.5", "12"),
    ({"problem": "q?", "solution": r"so \boxed{3} and \boxed{5}"}, "3, 5", "3, 5", "5"),
    ({"problem": "q?", "solution": r"$x = \boxed{3}$ or $\boxed{5}$"}, "3, 5", "5, 3", "5"),
    ({"problem": "q?", "solution": r"\boxed{5}, that is \boxed{5}"}, "5", "5", "3"),
], ids=str)  # fmt: skip
def test_answers_of_every_form_are_read_and_graded(row, answer, right, wrong, tmp_path) -> None:
    problem = problem_of(row)
    assert (problem.answer, problem.notes) == (answer, ())
    world = world_of(tmp_path, [{"question": "q?", "answer": problem.answer}])
    assert (reward_of(world, right), reward_of(world, wrong)) == (1.0, 0.0)


def test_a_solution_with_two_boxes_is_a_warning_that_is_counted(tmp_path) -> None:
    rows = [{"problem": "Which is it?", "solution": r"Perhaps \boxed{4}. No, it is \boxed{5}."}]
    world = world_of(tmp_path, rows)
    assert world.data_question(world._ids[0]) == ("Which is it?", "5")
    assert world.row_notes == ["row 1 has 2 boxes in its solution, such as '4' and '5', and the last one counts"]


def test_boolq_and_svamp_are_read_with_their_texts() -> None:
    boolq = problem_of({"question": "is it wet", "title": "Water", "answer": True, "passage": "Water is wet."})
    assert (boolq.question, boolq.answer) == ("Water is wet.\nis it wet", "yes")
    svamp = problem_of({"Body": "Ann has 3 pens and buys 2.", "Question": "How many has she?", "Answer": 5.0})
    assert (svamp.question, svamp.answer) == ("Ann has 3 pens and buys 2.\nHow many has she?", "5")
    placed = problem_of({"question": "is it", "answer": True, "passage": "It is."}, others=("passage",))
    assert (placed.question, dict(placed.fields)) == ("is it", {"passage": "It is."})


def test_decimals_of_a_database_arrive_by_file_and_by_object(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RLLIB_SRL_CACHE", str(tmp_path))
    rows = [{"question": f"{n}?", "answer": Decimal(n) / 4} for n in range(1, 5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    expected = {"1?": "0.25", "2?": "0.5", "3?": "0.75", "4?": "1"}
    for place in ({"path": str(tmp_path / "t.parquet")}, data_settings(rows), data_settings(pandas.DataFrame(rows))):
        world = QuestionFile({**place, "num_shots": 0})
        assert dict(map(world.data_question, world._ids)) == expected


@pytest.mark.parametrize("prompt", [
    SAID,
    [SAID[0], {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]}],
    [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in SAID],
    json.dumps(SAID),
    str(SAID),  # as pandas writes it
    [{"role": "developer", "content": "Be short."}, SAID[1]],
    [{"from": "system", "value": "Be short."}, {"from": "human", "value": "2 + 2?"}],
], ids=str)  # fmt: skip
def test_messages_of_every_form_are_the_same_prompt(prompt, tmp_path) -> None:
    row = {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "4"}}
    problem = problem_of(row)
    assert (problem.question, problem.system, problem.answer) == ("2 + 2?", "Be short.", "4")
    world = world_of(tmp_path, [row])
    assert reward_of(world, "4") == 1.0


@pytest.mark.parametrize(("prompt", "message"), [
    ("[{'role': 'user', 'content': 'x'}\n {'role': 'user'}]", "looks like a list of messages but is not JSON; exp"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "a part of type 'image_url'; expec"),
])  # fmt: skip
def test_what_looks_like_messages_is_never_the_question(prompt, message) -> None:
    with pytest.raises(RowFault, match=message):
        problem_of({"prompt": prompt, "answer": "4"})


def test_an_earlier_turn_of_the_assistant_is_history(tmp_path) -> None:
    turns = [*SAID, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And one more?"}]
    world = world_of(tmp_path, [{"messages": [*turns, {"role": "assistant", "content": "It is #### 5"}]}])
    (prompt_id,) = world._ids
    assert world.question(prompt_id).answer == "5"
    said = reset(world, Prompt("question_file", prompt_id))
    assert said.observation == "User: 2 + 2?\nAssistant: 4\nUser: And one more?\nAssistant:"
    assert [dict(one) for one in said.messages] == turns[1:] and said.system == "Be short."
    tokenizer = make_tokenizer(chat_template=CHATML, with_bos=False)
    assert tokenizer.decode(first_ids(ChatTranscript(tokenizer), said)) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nAnd one more?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [reward_of(world, turn) for turn in ("5", "4")] == [1.0, 0.0]


def test_instruction_and_template_of_a_prompt_with_history(tmp_path) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    world = world_of(
        tmp_path, [{"messages": turns, "answer": "5"}], instruction="Think.", prompt_template="Q: {question}"
    )
    said = reset(world, Prompt("question_file", world._ids[0]))
    assert [one["content"] for one in said.messages] == ["Think.\n\na", "b", "Q: c"]
    plain = world_of(tmp_path, [{"messages": turns[2:], "answer": "5"}])
    assert reset(plain, Prompt("question_file", plain._ids[0])).messages == ()


def test_a_template_that_refuses_the_turns_is_named() -> None:
    strict = (
        "{% if messages|length > 1 and messages[1]['role'] == 'user' %}{{ raise_exception('by turns') }}{% endif %}"
    )
    transcript = ChatTranscript(make_tokenizer(chat_template=strict + CHATML, with_bos=False))
    said = reset(_Asking(), Prompt("e", "p"))
    with pytest.raises(ValueError, match="refuses a prompt with the roles user, user, assistant, user .*by turns"):
        first_ids(transcript, said)


class _Asking:
    """An environment whose prompt has two turns of the user in a row."""

    opening_messages = [{"role": role, "content": "x"} for role in ("user", "user", "assistant", "user")]

    def prompt_ids(self, split, seed):
        return iter(["p"])

    def reset(self, seed=None, options=None):
        return "x", {}


@pytest.mark.parametrize(("row", "question", "answer"), [
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
], ids=str)  # fmt: skip
def test_further_forms_of_questions_and_answers(row, question, answer) -> None:
    problem = problem_of(row)
    assert (problem.question, problem.answer, problem.notes) == (question, answer, ())


def test_columns_that_differ_only_in_case_are_a_warning() -> None:
    problem = problem_of({"question": "q", "Answer": "3", "answer": "2"})
    assert problem.answer == "2"
    assert problem.notes == ("has columns that differ only in case or blanks, 'Answer', 'answer': 'answer' counts",)
