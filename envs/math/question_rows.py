r"""Convert rows of a data file into `Problem`s: question, right answer and solution.

    layout                                                 fields, the first that a row has and that is not empty
    question/answer           GSM8K, AIME, BoolQ           question, problem, prompt, _text, question_stem,
    problem/solution          MATH, NuminaMath                 messages, conversations
    question/final_answer     OlympiadBench                answer, final_answer, _answer, reward_model.ground_truth,
    question/choices          ARC, OpenBookQA, MMLU            ground_truth, answerKey
    messages/answer           TRL, ShareGPT                solution, reasoning
    prompt/reward_model       verl                         choices, options; with them also: answer_index, answer_idx,
    _text/_answer             CHAMP                            correct, label, target

Names are compared without case and without blanks around them, so AIME's Problem and Answer are found; a dot leads into
an object. A text beside the question (`passage` of BoolQ, `body` of SVAMP) stands in front of it.

The question may be a list of messages, or the JSON text of one: those of the role system become the system prompt, the
last ones of the user the question. An assistant's turn in front of them is history: it is shown and not trained on. The
assistant's last message is the solution. The answer is, in this order:
- `answer`; if it contains "####" (GSM8K), the text after it, and the text before it is the solution. A list of one is
  its entry, a boolean "yes" or "no". "notfound" and "proof" (NuminaMath) beside a solution do not count as answers;
- the last answer in `solution`: the content of its last \boxed{} (MATH), or the text after "####" or "the answer is".
  Boxes in a row ("\boxed{3} or \boxed{5}") are a list; of others that differ the last one counts, with a note.
With `choices` (a list, ARC's {"text": [...], "label": [...]}, {"A": ..., "B": ...}, or columns A to D) they are listed
under the question, and the answer is a letter, a label, the text of one of them, or a position from 0, also as text.
Columns a, b, ... may hold numbers that the question names: beside them only a letter is the answer of a choice.

Sources: GSM8K (Cobbe et al. 2021, arXiv 2110.14168), MATH (Hendrycks et al. 2021, arXiv 2103.03874), CHAMP (Mao et al.
2024, arXiv 2401.06961; the layout of champ-dataset 1.0.0), ARC (Clark et al. 2018, arXiv 1803.05457), OlympiadBench (He
et al. 2024, arXiv 2402.14008), BoolQ (Clark et al. 2019, arXiv 1905.10044), NuminaMath (Li et al. 2024); the layouts of
conversations are those of the documentation of TRL and verl.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import pairwise
from typing import Any

from rllib_srl.envs.math.answer_text import plain
from rllib_srl.envs.math.conversations import (
    as_messages,
    as_text,
    of_messages,
    of_parts,
    shown,
    unwritten,
    written_messages,
)
from rllib_srl.envs.math.data_files import Row, RowError
from rllib_srl.envs.math.data_place import listed
from rllib_srl.envs.math.marks import boxes_in, final_answer, without_thoughts

QUESTION_FIELDS = ("question", "problem", "prompt", "_text", "question_stem", "messages", "conversations")
ANSWER_FIELDS = ("answer", "final_answer", "_answer", "reward_model.ground_truth", "ground_truth", "answerkey")
SOLUTION_FIELDS = ("solution", "reasoning", "rationale", "completion")
CHOICE_FIELDS = ("choices", "options")
LETTERS = "ABCDEFGHIJ"

_OF_CHOICES = (*ANSWER_FIELDS, "answer_index", "answer_idx", "correct", "label", "target")  # answers beside choices
_CONTEXT_FIELDS = ("passage", "body")
_NO_ANSWERS = ("notfound", "not found", "proof")  # NuminaMath's words for rows without an answer
_NOTHING = ("none", "n/a", "na", "null", "nan")  # also, if the solution states an answer
_OPTION = re.compile(r"(?:option|choice)[_ ]?([a-j])")
_ANSWER_TOO = ", and answer_field to the one that holds the answer if that is not found either"
_FEW_LETTERS = re.compile(r"(?!no$)[A-Za-z]{2,3}|[b-df-hj-np-tv-xzB-DF-HJ-NP-TV-XZ]{2,12}")
_ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's notes to its calculator
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;&.]|\\\\|\\[,;: ()]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|and|or)*")
_LETTER = re.compile(r"\(?([A-Ja-j])[).:]?")
_LETTERED = re.compile(r"\(?([A-J])\s*[).:]\s*(\S.*)", re.DOTALL)
_NUMBERED = re.compile(r"(\d{1,2})(?:\.0+)?", re.ASCII)
_QUOTED_ONE = re.compile(r"\[\s*(?:'[^']*'|\"[^\"]*\")\s*\]")


@dataclass(frozen=True)
class Problem:
    """One row. Invariant: `question` is not empty, nor `answer` unless rows need none; a choice's is a letter."""

    question: str
    answer: str
    solution: str = ""
    is_choice: bool = False
    fields: Mapping[str, str] = field(default_factory=dict, compare=False)  # others that were asked for, by name
    system: str = ""  # system prompt of a conversation
    messages: tuple[Mapping[str, str], ...] = field(default=(), compare=False)  # of a conversation, up to the question
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)  # as read, if it was to be kept
    notes: tuple[str, ...] = field(default=(), compare=False)  # what of the row deserves a look

    @property
    def has_history(self) -> bool:
        """Return whether the assistant has spoken before the question."""
        return any(message["role"] == "assistant" for message in self.messages)


