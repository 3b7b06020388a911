"""Send rules that a script registered to the buffer's process, which may be unable to import them.

    sent(settings) -> a reference to them, functions and classes of the user's modules by value -> received(...)
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import ray
from ray import cloudpickle

from rllib_srl.replay.settings import ReplaySettings, users_rules

TIMEOUT_S = 60.0


def sent(settings: ReplaySettings) -> list[ray.ObjectRef[dict[str, Any]]]:
    """Return a reference to the rules that the settings name and only this process has registered; [] without any.

    In a list only the constructor of an actor fetches it; Ray passes it again to every restarted actor.

    Raises:
        ValueError: a rule cannot be pickled; the message names it and the reason.
    """
    rules = users_rules(settings)
    with ExitStack() as by_value:
        for name, rule in rules.items():
            by_value.enter_context(_by_value(rule))
            try:
                cloudpickle.dumps(rule)
            except Exception as error:  # of any type: pickling runs user-defined `__reduce__` methods
                fault = f"expected a rule that can be pickled, or an import path: {type(error).__name__}: {error}"
                raise ValueError(f"replay_{name} = {rule!r}; {fault}") from error
        return [ray.put(rules)] if rules else []


def received(rules: Sequence[ray.ObjectRef[dict[str, Any]]]) -> dict[str, Any]:
    """Return the rules that another process sent.

    Raises:
        ValueError: a module that a rule needs cannot be imported here.
    """
    try:
        return ray.get(rules[0], timeout=TIMEOUT_S) if rules else {}
    except ray.exceptions.RaySystemError as error:
        raise ValueError(
            f"rules registered in the script cannot be loaded in the buffer's process: {error}; expected rules that "
            'need nothing it cannot import, or "module:rule"'
        ) from error


@contextmanager
def _by_value(rule: Any) -> Iterator[None]:
    """Context in which functions and classes of a rule's modules are pickled by value, not by name."""
    parts = [rule, getattr(rule, "func", None), *(() if isinstance(rule, type) else vars(rule).values())]
    found = [sys.modules.get(str(getattr(part, "__module__", None))) for part in parts if callable(part)]
    known = cloudpickle.list_registry_pickle_by_value()
    users = [one for one in dict.fromkeys(found) if one and one.__name__ not in known and _is_users(one)]
    for module in users:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in users:
            cloudpickle.unregister_pickle_by_value(module)


def _is_users(module: ModuleType) -> bool:
    """Return whether a module is the user's: neither installed nor ours. `__main__` is pickled by value anyway."""
    name, file = module.__name__, getattr(module, "__file__", None) or ""
    is_installed = any(file.startswith(path) for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")))
    return not is_installed and name != "__main__" and name.partition(".")[0] not in ("builtins", "rllib_srl", "ray")
