"""Looks up rules by name: the package's own, those registered by a user's script, and those given by import path.

    SELECTIONS["mine"] = rule       in the script that starts the run      replay_selection="mine"
    my_rules.py: def rule(...)      of the current directory, or installed replay_selection="my_rules:rule"
    dir/my_rules.py: def rule(...)  a file                                 replay_selection="dir/my_rules.py:rule"
    rllib_srl/contrib/greso.py      optional methods, loaded only if named replay_selection="contrib.greso"

`contrib.greso` stands for the object `greso` of that file, `contrib.trackers:wandb` for `wandb`.

A registered rule exists only in the process that registered it; other processes find a rule by its import path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any, TypeVar, cast

from rllib_srl.common.foreign_names import nearest
from rllib_srl.common.loading import CONTRIB, load, reason
from rllib_srl.common.setting_model import Settings

R = TypeVar("R")

MISTAKES = (  # exceptions of a wrong rule, unlike those of the machine, such as a lack of memory
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(NameError, RuntimeError, TypeError, ValueError),
)


class RuleError(ValueError):
    """A rule raised an exception, which is the cause."""


class Rules(dict[str, R]):
    """Rules of one kind, by name.

    Invariant: `own` holds the package's rules; every other entry was registered by a user.
    """

    def __init__(self, kind: str, rules: Mapping[str, R], inputs: str = "") -> None:
        """Start with the package's own rules; `kind` is the setting that selects one, `inputs` describes arguments."""
        super().__init__(rules)
        self.kind, self.own, self.inputs = kind, dict(rules), inputs

    def named(self, name: Any) -> R:
        """Return a rule by its name, as "contrib.file", or by its import path "module:rule".

        Raises:
            ValueError: the name is unknown, or the import path cannot be imported or is not callable.
        """
        rule, problem = self._rule_of(name)
        if problem:
            raise ValueError(f"{self.kind} = {name!r}; {problem}")
        return cast(R, rule)

    def call(self, name: Any, *arguments: Any, check: Callable[[Any], str] = lambda _: "") -> Any:
        """Call a rule that is a function, and return its result.

        `check` returns "expected ..." for a result of a user's rule that cannot be used, else "".

        Raises:
            RuleError: a user's rule raised an exception, or its result cannot be used.
            ValueError: as in `named`.
        """
        rule: Any = self.named(name)
        is_own: bool = rule is self.own.get(name)
        if is_own:
            return rule(*arguments)
        try:
            result = rule(*arguments)
        except MISTAKES as error:
            raise failure(f"{self.kind} = {name!r}", error, self.inputs) from error
        if problem := check(result):
            raise RuleError(f"{self.kind} = {name!r} returned {_described(result)}; {problem}")
        return result

    def make(self, name: Any, parameters: Mapping[str, Any]) -> Any:
        """Return a rule with its parameters: an instance of a subclass of `Settings`, or a function, which has none.

        Raises:
            ValueError: as in `named`, or a parameter that the rule lacks or that is out of its range.
        """
        rule: Any = self.named(name)
        has_parameters = isinstance(rule, type) and issubclass(rule, Settings)
        known = list(rule.model_fields) if has_parameters else []
        if unknown := sorted(set(parameters) - set(known)):
            near = nearest(unknown[0], known)
            hint = f"; did you mean {near}?" if near else ""
            expected = f"some of {', '.join(known)}{hint}" if known else "none: it has no parameters"
            raise ValueError(f"{self.kind} {name!r} has no parameters {unknown}; expected {expected}")
        if has_parameters and (errors := rule.errors(parameters)):
            raise ValueError("; ".join(errors))
        return rule(**parameters) if isinstance(rule, type) else rule

    def error(self, name: Any) -> str:
        """Return the error message "expected ..." for a name or an import path, "" if it is valid."""
        return self._rule_of(name)[1]

    def _rule_of(self, name: Any) -> tuple[Any, str]:
        """Return the rule of a name, and "" or the error message."""
        if isinstance(name, str):
            if name in self:
                return self[name], ""
            module, _, function = name.partition(":")
            path = name
            if name.startswith(CONTRIB):
                if module not in (files := contrib_files()):
                    return None, _expected(files, nearest(module, files))
                path = f"rllib_srl.{module}:{function or module.removeprefix(CONTRIB)}"
            if ":" in path:
                try:
                    rule = load(path)
                except Exception as error:  # the user's module can raise anything during import
                    return None, f"expected a rule that can be imported: {reason(error)}"
                return rule, "" if callable(rule) else f"expected a callable, not a {type(rule).__name__}"
        near = nearest(name, self) if isinstance(name, str) else ""
        if isinstance(name, str) and f"{CONTRIB}{name}" in contrib_files():
            near = f"{CONTRIB}{name}"
        return None, _expected([*sorted(self), "module:rule"], near)

    def is_users(self, name: Any) -> bool:
        """Return whether a user registered this name or replaced the package's rule of this name."""
        return isinstance(name, str) and name in self and self.own.get(name) is not self[name]


def _described(result: Any) -> str:
    """Return the type of a result and its shape, if it has one; for a tuple, the types and shapes of its items."""
    if isinstance(result, tuple):
        return f"({', '.join(map(_described, result))})"
    shape = getattr(result, "shape", None)
    return type(result).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")


def failure(title: str, error: BaseException, inputs: str = "") -> BaseException:
    """Return the `RuleError` of an exception that a rule raised, or the exception itself if it is the machine's."""
    if isinstance(error, RuntimeError) and type(error) is not RuntimeError:  # torch.OutOfMemoryError is one
        return error
    text = " ".join(str(error).split())
    return RuleError("; ".join(filter(None, [f"{title} raised {type(error).__name__}: {text}", inputs])))


def contrib_files() -> list[str]:
    """Return the names "contrib.file" of the files in rllib_srl/contrib, sorted, without importing them."""
    spec = find_spec("rllib_srl.contrib")
    places = spec.submodule_search_locations if spec else None
    return sorted(f"{CONTRIB}{module.name}" for module in iter_modules(places or []))


def _expected(names: Iterable[str], near: str) -> str:
    return f"expected one of {', '.join(map(repr, names))}" + (f"; did you mean {near!r}?" if near else "")