def problem_of(
    row: Any, question_field: str = "", answer_field: str = "", others: Sequence[str] = (), has_reward: bool = False
) -> Problem:
    """Return the problem that a row states.

    Args:
        row: names to values
        question_field: its name, if it is not one of the known names above
        answer_field: likewise
        others: further fields to keep, as written; compared without case like all names
        has_reward: a reward function grades the answers: the row is kept, and needs no right answer

    Raises:
        RowError: names the field.
    """
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, Mapping):
        raise RowError("(row)", f"is of type {type(row).__name__}; expected an object")
    fields, notes = _fields_of(row)
    name, asked = _first(fields, (_key(question_field),) if question_field else QUESTION_FIELDS)
    if isinstance(asked, Mapping) and "stem" in asked:  # ARC as its authors publish it
        fields, asked = {**fields, "choices": asked.get("choices")}, asked["stem"]
    if not name:
        remedy = "set question_field to the one that asks" + ("" if answer_field else _ANSWER_TOO)
        raise RowError(question_field or "question", f"is missing; the row has {_listed(row)}; {remedy}")
    solution_name, solution = _solution_of(fields)
    system = ""
    messages: tuple[Mapping[str, str], ...] = ()
    asked = as_messages(written_messages(asked, name) if isinstance(asked, str) else asked)
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        messages, spoken = of_messages(asked, name)
        solution = solution or spoken
        system = "\n".join(message["content"] for message in messages if message["role"] == "system")
        asked = as_text([message for message in messages if message["role"] != "system"])
    about: dict[str, Any] = {"system": system, "messages": messages, "row": row if has_reward else {}}
    question, solution = _text(asked, name), "" if _is_blank(solution) else _text(solution, solution_name or name)
    context = next((fields[each] for each in _CONTEXT_FIELDS if isinstance(fields.get(each), str)), "").strip()
    if context and not question_field and not messages and not {_key(each) for each in others} & set(_CONTEXT_FIELDS):
        question = f"{context}\n{question}"
    named = (_key(answer_field),) if answer_field else ()
    answer_name, answer = _first(fields, named or ANSWER_FIELDS)
    if answer_field and not answer_name:
        remedy = "set answer_field to the one that holds the answer"
        raise RowError(answer_field, f"is missing; the row has {_listed(row)}; {remedy}")
    kept = {name: _other(fields, name, row) for name in others}
    about |= {"fields": kept, "notes": notes}
    if (choices := _choices_of(fields, row))[0] and (said := _first(fields, named or _OF_CHOICES))[0]:
        problem, more = _with_columns(question, choices, *said, solution)
        if problem:
            return replace(problem, **about)
        about["notes"] += more
    try:
        answer, solution, more = _answer(answer_name, answer, solution, solution_name, row)
        about["notes"] += more
    except RowError:
        if not has_reward:
            raise
        answer = ""  # the function reads what it needs from the row
    return Problem(question, answer, _ANNOTATION.sub("", solution).strip(), **about)


