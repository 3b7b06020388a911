"""Write functions as import paths, and find the functions and files that settings name.

    import_path_of(math.sqrt)                                "math:sqrt"
    import_path_of(f), f of the program that is running       "/path/to/train.py:f"
    functions_in({"env_config": {"reward": "rewards.py:f"}})  ["rewards.py:f"]
    with_whole_paths({"path": "rows.jsonl"})                  {"path": "/path/to/rows.jsonl"}

Settings hold functions by name only: they are written to files, and a checkpoint of someone else must not contain code.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rllib_srl.common.loading import PREFIX, local_file

REWARD = "reward"  # setting of an environment that names functions
AGENT, COMMAND = "agent", "agent_command"  # settings that name a function and a program
FILES = "files"  # setting that lists files of data: paths, or mappings with "data"
LOAD = "load"  # setting that names a function that returns an environment of another library
LOSS_RULES = ("advantage", "clip_rule", "correction", "regularisers")
MEMORY_RULES = (
    *("replay_selection", "replay_reuse_selection", "replay_spacing", "replay_embedding"),
    *("replay_eviction", "replay_admit", "replay_on_group"),
)
_RULES = {*LOSS_RULES, *MEMORY_RULES}  # each "module:rule", a list, or a mapping with names as keys
_ENVS = ("env", "envs")  # settings that name environments, `envs` by its keys
_CONTRIB = "contrib."
_NAMES_A_PATH = re.compile(r"path|directory|teacher|\w+_(path|dir)")


def import_path_of(function: Callable[..., Any], setting: str = REWARD) -> str:
    """Return "module:name", or "file.py:name" for a function of the program that is running.

    Raises:
        ValueError: it cannot be found by name: a lambda, a nested function, a bound method, a function of a notebook.
    """
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
    if not name or "<" in name or not module:
        what = f"function {name}" if name else f"a {type(function).__name__}"
        raise ValueError(f"{setting} = {what}; expected a function with a name at the top level of a file")
    if module.startswith(PREFIX):
        file = getattr(sys.modules.get(module), "__file__", module)
        raise ValueError(
            f"{setting} = {name}: {file} starts a run while it is imported for its {setting} function; put what it "
            "runs under if __name__ == '__main__':"
        )
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise ValueError(f"{setting} = {name}: {module} has another object of this name; expected the function itself")
    if module != "__main__":
        return f"{module}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not file or not Path(file).is_file():
        raise ValueError(
            f"{setting} = {name} is not in a file; expected a function of a file, which other processes can "
            f"import: write it into my_functions.py and set {setting} = 'my_functions:f'"
        )
    return f"{Path(file).resolve()}:{name}"


def with_whole_paths(settings: Any) -> Any:
    """Return settings of environments with absolute paths: the processes that read them run in other directories.

    Files of `reward`, `agent`, `load` and rules are changed at any depth ("file.py:f", and "module:f" if module.py is
    in the working directory). So are those of `agent_command` and `files`, and values of `path`, `directory`,
    `..._path` and `..._dir` that exist in the working directory. Paths within a data set of the hub (with `hub_id`),
    URLs and names of installed modules stay as they are.
    """
    return _with_paths(settings, _whole)


def with_whole_rules(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run with absolute paths in its rules only; see `with_whole_paths`."""
    return {name: _with_rule_paths(value, _whole) if name in _RULES else value for name, value in settings.items()}


