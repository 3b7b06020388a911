"""Checks the values of settings; each error message is "name = value; expected ...".

    list(of_integers(settings, {"capacity": 0}))   ->  ["capacity = -1; expected an integer of at least 0"]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: Any, least: int) -> bool:
    """Return whether a value is an integer of at least `least`, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def are_numbers(value: Any, num: int) -> bool:
    """Return whether a value is a sequence of `num` finite numbers."""
    return isinstance(value, tuple | list) and len(value) == num and all(map(is_number, value))


def of_integers(settings: Any, least: Mapping[str, int]) -> Iterator[str]:
    """Yield an error message for each attribute that is no integer of at least the given number."""
    for name, low in least.items():
        if not is_integer(getattr(settings, name), low):
            yield f"{name} = {getattr(settings, name)!r}; expected an integer of at least {low}"


def of_ranges(settings: Any, within: Mapping[str, tuple[float, float, str]]) -> Iterator[str]:
    """Yield an error message for each attribute that is no number in a range.

    Args:
        settings: the object.
        within: name -> (lowest, highest, text of the message); None is valid if the text ends with "None".
    """
    for name, (low, high, expected) in within.items():
        value = getattr(settings, name)
        is_none = value is None and expected.endswith("None")
        if not is_none and not (is_number(value) and low <= value <= high):
            yield f"{name} = {value!r}; expected {expected}"


def check_within(rule: Any, within: Mapping[str, tuple[float, float, str]]) -> None:
    """Check the parameters of a rule.

    Args:
        rule: the object.
        within: as in `of_ranges`.

    Raises:
        ValueError: naming every parameter out of its range.
    """
    if faults := list(of_ranges(rule, within)):
        raise ValueError("; ".join(faults))


def of_choices(settings: Any, choices: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yield an error message for each attribute that is none of the given values."""
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            yield f"{name} = {getattr(settings, name)!r}; expected one of {', '.join(map(repr, allowed))}"


def of_switches(settings: Any, names: Iterable[str]) -> Iterator[str]:
    """Yield an error message for each attribute that is no bool."""
    for name in names:
        if not isinstance(getattr(settings, name), bool):
            yield f"{name} = {getattr(settings, name)!r}; expected True or False"
