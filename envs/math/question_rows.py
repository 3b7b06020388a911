"""Convert rows of a data file into `Problem`s: question, right answer and solution.

    file        rows                                     layout                       fields, the first that a row has
    .jsonl      one JSON object a line                   question/answer  (GSM8K)     question, problem, prompt, _text,
    .json       a list of objects, or an object that     problem/solution (MATH)      messages
                holds one under data, rows or problems   messages/answer  (TRL)       answer, final_answer, _answer,
    .csv        one row a line, names in the first       CHAMP (_text/_answer)        reward_model.ground_truth,
    .parquet    any                                      prompt/reward_model (verl)   ground_truth
                                                                                      solution, reasoning
                                                                                      choices, options

Field names are compared without case, so AIME's Problem and Answer are found; a dot leads into an object. The question
may be a list of messages: those of the role system become the system prompt, the others the question. The answer is, in
this order:
- `answer`; if it contains "####" (GSM8K), the text after it, and the text before it is the solution;
- the last answer in `solution`: the content of its last \\boxed{} (MATH), or the text after "####" or "the answer is".
With `choices` (a list, or ARC's {"text": [...], "label": [...]}) they are listed under the question, and the answer is
a letter, a label, a position from 0, or the text of one of them.

Sources: GSM8K (Cobbe et al. 2021, arXiv 2110.14168), MATH (Hendrycks et al. 2021, arXiv 2103.03874), CHAMP (Mao et al.
2024, arXiv 2401.06961; the layout of champ-dataset 1.0.0), ARC (Clark et al. 2018, arXiv 1803.05457); the layouts of
conversations are those of the documentation of TRL and verl.
"""

from __future__ import annotations

import codecs
import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rllib_srl.envs.math.marks import final_answer

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
QUESTION_FIELDS = ("question", "problem", "prompt", "_text", "messages")
ANSWER_FIELDS = ("answer", "final_answer", "_answer", "reward_model.ground_truth", "ground_truth")
SOLUTION_FIELDS = ("solution", "reasoning")
CHOICE_FIELDS = ("choices", "options")
LETTERS = "ABCDEFGHIJ"

MAX_LINE_BYTES = 4 << 20  # of a line of JSONL or CSV: many times the longest prompt, small against the memory
_MAX_LISTED = 24  # names of a row's fields
_HOLDERS = ("data", "rows", "problems")
_ANSWER_TOO = ", and answer_field to the one that holds the answer if that is not found either"
_FEW_LETTERS = re.compile(r"(?!no$)[A-Za-z]{2,3}|[b-df-hj-np-tv-xzB-DF-HJ-NP-TV-XZ]{2,12}")
_ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's notes to its calculator


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


class RowFault(ValueError):
    """A row that cannot be used: `field` and what is wrong with it."""

    def __init__(self, field: str, fault: str):
        super().__init__(f"field {field!r} {fault}")


