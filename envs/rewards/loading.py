"""Load a function by its import path, "module:f", or by its file, "path/to/file.py:f".

A module that is not installed is also looked for in the current directory, as `python -m` does. A file is imported
once per process, under a name of its own; its directory is appended to `sys.path`, so that it can import files beside
it. The file of the program that is running is not imported again: its functions are taken as they are.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# Of the names of imported files. `SRLConfig.reward` recognises by it a script that is imported for its functions.
_PREFIX = "srl_file_"
_lock = threading.RLock()


def load_function(spec: str, setting: str = "reward") -> Callable[..., Any]:
    """Return the function that `spec` names.

    Args:
        spec: "module:f" or "file.py:f"
        setting: that names it, for error messages

    Raises:
        ValueError: it cannot be imported, does not exist, or is not callable; one line.
    """
    place, _, name = spec.rpartition(":")
    said = f"{setting} = {spec!r}"
    with _lock:
        module = _of_file(Path(place), said) if place.endswith(".py") else _of_module(place, said)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            functions = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
            known = ", ".join(functions[:8]) or "no functions"
            raise ValueError(f"{said}: {place} has no {name!r}; it has {known}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{said} is a {type(found).__name__}; expected a function")
    function: Callable[..., Any] = found
    return function


def _of_module(name: str, said: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise _refusal(said, error) from error
        local = Path(*name.split(".")).with_suffix(".py")
        if not local.is_file():
            raise ValueError(
                f"{said}: there is no module {name!r}, neither installed nor as {local} in {Path.cwd()}"
            ) from error
        return _of_file(local, said)
    except Exception as error:  # a user's module may raise anything during its import
        raise _refusal(said, error) from error


def _of_file(path: Path, said: str) -> ModuleType:
    file = path.expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"{said}: {file} is not a file; expected a Python file, then ':' and a function")
    main = sys.modules.get("__main__")
    if (own := getattr(main, "__file__", None)) and Path(own).resolve() == file and main is not None:
        return main
    name = _PREFIX + hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()
    if name in sys.modules:
        module = sys.modules[name]
        if getattr(module, "_srl_is_loading", False):
            raise ValueError(f"{said}: {file} starts a run while it is imported; {MAIN_GUARD}")
        return module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # at the end, where it hides no installed package
    description = importlib.util.spec_from_file_location(name, file)
    assert description is not None and description.loader is not None  # both exist for a .py file
    module = importlib.util.module_from_spec(description)
    vars(module)["_srl_is_loading"] = True
    sys.modules[name] = module
    try:
        description.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            raise _refusal(said, error) from error
        raise ValueError(f"{said}: {file} ends the process while it is imported; {MAIN_GUARD}") from error
    vars(module)["_srl_is_loading"] = False
    return module


MAIN_GUARD = "put what it runs under if __name__ == '__main__':"


def _refusal(said: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:300]
    return ValueError(f"{said} cannot be imported ({type(error).__name__}: {reason})")