def _solution_of(fields: Mapping[str, Any]) -> tuple[str, Any]:
    """Return name and value of the field with the solution; "" for a value of another meaning."""
    name, solution = _first(fields, SOLUTION_FIELDS)
    if isinstance(solution, Mapping) and name in SOLUTION_FIELDS[:2]:
        solution = _of_steps(solution, name)
    elif isinstance(solution, Sequence) and not isinstance(solution, str):
        solution = solution[0] if solution else ""  # OlympiadBench's list of solutions
        if isinstance(solution, Mapping):  # a completion of TRL
            solution = of_parts(solution.get("content"), name)
    if name in SOLUTION_FIELDS[2:] and not isinstance(solution, str):
        solution = ""
    return name, solution


def _other(fields: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> str:
    if _key(name) not in fields:
        raise RowError(name, f"is missing, which prompt_template names; the row has {_listed(row)}")
    return _text(fields[_key(name)], name)


def _answer(
    name: str, answer: Any, solution: str, solution_name: str, row: Mapping[str, Any]
) -> tuple[str, str, tuple[str, ...]]:
    """Return the answer and the solution of a row without choices, and notes."""
    word = str(answer).strip().casefold()
    is_left_out = _is_blank(answer) or word in _NO_ANSWERS
    if name and solution and (is_left_out or (word in _NOTHING and final_answer(solution).marker != "bare")):
        name = ""
    elif name and isinstance(answer, str) and _has_box_in_text(answer):
        name, solution = "", answer  # a whole solution in the column of answers
    if name:
        before, mark, after = _answer_text(answer, name).rpartition("####")
        stated, solution = after.strip(), (before.strip() or solution) if mark else solution
        if not stated:
            raise RowError(name, "has nothing after '####'; expected the answer there")
        return stated, solution, ()
    if not solution:
        remedy = "set answer_field to the one that holds the answer"
        raise RowError("answer", f"is missing, and there is no solution; the row has {_listed(row)}; {remedy}")
    statement = final_answer(solution)
    if not statement.answer or statement.marker == "bare":
        stated = r"\boxed{...}, '#### ...' or 'the answer is ...'"
        remedy = f"if it is the answer itself, set answer_field = {solution_name!r}" if solution_name else ""
        message = f"states no answer; expected {stated} in it" + (f"; {remedy}" if remedy else "")
        raise RowError(solution_name or "solution", message)
    if statement.marker == "boxed" and solution.count(r"\boxed") + solution.count(r"\fbox") > 1:
        solution_text = without_thoughts(solution)
        boxes = boxes_in(solution_text)
        if len({plain(held) for _, _, held in boxes}) > 1:
            return _of_boxes(boxes, solution_text)
    # In a box a few letters are a product: the delimiters say so to the grader.
    is_product = statement.marker == "boxed" and _FEW_LETTERS.fullmatch(statement.answer)
    return f"${statement.answer}$" if is_product else statement.answer, solution, ()


def _of_boxes(boxes: Sequence[tuple[int, int, str]], solution: str) -> tuple[str, str, tuple[str, ...]]:
    """Return the answer of a solution with boxes that differ: a list if nothing but "and" is between, else the last."""
    between = [solution[end:start] for (_, end, _), (start, _, _) in pairwise(boxes)]
    if all(_BETWEEN_BOXES.fullmatch(text) for text in between):
        return ", ".join(held for _, _, held in boxes), solution, ()
    two = " and ".join(repr(boxes[at][2][:30]) for at in (0, -1))
    return (
        boxes[-1][2],
        solution,
        (f"has {len(boxes)} boxes in its solution, such as {two}, and the last one counts",),
    )


def _answer_text(answer: Any, name: str) -> str:
    """Return an answer as text; a list of one is its entry, a boolean yes or no."""
    if isinstance(answer, str) and _QUOTED_ONE.fullmatch(answer.strip()):
        answer = unwritten(answer)
    while isinstance(answer, list | tuple) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, list | tuple) and name == "final_answer":  # OlympiadBench: all of them are to be given
        return ", ".join(_text(each, name) for each in answer)
    if isinstance(answer, list | tuple):
        raise RowError(name, f"= {shown(answer)}; expected text or a number, or a list of one: write several answers "
                             'as one text, "3, 5"')  # fmt: skip
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    return _text(answer, name)


