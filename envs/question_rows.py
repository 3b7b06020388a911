"""Rows of a data file become `Problem`s: what is asked, what is right, how it is solved.

    file        rows                                     layout                       fields, the first that a row has
    .jsonl      one JSON object a line                   question/answer  (GSM8K)     question, problem, prompt, _text
    .json       a list of objects, or an object that     problem/solution (MATH)      answer, final_answer, _answer
                holds one under data, rows or problems   messages/answer              solution, reasoning
    .csv        one row a line, names in the first       CHAMP (_text/_answer)        choices, options
    .parquet    any

Names are compared without case, so AIME's Problem and Answer are found. The answer is, in this order:
- `answer`; where it holds "####" (GSM8K) what follows, and what stands before it is the solution;
- what `solution` states last: the content of its last \\boxed{} (MATH), or what follows "####" or "the answer is".
With `choices` (a list, or ARC's {"text": [...], "label": [...]}) they are listed under the question, and the answer is
a letter, a label, a position from 0, or the text of one of them.

Sources: GSM8K (Cobbe et al. 2021, arXiv 2110.14168), MATH (Hendrycks et al. 2021, arXiv 2103.03874), CHAMP (Mao et al.
2024, arXiv 2401.06961; the layout of champ-dataset 1.0.0), ARC (Clark et al. 2018, arXiv 1803.05457).
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.math_grading import final_answer

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
QUESTION_FIELDS = ("question", "problem", "prompt", "_text", "messages")
ANSWER_FIELDS = ("answer", "final_answer", "_answer")
SOLUTION_FIELDS = ("solution", "reasoning")
CHOICE_FIELDS = ("choices", "options")
LETTERS = "ABCDEFGHIJ"

_HOLDERS = ("data", "rows", "problems")
_ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's notes to its calculator


@dataclass(frozen=True)
class Problem:
    """One row. Invariant: `question` and `answer` are not empty; with `is_choice` the answer is a letter."""

    question: str
    answer: str
    solution: str = ""
    is_choice: bool = False


class RowFault(ValueError):
    """A row that cannot be used: `field` and what is wrong with it."""

    def __init__(self, field: str, fault: str):
        super().__init__(f"field {field!r} {fault}")


def rows_of(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (row number from 1, row) of a data file; a line that is no JSON comes as the `RowFault` that says so.

    Raises:
        ValueError: the file is of another kind, or cannot be read at all.
    """
    readers = {".jsonl": _json_lines, ".json": _json_list, ".csv": _csv_rows, ".parquet": _parquet_rows}
    if path.suffix.lower() not in readers:
        raise ValueError(f"file {path.name!r}; expected one that ends in {', '.join(SUFFIXES)}")
    try:
        yield from enumerate(readers[path.suffix.lower()](path), 1)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"file {str(path)!r} cannot be read: {error}") from error


def problem_of(row: Any, question_field: str = "", answer_field: str = "") -> Problem:
    """Return the problem that a row states.

    Args:
        row: names to values
        question_field: its name, where it is none of those above
        answer_field: likewise

    Raises:
        RowFault: naming the field.
    """
    if isinstance(row, RowFault):
        raise row
    if not isinstance(row, Mapping):
        raise RowFault("(row)", f"is of type {type(row).__name__}; expected an object")
    fields = {str(name).casefold(): value for name, value in row.items() if value is not None}
    name, asked = _first(fields, (question_field.casefold(),) if question_field else QUESTION_FIELDS)
    if not name:
        raise RowFault(question_field or "question", f"is missing; the row has {_listed(row)}")
    solution_name, solution = _first(fields, SOLUTION_FIELDS)
    if isinstance(solution, Mapping):
        solution = _of_steps(solution, solution_name)
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        asked, spoken = _of_messages(asked, name)
        solution = solution or spoken
    question, solution = _text(asked, name), _text(solution, solution_name) if solution else ""
    answer_name, answer = _first(fields, (answer_field.casefold(),) if answer_field else ANSWER_FIELDS)
    choices = _first(fields, CHOICE_FIELDS)
    if choices[0] and answer_name:
        return _with_choices(question, choices, answer_name, answer, solution)
    answer, solution = _answer(answer_name, answer, solution, answer_field or "answer", row)
    return Problem(question, answer, _ANNOTATION.sub("", solution).strip())


