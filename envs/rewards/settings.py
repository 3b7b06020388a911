"""What a user says about reward functions: a name, several, or dictionaries with weight, form and range.

    reward = "my_module:f"                      reward = "path/to/file.py:f"        reward = "http://localhost:9000/score"
    reward = [{"function": "my_module:right", "weight": 0.8}, {"function": "my_module:short", "weight": 0.2}]

The reward of an episode is the weighted mean of its functions' values, each mapped from its range to [0, 1].
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FORMS = ("row", "trl", "verl", "batch")
ON_ERROR = ("stop", "drop")
_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class RewardSettings:
    """One reward function. Invariant: `errors` is empty for the settings of a loaded function."""

    function: str  # "module:f", "file.py:f", or a URL
    name: str = ""  # of its metric; "": the function's own
    weight: float = 1.0  # among the functions
    form: str = "row"  # f(prompt, answer, row), or the arguments of "trl", "verl" or "batch"
    low: float = 0.0  # value that earns 0
    high: float = 1.0  # value that earns 1

    @property
    def is_remote(self) -> bool:
        """Return whether the function is a server."""
        return self.function.startswith(("http://", "https://"))

    @property
    def label(self) -> str:
        """Return the name of the metric."""
        if self.name:
            return self.name
        last = self.function.rstrip("/").rpartition("/")[2] if self.is_remote else self.function.rpartition(":")[2]
        return _NAME.sub("_", last)

    def errors(self) -> Iterator[str]:
        """Yield one error message for each field out of its range."""
        if not self.is_remote and not re.fullmatch(r".+:[A-Za-z_][\w.]*", self.function):
            yield f"function = {self.function!r}; expected 'module:f', 'path/to/file.py:f' or a URL"
        if self.name and _NAME.search(self.name):
            yield f"name = {self.name!r}; expected letters, digits, '_', '.' and '-'"
        if self.form not in FORMS:
            yield f"form = {self.form!r}; expected one of {', '.join(FORMS)}"
        elif self.is_remote and self.form != "row":
            yield f"form = {self.form!r}; expected 'row' for a URL"
        if not 0 < self.weight < math.inf:
            yield f"weight = {self.weight}; expected a number above 0"
        if not -math.inf < self.low < self.high < math.inf:
            yield f"low = {self.low}, high = {self.high}; expected low < high"


def read_rewards(given: str | Mapping[str, Any] | Sequence[Any]) -> tuple[list[RewardSettings], list[str]]:
    """Return the settings of each function, and an error message for each one that cannot be used.

    Args:
        given: a function, or a list of functions; each a text or a mapping with the fields of `RewardSettings`
    """
    entries = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    functions, errors = [], [] if entries else ["reward = []; expected at least one function"]
    for entry in entries:
        values = {"function": entry} if isinstance(entry, str) else entry
        if wrong := list(_errors_of_types(values)):
            errors += [f"reward: {error}" for error in wrong]
            continue
        settings = RewardSettings(**values)
        errors += [f"reward {settings.function!r}: {error}" for error in settings.errors()]
        functions.append(settings)
    labels = [each.label for each in functions]
    errors += [
        f"reward: two functions have the name {label!r}; set 'name' of one of them"
        for label in sorted({label for label in labels if labels.count(label) > 1})
    ]
    return functions, errors


def _errors_of_types(entry: Any) -> Iterator[str]:
    if callable(entry):
        yield f"{entry!r} is a function object; set it by .reward(f), or name it as 'module:f'"
        return
    if not isinstance(entry, Mapping):
        yield f"{entry!r} is a {type(entry).__name__}; expected 'module:f', 'file.py:f', a URL, or a mapping"
        return
    types: dict[str, Any] = {
        field.name: (float, int) if field.type == "float" else str for field in dataclasses.fields(RewardSettings)
    }
    if "function" not in entry:
        yield f"{dict(entry)!r} has no 'function'; expected 'module:f', 'file.py:f' or a URL there"
    for name, value in entry.items():
        if name not in types:
            yield f"{name} is not a field; expected some of {', '.join(types)}"
        elif not isinstance(value, types[name]) or isinstance(value, bool):
            yield f"{name} = {value!r}; expected {'text' if types[name] is str else 'a number'}"