def _choices_of(fields: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the field of the choices and what it holds; of a table with columns A, B, ... "A", of a, b, ... "a"."""
    name, choices = _first(fields, CHOICE_FIELDS)
    if name:
        return name, unwritten(choices)
    options = {match[1]: value for key, value in fields.items() if (match := _OPTION.fullmatch(key))}
    held = {letter: {**fields, **options}.get(letter.casefold()) for letter in LETTERS}
    filled = [letter for letter, value in held.items() if not _is_blank(value)]
    if len(filled) < 2 or filled[0] != "A":
        return "", None
    is_lower = not options and "A" not in {str(name).strip() for name in row}
    return "a" if is_lower else "A", {letter: held[letter] for letter in LETTERS if letter <= filled[-1]}


def _with_columns(
    question: str, choices: tuple[str, Any], name: str, answer: Any, solution: str
) -> tuple[Problem | None, tuple[str, ...]]:
    """Return as `_with_choices`; None and notes for columns named by letters that seem to hold something else."""
    field, columns = choices
    if field in CHOICE_FIELDS:
        return _with_choices(question, choices, name, answer, solution), ()
    names = ", ".join(columns)
    try:
        problem = _with_choices(question, choices, name, answer, solution)
    except RowError:
        if field == "a":
            return None, ()
        empty = next((letter for letter, value in columns.items() if _is_blank(value)), "")
        why = f"{empty} is empty" if empty else "the answer is none of them"
    else:
        if field == "A" or _LETTER.fullmatch(str(answer).strip()):
            return problem, ()
        names, why = names.casefold(), f"name them {names} if they are"
    return None, (f"has the columns {names}, which are not shown as choices: {why}",)


def _with_choices(question: str, choices: tuple[str, Any], name: str, answer: Any, solution: str) -> Problem:
    field, listed = choices
    labels: list[str] = []
    if isinstance(listed, list) and all(isinstance(c, list | tuple) and len(c) == 2 for c in listed):
        listed = {str(label): text for label, text in listed}  # a map of Parquet
    if isinstance(listed, Mapping) and "text" in listed:
        labels, listed = [str(label) for label in listed.get("label") or ()], listed.get("text")
    elif isinstance(listed, Mapping):
        labels, listed = [str(label) for label in listed], list(listed.values())
    elif isinstance(listed, list) and listed and all(isinstance(c, Mapping) and "text" in c for c in listed):
        labels, listed = [str(c.get("label", "")) for c in listed], [c["text"] for c in listed]
    while isinstance(listed, list) and listed[-1:] == [None]:  # in Parquet all rows have as many as the longest
        listed, labels = listed[:-1], labels[: len(listed) - 1]
    if isinstance(listed, str) or not isinstance(listed, Sequence) or not 2 <= len(listed) <= len(LETTERS):
        raise RowError(field, f"= {shown(listed)}; expected a list of 2 to {len(LETTERS)} texts")
    texts = _without_letters([_text(choice, field) for choice in listed])
    letter = _letter_of(answer, texts, labels, name)
    listing = "".join(f"\n{label}. {text}" for label, text in zip(LETTERS, texts, strict=False))
    return Problem(question + listing, letter, solution, is_choice=True)


def _without_letters(texts: list[str]) -> list[str]:
    """Return the texts of choices without the letters that they begin with, if all of them do: "A) 21"."""
    matches = [_LETTERED.fullmatch(text) for text in texts]
    if all(match and match[1] == letter for match, letter in zip(matches, LETTERS, strict=False)):
        return [match[2] for match in matches if match]
    return texts


def _letter_of(answer: Any, texts: Sequence[str], labels: Sequence[str], name: str) -> str:
    """Return the letter of the choice that an answer names."""
    letters = LETTERS[: len(texts)]
    if isinstance(answer, str) and _QUOTED_ONE.fullmatch(answer.strip()):
        answer = unwritten(answer)
    if isinstance(answer, list | tuple) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, int) and not isinstance(answer, bool):
        said: int | str = answer
    else:
        said = ("True" if answer else "False") if isinstance(answer, bool) else _text(answer, name)
    if isinstance(said, int) and 0 <= said < len(texts) and str(said) not in labels:
        return letters[said]
    if str(said) in labels and len(labels) == len(texts):
        return letters[labels.index(str(said))]
    if isinstance(said, str) and (match := _LETTER.fullmatch(said)) and match[1].upper() in letters:
        return match[1].upper()
    if str(said) in texts:
        return letters[texts.index(str(said))]
    spelt = [text.casefold() for text in texts]
    words = {str(said).casefold()} | ({"yes" if answer else "no"} if isinstance(answer, bool) else set())
    if len(at := [number for number, text in enumerate(spelt) if text in words]) == 1:
        return letters[at[0]]
    if isinstance(said, str) and (match := _NUMBERED.fullmatch(said)) and int(match[1]) < len(texts):
        return letters[int(match[1])]
    named = _LETTERED.fullmatch(said) if isinstance(said, str) else None
    if named and named[1] in letters and named[2] == texts[letters.index(named[1])]:
        return named[1]
    raise RowError(name, f"= {shown(answer)}; expected one of the {len(texts)} choices")


def _of_steps(solution: Mapping[str, Any], name: str) -> str:
    """Return the steps of CHAMP's solutions, one per line."""
    steps = solution.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) and "_text" in step for step in steps):
        raise RowError(name, f"= {shown(solution)}; expected text, or an object with steps that have a _text")
    return "\n".join(_text(step["_text"], name) for step in steps)


