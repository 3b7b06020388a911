"""A part's settings as one pydantic model: default, range and meaning of each stand once, at its field.

    class PartSettings(Settings):
        clip_rule: Literal["higher", "dual"] = setting("higher", "rule that bounds the ratio")
        dual_clip: float = setting(3.0, "cap on the loss of a token", needs="clip_rule dual", gt=1)

    PartSettings.table()                          name -> `Setting`: flags, documents and Tune's names come from it
    PartSettings.errors({"dual_clip": 1})         ["dual_clip = 1; expected a number above 1"]
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, Strict, ValidationError

from rllib_srl.common.foreign_names import nearest

PRESET = "preset"  # value of a setting that the user leaves to the named algorithm or loss

Pair = Annotated[tuple[float, float], Strict(False)]  # a list is accepted as a tuple
Part = TypeVar("Part", bound="Settings")
Clash = tuple[Any, str, str]  # see `clashes`


class Setting(NamedTuple):
    """A setting, as its field declares it."""

    default: Any
    meaning: str  # with the unit
    kind: Any = Any  # its annotation
    needs: tuple[str, ...] = ()  # the setting on which it depends, and the values of that one with which it is read
    needed: str = ""  # `needs` as text: "clip_rule = 'dual'"
    is_preset: bool = False  # a named algorithm may set it
    is_rllib: bool = False  # it belongs to RLlib

    @property
    def initial(self) -> Any:
        """The value in a new `SRLConfig`."""
        return PRESET if self.is_preset else self.default

    @property
    def is_mapping(self) -> bool:
        """Whether its value is a dictionary."""
        return any(get_origin(kind) is dict for kind in (self.kind, *get_args(self.kind)))

    def is_read(self, value: Any) -> bool:
        """Return whether it has an effect with this value of the setting it needs: a listed one, or any that is on."""
        return str(value) in self.needs[1:] if self.needs[1:] else value not in (0, "none")


def setting(default: Any, meaning: str, expected: str = "", **arguments: Any) -> Any:
    """Return a field of `Settings`.

    Args:
        default: default value.
        meaning: unit and meaning, as docs/settings.md prints it.
        expected: valid values, for errors; "": derived from type and range.
        arguments: `needs` (separated by spaces), `is_preset` and `is_rllib` of `Setting`; and limits of pydantic: ge,
            gt, le, lt, min_length.
    """
    row = {name: arguments.pop(name) for name in Setting._fields if name in arguments}
    row["needs"] = tuple(row.get("needs", "").split())
    extra: dict[str, Any] = {"row": row, "expected": expected}
    return Field(default, description=meaning, json_schema_extra=extra, **arguments)


def by(error: Callable[[Any], str]) -> PlainValidator:
    """Return a validator from a function that returns "expected ..." for a wrong value and "" for a right one."""

    def check(value: Any) -> Any:
        if text := error(value):
            raise ValueError(text)
        return value

    return PlainValidator(check)


def where(is_right: Callable[..., bool]) -> AfterValidator:
    """Return a validator: `is_right` gets a value, or the parts of a pair; errors have the field's `expected`."""

    def check(value: Any) -> Any:
        if not (is_right(*value) if isinstance(value, tuple) else is_right(value)):
            raise ValueError
        return value

    return AfterValidator(check)


class SettingErrors(ValueError):
    """Values outside their ranges. Invariant: `lines` is name -> "name = value; expected ..."."""

    def __init__(self, lines: Mapping[str, str]) -> None:
        super().__init__("\n  ".join(["invalid settings:", *lines.values()]))
        self.lines = lines


