"""Read single-turn function-call questions in BFCL's file format: questions with function descriptions, and answers.

    {"id": "parallel_0", "question": [[{"role": "user", "content": "..."}]], "function": [{"name", "parameters"}]}
    {"id": "parallel_0", "ground_truth": [{"play": {"artist": ["Taylor Swift"], "minutes": [20]}}]}

A question without a row of answers, in a file whose name contains "irrelevance", expects no call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rllib_srl.envs.functions.simulators import as_json_schema, package_dir
from rllib_srl.envs.math.data_files import lines_of
from rllib_srl.envs.rows import usable_rows
from rllib_srl.envs.tools.calls import ToolCall
from rllib_srl.envs.tools.matching import Expected, do_match

PACKAGED = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "irrelevance",
    "live_irrelevance",
)


@dataclass(frozen=True)
class CallRow:
    """One question. Invariant: `expected` is empty exactly where no function fits the request."""

    row_id: str
    request: str
    docs: tuple[Mapping[str, Any], ...]  # as the file has them, types in BFCL's words
    expected: tuple[Expected, ...]

    def gold_calls(self) -> list[ToolCall]:
        """Return one call for each expected one, with arguments that are expected and described."""
        described = {str(doc["name"]): doc["parameters"] for doc in self.docs}
        return [_call_of(expected, described) for expected in self.expected]

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return the descriptions with the type names of JSON schema."""
        return [{**doc, "parameters": as_json_schema(doc["parameters"])} for doc in self.docs]


def packaged_paths(category: str) -> tuple[str, str]:
    """Return the paths of bfcl-eval's questions and answers of a category. Raises as `package_dir`."""
    folder = package_dir() / "data"
    answers = folder / "possible_answer" / f"BFCL_v4_{category}.json"
    return str(folder / f"BFCL_v4_{category}.json"), str(answers) if answers.exists() else ""


@lru_cache(maxsize=16)
def call_rows(path: str, answers: str, skip_broken: bool) -> tuple[Mapping[str, CallRow], tuple[str, ...]]:
    """Return the rows of a file by id, and an error message for each row that is left out.

    Args:
        path: file of questions
        answers: file of possible answers; empty if no question expects a call
        skip_broken: leave broken rows out

    Raises:
        ValueError: a file is missing, or a row is broken and not skipped; the message names file, row and field.
    """
    wanted: dict[str, Any] = {}
    if answers:
        wanted = {row["id"]: row for _, row in lines_of(Path(answers)) if isinstance(row, dict) and "id" in row}
    by_id: dict[str, CallRow] = {}

    def read(row: Any) -> CallRow:
        call_row = _row(row, wanted, expects_calls=bool(answers))
        if by_id.setdefault(call_row.row_id, call_row) is not call_row:
            raise ValueError(f"field id = {call_row.row_id!r} occurs twice; expected different ids")
        return call_row

    _, errors = usable_rows(path, read, skips_broken=skip_broken)
    return by_id, errors


def _row(row: Any, wanted: Mapping[str, Any], *, expects_calls: bool) -> CallRow:
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        raise ValueError("field id is missing; expected text")
    messages = row.get("question")
    if not isinstance(messages, list) or len(messages) != 1 or not isinstance(messages[0], list):
        raise ValueError("field question; expected a list that holds one list of messages")
    contents = [message.get("content") if isinstance(message, dict) else None for message in messages[0]]
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) != len(contents):
        raise ValueError("field question; expected messages with a content that is text")
    docs = row.get("function")
    if not isinstance(docs, list) or not all(_is_doc(doc) for doc in docs):
        raise ValueError("field function; expected a list of objects with name and parameters")
    expected = wanted.get(row["id"], {}).get("ground_truth") if expects_calls else []
    if not isinstance(expected, list) or (expects_calls and not expected) or not all(map(_is_expected, expected)):
        raise ValueError("field ground_truth of its answer; expected a list of {name: {argument: [alternatives]}}")
    call_row = CallRow(row["id"], "\n".join(texts), tuple(docs), tuple(expected))
    if not do_match(call_row.gold_calls(), call_row.expected, call_row.docs):
        raise ValueError("field ground_truth of its answer; expected arguments that field function describes")
    return call_row


def _is_doc(doc: Any) -> bool:
    return isinstance(doc, dict) and isinstance(doc.get("name"), str) and isinstance(doc.get("parameters"), dict)


def _is_expected(entry: Any) -> bool:
    if not isinstance(entry, dict) or len(entry) != 1:
        return False
    (arguments,) = entry.values()
    return isinstance(arguments, dict) and all(isinstance(each, list) for each in arguments.values())


def _call_of(expected: Expected, described: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    """Return a call that matches: the first alternative of each argument, without optional ones whose first is ""."""
    ((name, arguments),) = expected.items()
    about = described.get(name, {})
    kwargs = {}
    for argument, alternatives in arguments.items():
        stated = [value for value in alternatives if value != ""]
        may_be_left_out = "" in alternatives and argument not in about.get("required", ())
        if may_be_left_out and argument not in about.get("properties", {}):
            continue
        if stated and not (may_be_left_out and alternatives[0] == ""):
            kwargs[argument] = _plain(stated[0])
        elif not may_be_left_out:
            kwargs[argument] = ""
    return ToolCall(name, (), kwargs)


def _plain(value: Any) -> Any:
    """Return one value for an alternative; each key of a dict has its own alternatives."""
    if isinstance(value, Mapping):
        first = {key: item[0] if isinstance(item, list) and item else item for key, item in value.items()}
        return {key: _plain(item) for key, item in first.items() if item != ""}
    return [_plain(item) for item in value] if isinstance(value, list) else value
