"""Settings of environments: frozen dataclasses whose annotations say the ranges; all errors are reported at once.

@dataclass(frozen=True)
class CompareSettings(QuestionSettings):
    num_numbers: Annotated[int, Within(2, 6)] = 3  # numbers in a question
    ask: Annotated[str, OneOf("largest", "smallest")] = "largest"

read_settings(CompareSettings, {"num_numbers": 7, "ask": "first"}, "Compare")
    ValueError: env_config of Compare: num_numbers = 7; expected 2 to 6; ask = 'first'; expected one of largest, ...
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

S = TypeVar("S", bound="Settings")


@dataclass(frozen=True)
class Within:
    """Numbers from `least` to `most`; with `is_open` without `least`."""

    least: float
    most: float = math.inf
    is_open: bool = False

    def __contains__(self, value: Any) -> bool:
        return self.least <= value <= self.most and not (self.is_open and value == self.least)

    def __str__(self) -> str:
        if self.is_open:
            return f"more than {self.least}, at most {self.most}"
        return f"at least {self.least}" if self.most == math.inf else f"{self.least} to {self.most}"


class OneOf:
    """Some names."""

    def __init__(self, *names: str):
        self.names = names

    def __contains__(self, value: Any) -> bool:
        return value in self.names

    def __str__(self) -> str:
        return "one of " + ", ".join(name or "''" for name in self.names)


@dataclass(frozen=True)
class Settings:
    """Base of the settings of an environment. Invariant: those of an environment that was built have no error."""

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others; each is in its own range."""
        return []


def read_settings(settings_class: type[S], env_config: Mapping[str, Any] | None, env: str) -> S:
    """Return `settings_class` filled from `env_config`.

    Raises:
        ValueError: lists every unknown name, wrong type and value out of range, or else all errors().
    """
    names, values = [field.name for field in dataclasses.fields(settings_class)], dict(env_config or {})
    expected = ", ".join(sorted(names))
    errors = [f"{name} is not a setting; expected one of {expected}" for name in values if name not in names]
    for name in names:
        if name in values and (error := _error_of(settings_class, name, values[name])):
            errors.append(error)
    if not errors:
        settings = settings_class(**values)
        errors = settings.errors()
        if not errors:
            return settings
    raise ValueError(f"env_config of {env}: " + "; ".join(errors))


def _error_of(settings_class: type, name: str, value: Any) -> str:
    adapter, kind, ranges = _about(settings_class, name)
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return f"{name} = {value!r}; expected {kind}"
    return next((f"{name} = {value!r}; expected {bounds}" for bounds in ranges if value not in bounds), "")


@lru_cache(maxsize=1024)
def _about(settings_class: type, name: str) -> tuple[TypeAdapter[Any], str, tuple[Any, ...]]:
    """Return the validator of a setting, its type as text, and its ranges; a container may have any entries.

    Cached, because building a validator takes longer than the rest of an environment's construction.
    """
    hint = get_type_hints(settings_class)[name]
    kind = get_origin(hint) or hint
    if kind in (dict, list, tuple):
        return TypeAdapter(kind), kind.__name__, ()
    for base in settings_class.__mro__:  # a subclass that only changes the default keeps the range
        annotated = get_type_hints(base, include_extras=True).get(name)
        if get_origin(annotated) is Annotated:
            return TypeAdapter(hint), hint.__name__, get_args(annotated)[1:]
    (text,) = (str(field.type) for field in dataclasses.fields(settings_class) if field.name == name)
    return TypeAdapter(hint), text, ()
