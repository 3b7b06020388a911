"""Reads JSON objects into dataclasses by pydantic: no field missing, of a wrong type, or unknown.

A dataclass that is read this way, and those in it, have the class attribute `__pydantic_config__ = STRICT`.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def faults_of(kind: type, value: Any) -> list[str]:
    """Return an error message for each field of a JSON object that does not match dataclass `kind`."""
    try:
        read_object(kind, value)
    except ValueError as error:
        return str(error).split("\n")
    return []


def read_object(kind: type[T], value: Any) -> T:
    """Convert a JSON object to a dataclass.

    Raises:
        ValueError: all errors, one per line.
    """
    adapter: TypeAdapter[T] = _adapter(kind)
    try:
        return adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        raise ValueError("\n".join(map(_line, error.errors()))) from None


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return _adapter_of(kind)


@lru_cache
def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _line(error: Any) -> str:
    name = ".".join(map(str, error["loc"])) or "value"
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] == "unexpected_keyword_argument":
        return f"{name} is unknown"
    return f"{name} = {error['input']!r}; expected {error['msg'].removeprefix('Input should be ')}"