class Settings(BaseModel):
    """Settings of one part. Invariant: each value is within its range; `errors` also checks them together."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    prefix: ClassVar[str] = ""  # prefix of the names in SRLConfig

    def __init__(self, **values: Any) -> None:
        """Take values by name; others have their defaults.

        Raises:
            SettingErrors: naming every value of a wrong type or outside its range.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingErrors(self._lines(values, error)) from None

    @classmethod
    @cache
    def table(cls) -> dict[str, Setting]:
        """Return name, with the prefix of this part, -> `Setting`."""
        rows = {}
        for name, field in cls.model_fields.items():
            if isinstance(field.json_schema_extra, dict):
                row: dict[str, Any] = dict(field.json_schema_extra["row"])  # type: ignore[arg-type]
                row["needed"] = cls._needed(*row["needs"]) if row["needs"] else ""
                meaning = f"{field.description}{f'; only with {cls.prefix}' if row['needs'] else ''}{row['needed']}"
                default = field.get_default(call_default_factory=True)
                rows[cls.prefix + name] = Setting(default, meaning, field.annotation, **row)
        return rows

    @classmethod
    def errors(cls, values: Mapping[str, Any], prefix: str = "") -> list[str]:
        """Return all errors of the values and of their combination, each "name = value; expected ..."."""
        wrong, together = cls.split_errors(values)
        return [f"{prefix}{line}" for line in (*wrong.values(), *together)]

    @classmethod
    def split_errors(cls, values: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
        """Return name -> error of each invalid value, and the errors of combinations of the others."""
        values = {name: value for name, value in values.items() if not cls._is_default(name, value)}
        try:
            made, wrong = cls(**values), {}
        except SettingErrors as error:
            wrong = dict(error.lines)
            made = cls(**{name: value for name, value in values.items() if name not in wrong})
        return wrong, [line for line in made.contradictions() if not names_any(line, wrong)]

    def contradictions(self) -> Iterable[str]:
        """Return the errors of conflicting settings; each value is within its range."""
        return clashes(unread(type(self), self, self), self)

    def checked(self: Part) -> Part:
        """Return these settings; a ValueError lists all errors."""
        if errors := self.errors(vars(self)):
            raise ValueError(f"{type(self).__name__} is invalid:\n  " + "\n  ".join(errors))
        return self

    @classmethod
    def _needed(cls, name: str, *values: str) -> str:
        """Return as text which values of a setting are on."""
        if values:
            return f"{name} = {' or '.join(map(repr, values))}"
        off = cls.model_fields[name].default
        return f"{name} {'= True' if off is False else 'above 0' if is_number(off) else f'other than {off!r}'}"

    @classmethod
    def _is_default(cls, name: str, value: Any) -> bool:
        default = cls.model_fields[name].default if name in cls.model_fields else ...
        return type(value) is type(default) and bool(value == default)

    @classmethod
    def _lines(cls, values: Mapping[str, Any], error: ValidationError) -> dict[str, str]:
        """Return name -> "name = value; expected ..." of pydantic's errors."""
        wrong: dict[str, str] = {}
        for detail in error.errors():
            name = str(detail["loc"][0])
            if detail["type"] == "extra_forbidden":
                near = nearest(name, cls.model_fields)
                wrong[name] = "expected no setting of that name" + (f"; did you mean {near}?" if near else "")
            elif detail["type"] == "value_error" and (text := str(detail["ctx"]["error"])):
                wrong[name] = text
            else:
                near = nearest(str(values[name]), _choices(cls.model_fields[name].annotation))
                hint = f"; did you mean {near!r}?" if near else ""
                wrong.setdefault(name, f"expected {expected(cls, name)}{hint}")
        return {name: f"{name} = {values[name]!r}; {text}" for name, text in wrong.items()}


def clashes(rows: Iterable[Clash], *sources: Any) -> Iterator[str]:
    """Yield "a = 1 with b = 2; expected ..." for each row whose condition is true.

    Args:
        rows: condition, names of settings separated by spaces, and what is expected instead.
        sources: objects with the settings as attributes; the first that has one counts.
    """
    for is_wrong, names, instead in rows:
        if is_wrong:
            owners = {name: next(source for source in sources if hasattr(source, name)) for name in names.split()}
            first, *others = (f"{name} = {getattr(owner, name)!r}" for name, owner in owners.items())
            yield f"{first}{' with ' * bool(others)}{' and '.join(others)}; expected {instead}"


def unread(model: type[Settings], chosen: Any, final: Any) -> Iterator[Clash]:
    """Yield each setting that was changed, and whether the one that it needs rules it out.

    `chosen` has the settings as they were given, `final` with the values of presets.
    """
    for name, row in ((name.removeprefix(model.prefix), row) for name, row in model.table().items()):
        if row.needs and getattr(chosen, name) != row.initial:
            needed = row.needs[0]
            yield not row.is_read(getattr(final, needed)), f"{name} {needed}", f"it only with {row.needed}"


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: Any, least: int) -> bool:
    """Return whether a value is an integer of at least `least` and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def names_any(line: str, names: Collection[str]) -> bool:
    """Return whether an error message names any of some settings."""
    return bool(names) and bool(re.search(rf"\b({'|'.join(map(re.escape, names))})\b", line))


def expected(model: type[Settings], name: str) -> str:
    """Return the valid values of a field as text: "a number in (0, 1], or None"."""
    field = model.model_fields[name]
    extra = field.json_schema_extra
    if isinstance(extra, dict) and extra["expected"]:
        return str(extra["expected"])
    limits = {
        key: getattr(limit, key) for limit in field.metadata for key in ("ge", "gt", "le", "lt") if hasattr(limit, key)
    }
    words = _words(field.annotation, limits)
    return words + (", or None" if field.default is None and "None" not in words else "")


def _choices(kind: Any) -> list[str]:
    """Return the texts that an annotation allows."""
    parts = [part for form in get_args(kind) for part in (get_args(form) or [form])]
    return [part for part in parts if isinstance(part, str)]


def _words(kind: Any, limits: Mapping[str, float]) -> str:
    names = [repr(value) for value in get_args(kind)]
    if hasattr(kind, "__metadata__"):  # Annotated
        return _words(get_args(kind)[0], limits)
    if get_origin(kind) in (Union, types.UnionType):
        last = sorted(get_args(kind), key=lambda part: (part is type(None), str(part).startswith("typing.Literal")))
        return ", or ".join(_words(part, limits) for part in last)
    if str(kind).startswith("typing.Literal"):
        return ("one of " if len(names) > 1 else "") + ", ".join(names)
    if kind is type(None):
        return "None"
    if kind is bool:
        return "True or False"
    if kind is int:
        return f"an integer of at least {limits['ge']}" if "ge" in limits else "an integer"
    if kind is float:
        return f"a number{_range(limits)}"
    return "a text" if kind is str else f"a {getattr(kind, '__name__', kind)}"


def _range(limits: Mapping[str, float]) -> str:
    low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    if low is not None and high is not None:
        return f" in {'[' if 'ge' in limits else '('}{low:g}, {high:g}{']' if 'le' in limits else ')'}"
    if low is None:
        return "" if high is None else f" of at most {high:g}"
    return f" of at least {low:g}" if "ge" in limits else f" above {low:g}"
