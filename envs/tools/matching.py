"""Do the calls of a turn say what was asked for? Own matcher over parsed calls, in the sense of BFCL's AST check.

    expected  [{"book": {"city": ["Oslo", "Oslo, Norway"], "nights": [2], "kind": ["", "hotel"]}}]
    calls     [ToolCall("book", (), {"city": "oslo", "nights": 2})]                       a match

Each expected call states alternatives for each argument; "" among them says that the argument may be left out. Texts
are compared without case, white space and ,./-_*^; an int stands for a float, but a bool for no number. Several calls
match in any order. Arguments that nobody expects, and required ones that are missing, are no match.

Source: Patil et al., 2025, BFCL, "AST evaluation". Two differences: calls are assigned to what is expected in the best
way and not the first that fits; types are checked to any depth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.tools.calls import ToolCall

Expected = Mapping[str, Mapping[str, Sequence[Any]]]  # one function name -> argument -> alternatives

_TEXT_TYPES = frozenset({"string", "str", "String"})
_INT_TYPES = frozenset({"integer", "int"})
_FLOAT_TYPES = frozenset({"float", "number", "double"})
_LIST_TYPES = frozenset({"array", "list", "tuple"})
_DICT_TYPES = frozenset({"dict", "object"})


def do_match(calls: Sequence[ToolCall], expected: Sequence[Expected], docs: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether the calls are what is expected, in whatever order.

    Args:
        calls: what the policy made
        expected: one entry a call
        docs: {"name", "parameters"} of each function that was offered
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
    """Say whether one call is the one that is expected."""
    ((name, wanted),) = expected.items()
    if call.name != name or name not in parameters:
        return False
    about = parameters[name].get("properties", {})
    given = dict(zip(about, call.args))
    if len(call.args) > len(about) or set(given) & set(call.kwargs):
        return False
    given.update(call.kwargs)
    required = set(parameters[name].get("required", ()))
    if required - set(given) or set(given) - set(wanted) or set(given) - set(about):
        return False
    if any(argument not in given and "" not in alternatives for argument, alternatives in wanted.items()):
        return False
    return all(_is_among(given[argument], wanted[argument], about[argument]) for argument in given)


def _is_among(value: Any, alternatives: Sequence[Any], about: Mapping[str, Any]) -> bool:
    return any(_is_like(value, wanted, about) for wanted in alternatives)


def _is_like(value: Any, wanted: Any, about: Mapping[str, Any]) -> bool:
    """Say whether a value has the type that is declared and says the same as the one wanted."""
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
    # Also where another type is declared: a text stands for a variable there.
    return _is_same(value, wanted)


def _is_dict_like(value: Mapping[str, Any], wanted: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Say whether a dict has the keys wanted, each with one of its alternatives."""
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
