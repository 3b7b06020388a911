"""The data types of tool use, and the parsing of a call's text into a name and plain values.

    add(2, b=[3])                              ->  ToolCall("add", (2,), {"b": [3]})
    {"name": "add", "arguments": {"a": 2}}     ->  ToolCall("add", (), {"a": 2})

A policy's text is parsed by `ast` or `json` and never evaluated: an argument that is not a literal (number, quoted
text, True, False, None, list, tuple, dict) is refused, with a message that the policy can act on.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_CALL_CHARS = 20_000  # of the text of one call; the parser's time and stack grow with it

_FILE = "<tool call>"
# The parser warns about escapes such as "\d" in the policy's text; the warnings are of no use here.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=re.escape(_FILE))


class CallError(ValueError):
    """A call that cannot be read or run; the message is shown to the policy."""


class ToolTimeoutError(Exception):
    """A call that exceeded its deadline; also raised by tools with their own deadline."""


class ToolServerError(RuntimeError):
    """The server of a tool failed; the episode is lost."""


@dataclass(frozen=True)
class ToolCall:
    """One call, read but not yet checked against its tool.

    Invariant: `args` and `kwargs` hold plain values only (JSON values and tuples).
    """

    name: str
    args: tuple[Any, ...] = ()  # by position
    kwargs: dict[str, Any] = field(default_factory=dict)  # by name
    is_text: bool = False  # every value is text whose type the tool decides, as in XML and in bare calls


@dataclass(frozen=True)
class Said:
    """The content of one turn: calls, or an answer, or nothing readable.

    Invariant: `error` is empty unless the turn can be read neither as calls nor as an answer.
    """

    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None  # the final answer; None if the format cannot identify it
    text: str = ""  # text besides calls
    error: str = ""  # error message, shown to the policy if the environment forgives the turn


def parsed_calls(text: str) -> list[ToolCall]:
    """Parse `f(1, b="x")`, `[f(1), g()]` or `f(1); g()` into calls.

    Raises:
        CallError: the text is not a call, or an argument is not a literal.
    """
    tree = _parsed(text)
    calls: list[ToolCall] = []
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        nodes = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
        for node in nodes:
            if not isinstance(node, ast.Call):
                raise CallError("expected a call such as name(value, key=value)")
            calls.append(_call(node))
    if not calls:
        raise CallError("expected a call such as name(value, key=value)")
    return calls


def call_from_json(value: Any) -> ToolCall:
    """Return the call of a JSON object, in any of the layouts that chat templates use.

    {"name", "arguments"} (Qwen, Hermes), {"name", "parameters"} (Llama), {"function": {"name", "arguments": "..."}}
    (OpenAI: the arguments are text that holds JSON).

    Raises:
        CallError: it is none of these.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("function")) if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise CallError('expected an object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = loaded(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise CallError(f'"arguments" of {shown(name)} is {_kind(arguments)}; expected an object')
    return ToolCall(name, (), arguments)


def loaded(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        CallError: it is not JSON, too long, too deep, or has a duplicate key or a number that is not finite.
    """
    value, end = loaded_at(text, 0)
    if text[end:].strip():
        raise CallError(f"after the JSON follows {shown(text[end:].strip())}; expected nothing")
    return value


def loaded_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start` and where it ends. Raises as `loaded`."""
    if len(text) - start > MAX_CALL_CHARS:
        raise CallError(f"{len(text) - start} characters; expected at most {MAX_CALL_CHARS}")
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return _DECODER.raw_decode(text, start)
    except CallError:
        raise
    except (ValueError, RecursionError) as error:
        raise CallError(f"cannot be read as JSON: {_reason(error)}") from None


def shown(text: str, num_chars: int = 60) -> str:
    """Return `text` quoted; a long text is cut and its number of characters added."""
    if len(text) <= num_chars:
        return ascii(text)
    return f"{text[:num_chars]!a}... ({len(text)} characters)"


def written_call(call: ToolCall) -> str:
    """Return the call as Python writes it."""
    parts = [repr(value) for value in call.args] + [f"{name}={value!r}" for name, value in call.kwargs.items()]
    return f"{call.name}({', '.join(parts)})"


def _parsed(text: str) -> ast.Module:
    if len(text) > MAX_CALL_CHARS:
        raise CallError(f"{len(text)} characters; expected at most {MAX_CALL_CHARS}")
    try:
        return ast.parse(text.strip(), filename=_FILE)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CallError(f"cannot be read: {_reason(error)}; expected a call such as name(value, key=value)") from None


def _call(node: ast.Call) -> ToolCall:
    args = tuple(_literal(argument, "argument") for argument in node.args)
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in kwargs:
            raise CallError(f"argument {keyword.arg or '**'} cannot be read; expected each name once")
        kwargs[keyword.arg] = _literal(keyword.value, keyword.arg)
    return ToolCall(_dotted(node.func), args, kwargs)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise CallError("expected the name of a tool before the bracket")
    return ".".join([node.id, *reversed(parts)])


def _literal(node: ast.expr, name: str) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        kind = type(node).__name__.lower()
        raise CallError(f"{name} is a {kind}; expected a number, text in quotes, a list or another literal") from None
    if not _is_plain(value):
        raise CallError(f"{name} is {_kind(value)}; expected a number, text, True, False, None, a list or a dict")
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"


def _reason(error: BaseException) -> str:
    if isinstance(error, (RecursionError, MemoryError)):
        return "too deeply nested"
    return str(getattr(error, "msg", error)).splitlines()[0][:120]


def _once(pairs: Sequence[tuple[str, Any]]) -> Mapping[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise CallError("cannot be read as JSON: a key appears twice")
    return value


def _refused(constant: str) -> Any:
    raise CallError(f"cannot be read as JSON: {constant} is not a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refused)
