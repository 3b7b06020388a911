"""Validates JSON objects against dataclasses and converts them: no field missing, of a wrong type, or unknown.

Supported field types: str, int, float, bool, `X | None`, `dict[str, Any]`, `dict[str, float]`,
`tuple[str, ...]`, `tuple[int, ...]`, and tuples of other such dataclasses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
WORDS = {str: "a text", int: "a whole number", float: "a finite number", bool: "true or false"}


def faults_of(kind: type, value: Any, name: str = "") -> list[str]:
    """Return an error message for each field of a JSON object that does not match dataclass `kind`.

    Args:
        kind: a dataclass.
        value: a value from `json.loads`.
        name: prefix of field names in messages, such as "arms[0]."
    """
    if not isinstance(value, Mapping):
        return [f"{name.rstrip('.') or 'value'} = {value!r}; expected an object with the fields of {kind.__name__}"]
    hints, known = _hints(kind), {field.name: field for field in fields(kind)}
    faults = [f"{name}{key} is unknown; expected one of {', '.join(known)}" for key in value if key not in known]
    for key, field in known.items():
        if key in value:
            faults += _faults_of_value(hints[key], value[key], f"{name}{key}")
        elif field.default is MISSING and field.default_factory is MISSING:
            faults.append(f"{name}{key} is missing; expected {_words(hints[key])}")
    return faults


def read_object(kind: type[T], value: Any) -> T:
    """Convert a JSON object to a dataclass.

    Raises:
        ValueError: all errors of `faults_of`, one per line.
    """
    if faults := faults_of(kind, value):
        raise ValueError("\n".join(faults))
    hints: dict[str, Any] = _hints(kind)
    return kind(**{key: _converted(hints[key], entry) for key, entry in value.items()})


def _hints(kind: Any) -> dict[str, Any]:
    return _hints_of(kind)


@lru_cache
def _hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _faults_of_value(hint: Any, value: Any, name: str) -> list[str]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        inner = next(argument for argument in arguments if argument is not type(None))
        return [] if value is None else _faults_of_value(inner, value, name)
    if is_dataclass(hint):
        return faults_of(hint, value, f"{name}.")  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, list):
            return [f"{name} = {value!r}; expected a list"]
        return [line for i, entry in enumerate(value) for line in _faults_of_value(arguments[0], entry, f"{name}[{i}]")]
    if origin is dict:
        if not isinstance(value, Mapping):
            return [f"{name} = {value!r}; expected an object"]
        if arguments[1] is Any:
            return []
        return [line for key, entry in value.items() for line in _faults_of_value(arguments[1], entry, f"{name}.{key}")]
    return [] if _is_plain(hint, value) else [f"{name} = {value!r}; expected {_words(hint)}"]


def _is_plain(hint: Any, value: Any) -> bool:
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    if get_origin(hint) is UnionType:
        return " or ".join("null" if argument is type(None) else _words(argument) for argument in get_args(hint))
    return WORDS.get(hint, "a list" if get_origin(hint) is tuple else "an object")


def _converted(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return value if value is None else _converted(arguments[0], value)
    if is_dataclass(hint):
        return read_object(hint, value)  # type: ignore[arg-type]
    if origin is tuple:
        return tuple(_converted(arguments[0], entry) for entry in value)
    return float(value) if hint is float else value