def _answer(name: str, answer: Any, solution: str, wanted: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the answer and the solution of a row without choices."""
    if name:
        before, mark, after = _text(answer, name).rpartition("####")
        stated, solution = after.strip(), (before.strip() or solution) if mark else solution
        if not stated:
            raise RowFault(name, "has nothing after '####'; expected the answer there")
        return stated, solution
    if not solution:
        raise RowFault(wanted, f"is missing, and there is no solution; the row has {_listed(row)}")
    found = final_answer(solution)
    if not found.answer or found.marker == "bare":
        raise RowFault("solution", r"states no answer; expected \boxed{...}, '#### ...' or 'the answer is ...' in it")
    return found.answer, solution


def _with_choices(question: str, choices: tuple[str, Any], name: str, answer: Any, solution: str) -> Problem:
    field, listed = choices
    labels: list[str] = []
    if isinstance(listed, Mapping):
        labels, listed = [str(label) for label in listed.get("label") or ()], listed.get("text")
    if isinstance(listed, str) or not isinstance(listed, Sequence) or not 2 <= len(listed) <= len(LETTERS):
        raise RowFault(field, f"= {_shown(listed)}; expected a list of 2 to {len(LETTERS)} texts")
    texts = [_text(choice, field) for choice in listed]
    said = answer if isinstance(answer, int) and not isinstance(answer, bool) else _text(answer, name)
    letters = LETTERS[: len(texts)]
    if isinstance(said, int) and 0 <= said < len(texts):
        letter = letters[said]
    elif said in labels and len(labels) == len(texts):
        letter = letters[labels.index(str(said))]
    elif isinstance(said, str) and len(said) == 1 and said.upper() in letters:
        letter = said.upper()
    elif said in texts:
        letter = letters[texts.index(str(said))]
    else:
        raise RowFault(name, f"= {_shown(answer)}; expected one of the {len(texts)} choices")
    shown = "".join(f"\n{one}. {text}" for one, text in zip(letters, texts, strict=True))
    return Problem(question + shown, letter, solution, is_choice=True)


def _of_messages(messages: Sequence[Any], name: str) -> tuple[str, str]:
    """Return what a conversation asks, and the assistant's last message, which is no part of the question."""
    said = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise RowFault(name, f"has the message {_shown(message)}; expected texts 'role' and 'content'")
        said.append((message["role"], content.strip()))
    solution = said.pop()[1] if said and said[-1][0] == "assistant" else ""
    if any(role == "assistant" for role, _ in said):
        raise RowFault(name, "has several turns of the assistant; expected one question")
    return "\n".join(content for _, content in said), solution


def _of_steps(solution: Mapping[str, Any], name: str) -> str:
    """Return the steps of CHAMP's solutions, one a line."""
    steps = solution.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) and "_text" in step for step in steps):
        raise RowFault(name, f"= {_shown(solution)}; expected text, or an object with steps that have a _text")
    return "\n".join(_text(step["_text"], name) for step in steps)


def _text(value: Any, name: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RowFault(name, f"= {_shown(value)}; expected text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise RowFault(name, f"= {value}; expected a finite number")
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    text = text.replace("\r\n", "\n").strip()
    if not text:
        raise RowFault(name, "is empty; expected text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowFault(name, "holds half a character (a lone surrogate); expected UTF-8 text") from None
    return text


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    return next(((name, fields[name]) for name in names if name in fields), ("", None))


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(str(name)[:40] for name in list(row)[:12]) or "no fields"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}... ({len(text)} characters)"


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig") as lines:
        for line in lines:
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    yield RowFault("(row)", f"is no JSON: {error}")


def _json_list(path: Path) -> Iterator[Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"file {str(path)!r} is no JSON: {error}; expected a list (or name it .jsonl)") from error
    if isinstance(held, Mapping):
        held = next((held[name] for name in _HOLDERS if name in held), held)
    if isinstance(held, Mapping) and all(isinstance(row, Mapping) for row in held.values()):
        held = list(held.values())
    if not isinstance(held, list):
        raise ValueError(f"file {str(path)!r} holds no rows; expected a list, or one under {', '.join(_HOLDERS)}")
    yield from held


def _csv_rows(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        for row in csv.DictReader(lines):
            extra = row.pop(None, None)
            yield RowFault("(row)", f"has {len(extra)} values more than there are names") if extra else row


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as held:
            for batch in held.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"file {str(path)!r} is no Parquet: {error}") from error
