"""Declares settings: default, meaning, and for a parameter of another setting the place where users give it.

    lr: float = setting(0.1, "step size")                                          a setting of its own
    loss_cap: float = setting(3.0, "cap", of="clip_rule.loss_cap", rules="dual")   clip_rule={"loss_cap": 3.0}

A setting with parameters is a *group*. Its value is a dictionary, or that of its head alone: "sm2" for {"name": "sm2"}.
Inside the package each parameter has a flat name of its own; `Group.spread` returns values by these names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """A setting or a parameter of one."""

    default: Any
    meaning: str  # with the unit
    of: str = ""  # "group.parameter", where users give it; "": a setting of its own; "group.*": all other parameters
    rules: tuple[str, ...] = ()  # values of the group's head that read it; (): all
    is_head: bool = False  # its value alone stands for the group

    @property
    def group(self) -> str:
        """The setting that users give, "" for a setting of its own."""
        return self.of.partition(".")[0]

    @property
    def parameter(self) -> str:
        """The name of the parameter within its group."""
        return self.of.partition(".")[2]


def setting(default: Any, meaning: str, of: str = "", rules: str = "", is_head: bool = False) -> Any:
    """Return a field of a dataclass of settings.

    Args:
        default: default value; a dict is copied for each instance.
        meaning: unit and meaning, as docs/settings.md prints it.
        of: see `Setting`, as are the others.
        rules: separated by spaces.
        is_head: see `Setting`.
    """
    metadata = {"setting": partial(Setting, meaning=meaning, of=of, rules=tuple(rules.split()), is_head=is_head)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=partial(dict, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def table_of(settings: Any) -> dict[str, Setting]:
    """Return flat name -> `Setting` of each field of a dataclass that `setting` made."""
    defaults = settings()
    fields = [field for field in dataclasses.fields(settings) if "setting" in field.metadata]
    return {field.name: field.metadata["setting"](getattr(defaults, field.name)) for field in fields}


def prefixed(table: Mapping[str, Setting], prefix: str) -> dict[str, Setting]:
    """Return a table with `prefix` before each name and place."""
    return {f"{prefix}{name}": row._replace(of=row.of and f"{prefix}{row.of}") for name, row in table.items()}


@dataclass(frozen=True)
class Group:
    """A setting with parameters. Invariant: `flat` holds the head, first, and every parameter but those of `rest`."""

    name: str
    head: str  # key of the head, often "name"
    flat: Mapping[str, str]  # parameter -> flat name
    table: Mapping[str, Setting]  # the rows of these flat names
    rest: str = ""  # flat name of the dictionary of all other parameters, "" if there are none

    def given(self, value: Any) -> dict[str, Any]:
        """Return a value of the setting as a dictionary; one that lacks the head of a switch turns it on."""
        if not isinstance(value, Mapping):
            return {self.head: value}
        is_switch = isinstance(self.table[self.flat[self.head]].default, bool)
        return {self.head: True, **value} if is_switch else dict(value)

    def spread(self, value: Any) -> dict[str, Any]:
        """Return the value of each flat name, defaults where a value is not given."""
        given = self.given(value)
        values = {flat: given.pop(key, self.table[flat].default) for key, flat in self.flat.items()}
        return {**values, self.rest: given} if self.rest else values

    def default(self, key: str) -> Any:
        """Return the default of a parameter; `NotImplemented`, equal to no value, for one of `rest`."""
        return self.table[self.flat[key]].default if key in self.flat else NotImplemented

    def readers(self, key: str) -> tuple[str, ...]:
        """Return the rules that read a parameter; () if all do."""
        return self.table[self.flat[key]].rules if key in self.flat else ()


def groups_of(table: Mapping[str, Setting]) -> dict[str, Group]:
    """Return setting -> group for each setting of the table that has parameters."""
    groups = {}
    for head, row in table.items():
        if row.is_head:
            members = {name: other for name, other in table.items() if other.group == row.group}
            flat = {row.parameter: head} | {other.parameter: name for name, other in members.items()}
            rest = flat.pop("*", "")
            groups[row.group] = Group(row.group, row.parameter, flat, members, rest)
    return groups


def public(table: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the settings that users give: each group once, with default and meaning of its head."""
    return {row.group or name: row for name, row in table.items() if row.is_head or not row.of}
