"""Send rules that a script has registered to the buffer's process, which does not run that script.

    sent(settings) -> a reference to them -> register(...) in the other process
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray import cloudpickle

from rllib_srl.replay.settings import ReplaySettings, chosen_rules, rules

TIMEOUT_S = 60.0

Registered = dict[tuple[str, str], Any]  # setting, name -> rule


def sent(settings: ReplaySettings) -> list[ray.ObjectRef[Registered]]:
    """Return a reference to the rules that the settings name and only this process has registered; [] without any.

    In a list only the constructor of an actor fetches it; Ray passes it again to every restarted actor.

    Raises:
        ValueError: a rule cannot be pickled; the message names it and the reason.
    """
    tables = rules()
    registered = {(of, name): tables[of][name] for of, name in chosen_rules(settings) if tables[of].is_users(name)}
    for (of, _), rule in registered.items():
        try:
            cloudpickle.dumps(rule)
        except Exception as error:  # of any type: pickling runs user-defined `__reduce__` methods
            fault = f"expected a rule that can be pickled, or an import path: {type(error).__name__}: {error}"
            raise ValueError(f"replay_{of} = {rule!r}; {fault}") from error
    return [ray.put(registered)] if registered else []


def register(references: Sequence[ray.ObjectRef[Registered]]) -> None:
    """Register the rules that another process sent.

    Raises:
        ValueError: a module that a rule needs cannot be imported here.
    """
    try:
        registered = ray.get(references[0], timeout=TIMEOUT_S) if references else {}
    except ray.exceptions.RaySystemError as error:
        raise ValueError(
            f"rules registered in the script cannot be loaded in the buffer's process: {error}; expected rules that "
            'need nothing it cannot import, or "module:rule"'
        ) from error
    for (of, name), rule in registered.items():
        rules()[of][name] = rule
