"""Compare the calls of a turn with the expected calls: our own matcher over parsed calls, after BFCL's AST check.

    expected  [{"book": {"city": ["Oslo", "Oslo, Norway"], "nights": [2], "kind": ["", "hotel"]}}]
    calls     [ToolCall("book", (), {"city": "oslo", "nights": 2})]                       a match

Each expected call lists alternatives for each argument; "" among them means that the argument may be left out. Texts
are compared without case, white space and ,./-_*^; an int matches a float, but a bool matches no number. Several calls
match in any order. Unexpected arguments, and missing required ones, do not match.

Source: Patil et al., 2025, BFCL, "AST evaluation". Two differences:
1. Calls are assigned to expected calls by an optimal matching, not to the first that fits.
2. Types are checked to any depth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rllib_srl.envs.tools.calls import ToolCall

Expected = Mapping[str, Mapping[str, Sequence[Any]]]  # one function name -> argument -> alternatives

_TEXT_TYPES = frozenset({"string", "str", "String"})
_INT_TYPES = frozenset({"integer", "int"})
_FLOAT_TYPES = frozenset({"float", "number", "double"})
_LIST_TYPES = frozenset({"array", "list", "tuple"})
_DICT_TYPES = frozenset({"dict", "object"})


def do_match(calls: Sequence[ToolCall], expected: Sequence[Expected], docs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the calls are the expected ones, in any order.

    Args:
        calls: made by the policy
        expected: one entry per call
        docs: {"name", "parameters"} of each offered function
    """
    if len(calls) != len(expected):
        return False
    parameters = {str(doc["name"]): doc["parameters"] for doc in docs}
    fits = [[fits_call(call, wanted, parameters) for wanted in expected] for call in calls]
    taken_by: dict[int, int] = {}
    return all(_assign(call, fits, taken_by, set()) for call in range(len(calls)))


def _assign(call: int, fits: Sequence[Sequence[bool]], taken_by: dict[int, int], tried: set[int]) -> bool:
    """Find a place for a call, moving earlier ones where that helps (augmenting paths, Kuhn 1955)."""
    for wanted, does_fit in enumerate(fits[call]):
        if does_fit and wanted not in tried:
            tried.add(wanted)
            if wanted not in taken_by or _assign(taken_by[wanted], fits, taken_by, tried):
                taken_by[wanted] = call
                return True
    return False


def fits_call(call: ToolCall, expected: Expected, parameters: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether a call matches an expected call."""
    ((name, wanted),) = expected.items()
    if call.name != name or name not in parameters:
        return False
    about = parameters[name].get("properties", {})
    arguments = dict(zip(about, call.args))
    if len(call.args) > len(about) or set(arguments) & set(call.kwargs):
        return False
    arguments.update(call.kwargs)
    required = set(parameters[name].get("required", ()))
    if required - set(arguments) or set(arguments) - set(wanted) or set(arguments) - set(about):
        return False
    if any(argument not in arguments and "" not in alternatives for argument, alternatives in wanted.items()):
        return False
    return all(_is_among(arguments[argument], wanted[argument], about[argument]) for argument in arguments)


def _is_among(value: Any, alternatives: Sequence[Any], about: Mapping[str, Any]) -> bool:
    return any(_is_like(value, wanted, about) for wanted in alternatives)


def _is_like(value: Any, wanted: Any, about: Mapping[str, Any]) -> bool:
    """Return whether a value has the declared type and equals the expected value."""
    kind = about.get("type", "any")
    if kind in _LIST_TYPES and isinstance(wanted, (list, tuple)):
        items = about.get("items") or {}
        return (
            isinstance(value, (list, tuple) if kind == "tuple" else list)
            and len(value) == len(wanted)
            and all(_is_like(one, other, items) for one, other in zip(value, wanted))
        )
    if kind in _DICT_TYPES and isinstance(wanted, Mapping):
        return isinstance(value, dict) and _is_dict_like(value, wanted, about)
    if kind in _FLOAT_TYPES and _is_number(wanted):
        return _is_number(value) and value == wanted
    if kind in _INT_TYPES and _is_number(wanted):
        return isinstance(value, int) and not isinstance(value, bool) and value == wanted
    # Also if another type is declared: there a text stands for a variable.
    return _is_same(value, wanted)


def _is_dict_like(value: Mapping[str, Any], wanted: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Return whether a dict has the expected keys, each with one of its alternatives."""
    if set(value) - set(wanted):
        return False
    inner = about.get("properties") or {}
    for key, alternatives in wanted.items():
        if not isinstance(alternatives, (list, tuple)):
            alternatives = [alternatives]
        if key not in value:
            if "" not in alternatives:
                return False
        elif not _is_among(value[key], alternatives, inner.get(key, {})):
            return False
    return True


def _is_same(value: Any, wanted: Any) -> bool:
    if isinstance(value, str) or isinstance(wanted, str):
        return isinstance(value, str) and isinstance(wanted, str) and _plain(value) == _plain(wanted)
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(wanted, (list, tuple)):
        return isinstance(value, (list, tuple)) and len(value) == len(wanted) and all(map(_is_same, value, wanted))
    if isinstance(wanted, Mapping):
        return isinstance(value, dict) and _is_dict_like(value, wanted, {})
    return bool(value == wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