def rows_of(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (row number from 1, row) of a data file; a line that is not JSON is yielded as a `RowFault`.

    Raises:
        ValueError: unsupported file type, or the file cannot be read at all.
    """
    readers = {".jsonl": _json_lines, ".json": _json_list, ".csv": _csv_rows, ".parquet": _parquet_rows}
    if path.suffix.lower() not in readers:
        raise ValueError(f"file {path.name!r}; expected one that ends in {', '.join(SUFFIXES)}")
    try:
        if path.suffix.lower() != ".parquet":
            _check_text(path)
        yield from enumerate(readers[path.suffix.lower()](path), 1)
    except OSError as error:
        raise ValueError(f"file {str(path)!r} cannot be read: {error}") from error


def _check_text(path: Path) -> None:
    """Check every line of a text file before it is read as a whole.

    Raises:
        ValueError: names a line that is not UTF-8 or, if lines are rows, too long; and the remedy.
    """
    most = None if path.suffix.lower() == ".json" else MAX_LINE_BYTES
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(-1 if most is None else most + 1):
            number += 1
            where = f"file {str(path)!r}, line {number}"
            if most is not None and len(line) > most:
                raise ValueError(f"{where} has more than {most} bytes; expected one row a line")
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                is_wide = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and number == 1
                encoding = "UTF-16" if is_wide else "the encoding it was written in, perhaps CP1252"
                source = "UTF-16" if is_wide else "CP1252"
                raise ValueError(
                    f"{where} cannot be read: byte {error.start + 1} (0x{line[error.start]:02x}) is no UTF-8; expected "
                    f"UTF-8, and this file seems to be {encoding}: iconv -f {source} -t UTF-8 FILE > NEW"
                ) from error


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
        RowFault: names the field.
    """
    if isinstance(row, RowFault):
        raise row
    if not isinstance(row, Mapping):
        raise RowFault("(row)", f"is of type {type(row).__name__}; expected an object")
    fields = {str(name).casefold(): value for name, value in row.items() if value is not None}
    name, asked = _first(fields, (question_field.casefold(),) if question_field else QUESTION_FIELDS)
    if not name:
        remedy = "set question_field to the one that asks" + ("" if answer_field else _ANSWER_TOO)
        raise RowFault(question_field or "question", f"is missing; the row has {_listed(row)}; {remedy}")
    solution_name, solution = _first(fields, SOLUTION_FIELDS)
    if isinstance(solution, Mapping):
        solution = _of_steps(solution, solution_name)
    system = ""
    messages: tuple[Mapping[str, str], ...] = ()
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        messages, spoken = _of_messages(asked, name)
        solution = solution or spoken
        system = "\n".join(one["content"] for one in messages if one["role"] == "system")
        asked = "\n".join(one["content"] for one in messages if one["role"] != "system")
    about: dict[str, Any] = {"system": system, "messages": messages, "row": row if has_reward else {}}
    question, solution = _text(asked, name), _text(solution, solution_name) if solution else ""
    answer_name, answer = _first(fields, (answer_field.casefold(),) if answer_field else ANSWER_FIELDS)
    choices = _first(fields, CHOICE_FIELDS)
    kept = {name: _other(fields, name, row) for name in others}
    if choices[0] and answer_name:
        return replace(_with_choices(question, choices, answer_name, answer, solution), fields=kept, **about)
    try:
        answer, solution = _answer(answer_name, answer, solution, answer_field or "answer", row)
    except RowFault:
        if not has_reward or (answer_field and not answer_name):
            raise
        answer = ""  # the function reads what it needs from the row
    return Problem(question, answer, _ANNOTATION.sub("", solution).strip(), fields=kept, **about)


def _other(fields: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> str:
    if name.casefold() not in fields:
        raise RowFault(name, f"is missing, which prompt_template names; the row has {_listed(row)}")
    return _text(fields[name.casefold()], name)


def _answer(name: str, answer: Any, solution: str, wanted: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the answer and the solution of a row without choices."""
    if name:
        before, mark, after = _text(answer, name).rpartition("####")
        stated, solution = after.strip(), (before.strip() or solution) if mark else solution
        if not stated:
            raise RowFault(name, "has nothing after '####'; expected the answer there")
        return stated, solution
    if not solution:
        remedy = "set answer_field to the one that holds the answer"
        raise RowFault(wanted, f"is missing, and there is no solution; the row has {_listed(row)}; {remedy}")
    found = final_answer(solution)
    if not found.answer or found.marker == "bare":
        raise RowFault("solution", r"states no answer; expected \boxed{...}, '#### ...' or 'the answer is ...' in it")
    # In a box a few letters are a product: the delimiters say so to the grader.
    is_product = found.marker == "boxed" and _FEW_LETTERS.fullmatch(found.answer)
    return f"${found.answer}$" if is_product else found.answer, solution


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


def _of_messages(messages: Sequence[Any], name: str) -> tuple[tuple[Mapping[str, str], ...], str]:
    """Return the messages up to the question, and the assistant's last message, which is not part of the question."""
    said = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise RowFault(name, f"has the message {_shown(message)}; expected texts 'role' and 'content'")
        said.append({"role": message["role"], "content": content.strip()})
    solution = said.pop()["content"] if said and said[-1]["role"] == "assistant" else ""
    if any(one["role"] == "assistant" for one in said):
        raise RowFault(name, "has several turns of the assistant; expected one question")
    return tuple(said), solution


def _of_steps(solution: Mapping[str, Any], name: str) -> str:
    """Return the steps of CHAMP's solutions, one per line."""
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
        raise RowFault(name, "contains a lone surrogate; expected UTF-8 text") from None
    return text


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """Return name and value of the first of `names` that a row has; a dot leads into an object."""
    for name in names:
        outer, _, inner = name.partition(".")
        if name in fields:
            return name, fields[name]
        if inner and isinstance(fields.get(outer), Mapping):
            within = {str(key).casefold(): value for key, value in fields[outer].items() if value is not None}
            if (found := _first(within, (inner,)))[0]:
                return name, found[1]
    return "", None


def _listed(row: Mapping[str, Any]) -> str:
    more = f" and {len(row) - _MAX_LISTED} more" if len(row) > _MAX_LISTED else ""
    return (", ".join(str(name)[:40] for name in list(row)[:_MAX_LISTED]) or "no fields") + more


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
                    yield RowFault("(row)", f"is not JSON: {error}")


def _json_list(path: Path) -> Iterator[Any]:
    try:
        held = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"file {str(path)!r} is not JSON: {error}; expected a list (or name it .jsonl)") from error
    if isinstance(held, Mapping):
        held = next((held[name] for name in _HOLDERS if name in held), held)
    if isinstance(held, Mapping) and all(isinstance(row, Mapping) for row in held.values()):
        held = list(held.values())
    if not isinstance(held, list):
        raise ValueError(f"file {str(path)!r} holds no rows; expected a list, or one under {', '.join(_HOLDERS)}")
    yield from held


def _csv_rows(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        try:
            for row in reader:
                extra = row.pop(None, None)
                yield RowFault("(row)", f"has {len(extra)} more values than column names") if extra else row
        except csv.Error as error:
            where = f"file {str(path)!r}, line {reader.line_num + 1}"
            raise ValueError(f"{where} cannot be read: {error}; expected comma-separated values") from error


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as held:
            for batch in held.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"file {str(path)!r} is not a Parquet file: {error}") from error
