"""Write functions as import paths, and find the functions that settings name.

    import_path_of(math.sqrt)                                "math:sqrt"
    import_path_of(f), f of the program that is running       "/path/to/train.py:f"
    functions_in({"env_config": {"reward": "rewards.py:f"}})  ["rewards.py:f"]

Settings hold functions by name only: they are written to files, and a checkpoint of someone else must not bring code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

REWARD = "reward"  # setting of an environment that names functions
_PREFIX = "srl_file_"  # of the names under which environments import files (envs/rewards/loading.py)


def import_path_of(function: Callable[..., Any]) -> str:
    """Return "module:name", or "file.py:name" for a function of the program that is running.

    Raises:
        ValueError: it cannot be found by its name: a lambda, a nested function, a method of an object, a notebook's.
    """
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
    if not name or "<" in name or not module:
        what = f"function {name}" if name else f"a {type(function).__name__}"
        raise ValueError(f"reward = {what}; expected a function with a name at the top level of a file")
    if module.startswith(_PREFIX):
        file = getattr(sys.modules.get(module), "__file__", module)
        raise ValueError(
            f"reward = {name}: {file} starts a run while it is imported for its reward function; put what it runs "
            "under if __name__ == '__main__':"
        )
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise ValueError(f"reward = {name}: {module} has another object of this name; expected the function itself")
    if module != "__main__":
        return f"{module}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not file or not Path(file).is_file():
        raise ValueError(
            f"reward = {name}, which is in no file; expected a function of a file, which other processes can import: "
            "write it into my_rewards.py and set 'my_rewards:f'"
        )
    return f"{Path(file).resolve()}:{name}"


def with_whole_path(function: str) -> str:
    """Return "file.py:f" with the absolute path of its file, for processes that run in other directories.

    Module names and URLs are returned as they are.
    """
    file, _, name = function.rpartition(":")
    is_file = file.endswith(".py") and not file.startswith(("http://", "https://"))
    return f"{Path(file).expanduser().resolve()}:{name}" if is_file else function


def functions_in(settings: Any) -> list[str]:
    """Return the functions that settings of environments name as rewards, at any depth, sorted; URLs are none."""
    return sorted(set(_functions_in(settings)))


def _functions_in(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _entries(one) if name == REWARD else _functions_in(one)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for one in value:
            yield from _functions_in(one)


def _entries(given: Any) -> Iterator[str]:
    for entry in given if isinstance(given, list | tuple) else [given]:
        named = entry.get("function") if isinstance(entry, Mapping) else entry
        if isinstance(named, str) and named and not named.startswith(("http://", "https://")):
            yield named