def _text(value: Any, name: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise RowError(name, f"= {shown(value)}; expected text or a number")
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        raise RowError(name, f"= {value}; expected a finite number")
    if isinstance(value, Decimal):
        text = f"{value:f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    text = text.replace("\r\n", "\n").strip()
    if not text:
        raise RowError(name, "is empty; expected text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(name, "contains a lone surrogate; expected UTF-8 text") from None
    return text


def _fields_of(row: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of a row by their names as they are compared, and notes."""
    fields = {_key(name): value for name, value in row.items() if value is not None}
    notes = row.notes if isinstance(row, Row) else ()
    if len(fields) == sum(value is not None for value in row.values()):
        return fields, notes
    exact = {name: value for name, value in row.items() if value is not None and name == _key(name)}
    alike = [name for name in row if sum(_key(name) == _key(other) for other in row) > 1]
    which = next((f"{name!r} counts" for name in alike if name in exact), "the last one counts")
    names = ", ".join(map(repr, alike))
    return {**fields, **exact}, (*notes, f"has columns that differ only in case or blanks, {names}: {which}")


def _has_box_in_text(text: str) -> bool:
    """Return whether a text has a box among other words, and no "####"."""
    boxes = boxes_in(text) if "box" in text and "####" not in text else []
    is_box_alone = len(boxes) == 1 and not (text[: boxes[0][0]] + text[boxes[0][1] :]).strip(" $.\n")
    return bool(boxes) and not is_box_alone


def _key(name: Any) -> str:
    """Return a name as names are compared: without case, and without blanks around it."""
    return str(name).strip().casefold()


def _is_blank(value: Any) -> bool:
    """Return whether a value says nothing."""
    is_nan = isinstance(value, float) and math.isnan(value)
    is_empty = isinstance(value, str | list | tuple) and not (value.strip() if isinstance(value, str) else value)
    return value is None or is_nan or is_empty


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """Return name and value of the first of `names` that a row has and that is not blank, else of the first it has.

    A dot leads into an object, also into one that is written as JSON text.
    """
    blank: tuple[str, Any] = ("", None)
    for name in names:
        pair = _looked_up(fields, name)
        if pair[0] and not _is_blank(pair[1]):
            return pair
        blank = blank if blank[0] else pair
    return blank


def _looked_up(fields: Mapping[str, Any], name: str) -> tuple[str, Any]:
    if name in fields:
        return name, fields[name]
    outer, _, inner = name.partition(".")
    if inner and isinstance(held := unwritten(fields.get(outer)), Mapping):
        within = {_key(key): value for key, value in held.items() if value is not None}
        if (pair := _looked_up(within, inner))[0]:
            return name, pair[1]
    return "", None


def _listed(row: Mapping[str, Any]) -> str:
    return listed(list(row)) or "no fields"