def without_users_rules(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run that does not train, without rules that are import paths: such a run calls none."""
    idle = {"advantage": "group", "clip_rule": "higher", "correction": "none"}  # compatible with any clip bounds
    is_users = {name for name in _RULES if any(_rules_in(settings.get(name)))}
    kept = {name: idle[name] if name in is_users else value for name, value in settings.items() if name in idle}
    return {**{name: value for name, value in settings.items() if name not in is_users}, **kept}


def with_file_names(settings: Any) -> Any:
    """Return settings of environments with only the name of each file that `with_whole_paths` locates.

    Settings that are equal in this form differ at most in the directories of their files.
    """
    return _with_paths(settings, lambda path: Path(path).name)


def _whole(path: str) -> str:
    # Links are not resolved: the Python of a virtual environment is a link, and finds its packages by its own path.
    place = os.path.abspath(Path(path).expanduser())
    return place if os.path.exists(place) else path


def _with_paths(settings: Any, change: Callable[[str], str]) -> Any:
    if isinstance(settings, Mapping):
        is_on_hub = bool(settings.get("hub_id"))
        changed = {}
        for name, value in settings.items():
            if name == REWARD or (name in (AGENT, LOAD) and isinstance(value, str)):  # "agent" is also an environment
                changed[name] = _changed(value, "function", partial(_with_function_path, change=change))
            elif name in _RULES:
                changed[name] = _with_paths(_with_rule_paths(value, change), change)
            elif name == COMMAND and isinstance(value, list | tuple):
                changed[name] = [change(one) if isinstance(one, str) and Path(one).is_file() else one for one in value]
            elif name == FILES:
                changed[name] = _changed(value, "data", change)
            elif isinstance(value, str) and value and not is_on_hub and _NAMES_A_PATH.fullmatch(str(name)):
                changed[name] = change(value)
            else:
                changed[name] = _with_paths(value, change)
        return changed
    if isinstance(settings, list | tuple):
        return type(settings)(_with_paths(one, change) for one in settings)
    return settings


def _changed(given: Any, key: str, change: Callable[[str], str]) -> Any:
    """Return a text changed, alone, in a list or under `key` of a mapping; anything else as it is."""
    if isinstance(given, list | tuple):
        return [_changed(one, key, change) for one in given]
    if isinstance(given, Mapping) and key in given:
        return {**given, key: _changed(given[key], key, change)}
    return change(given) if isinstance(given, str) and given else given


def _with_function_path(given: str, change: Callable[[str], str]) -> str:
    place, _, name = given.rpartition(":")
    if not place or given.startswith(("http://", "https://", _CONTRIB)):
        return given
    file = place if place.endswith(".py") else local_file(place)
    return f"{change(str(file))}:{name}" if file else given


def _with_rule_paths(given: Any, change: Callable[[str], str]) -> Any:
    if isinstance(given, str):
        return _with_function_path(given, change)
    if isinstance(given, list | tuple):
        return type(given)(_with_rule_paths(one, change) for one in given)
    if isinstance(given, Mapping):  # regularisers
        return {_with_function_path(str(name), change): one for name, one in given.items()}
    return given


def _rules_in(given: Any) -> Iterator[str]:
    if isinstance(given, list | tuple):
        for one in given:
            yield from _rules_in(one)
    elif isinstance(given, Mapping):
        yield from _rules_in(list(given))
    elif isinstance(given, str) and ":" in given and not given.startswith(_CONTRIB):
        yield given


def functions_in(settings: Any) -> list[str]:
    """Return the functions that settings name, at any depth, sorted, without URLs.

    They are rewards, agents, loaders of environments, and the rules and environments that are import paths. The
    command of an agent counts as one, written as a shell command.
    """
    return sorted(set(_functions_in(settings)))


def _functions_in(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            if name == REWARD:
                yield from _entries(one)
            elif name in _RULES:
                yield from _rules_in(one)
            elif name in _ENVS:
                yield from _rules_in(list(one) if isinstance(one, Mapping) else one)
                yield from _functions_in(one)
            elif isinstance(one, str) and ((name == AGENT and ":" in one) or (name == LOAD and one)):
                yield one
            elif name == COMMAND and isinstance(one, list | tuple) and one:
                yield shlex.join(map(str, one))
            else:
                yield from _functions_in(one)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for one in value:
            yield from _functions_in(one)


def _entries(given: Any) -> Iterator[str]:
    for entry in given if isinstance(given, list | tuple) else [given]:
        named = entry.get("function") if isinstance(entry, Mapping) else entry
        if isinstance(named, str) and named and not named.startswith(("http://", "https://")):
            yield named
