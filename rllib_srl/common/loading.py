"""Load what a user names by an import path, "module:f", or by its file, "path/to/file.py:f".

    load("my_loss:gentle")      my_loss.py of the current directory first, then what is installed
    load("my_loss.py:gentle")   the file; a relative path starts in the current directory

A file is imported once per process, under a unique name; its directory is appended to `sys.path`, so that it can
import its neighbours. A file that is already a module, such as the running program, is not imported again.
This file imports nothing from the package, because the environments use it.
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

# Prefix of the names of imported files; `SRLConfig.reward` recognises by it a script imported for its functions.
PREFIX = "srl_file_"
MAIN_GUARD = "put what it runs under if __name__ == '__main__':"
_lock = threading.RLock()


class LoadError(ImportError):
    """A module, a file or a name in it does not exist; the message is a sentence."""


def load(spec: str) -> Any:
    """Return the object that `spec` names, "module:name" or "file.py:name".

    Raises:
        LoadError: it does not exist.
        Exception: any exception of the user's module during its import.
    """
    place, _, name = spec.rpartition(":")
    module = load_module(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = {each: value for each, value in vars(module).items() if not each.startswith("_")}
            functions = [each for each, f in public.items() if getattr(f, "__module__", None) == module.__name__]
            raise LoadError(f"{place} has no {name!r}; it has {', '.join(functions[:8]) or 'no functions'}")
        found = getattr(found, part)
    return found


def load_function(spec: str, setting: str = "reward") -> Callable[..., Any]:
    """Return the function that `spec` names; `setting` is the setting that names it, for errors.

    Raises:
        ValueError: it cannot be imported, does not exist, or is not callable; one line.
    """
    said = f"{setting} = {spec!r}"
    try:
        found = load(spec)
    except LoadError as error:
        raise ValueError(f"{said}: {error}") from error
    except Exception as error:  # a user's module may raise anything during its import
        raise ValueError(f"{said} cannot be imported ({reason(error)})") from error
    if not callable(found):
        raise ValueError(f"{said} is a {type(found).__name__}; expected a function")
    function: Callable[..., Any] = found
    return function


def reason(error: Exception) -> str:
    """Return why something could not be loaded, in one line."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, LoadError) else f"{type(error).__name__}: {text}"


def load_module(place: str) -> ModuleType:
    """Return a module by its name, or by its file "file.py".

    Raises:
        LoadError: it does not exist, or the file runs a program while it is imported.
        Exception: any exception of the module during its import.
    """
    with _lock:
        if place.endswith(".py"):
            return _of_file(Path(place))
        if local := local_file(place):
            return _of_file(local)
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module exists, and imports another that does not
            message = f"there is no module {place!r}, neither in the current directory {Path.cwd()} nor installed"
            raise LoadError(message, name=error.name) from error


def local_file(module: str) -> Path | None:
    """Return the file in the current directory that a module's name stands for; None: it is imported in the usual way.

    "name" is name.py if there is one. A module of a package, "package.name", is the file only if the package cannot be
    imported: a module that is run as a file has no relative imports.
    """
    file = Path(*module.split(".")).with_suffix(".py")
    if not module or not file.is_file() or ("." in module and _is_importable(module)):
        return None
    return file


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except Exception:  # of the user's package: it exists, and raises again when it is imported
        return True


def _of_file(path: Path) -> ModuleType:
    file = path.expanduser().resolve()
    if not file.is_file():
        raise LoadError(f"{file} is not a file; expected a Python file, then ':' and a name in it")
    name = PREFIX + hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()
    module = sys.modules.get(name) or _imported_already(file)
    if module is not None:
        if getattr(module, "_srl_is_loading", False):
            raise LoadError(f"{file} starts a run while it is imported; {MAIN_GUARD}")
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
            raise
        raise LoadError(f"{file} ends the process while it is imported; {MAIN_GUARD}") from error
    vars(module)["_srl_is_loading"] = False
    return module


def _imported_already(file: Path) -> ModuleType | None:
    """Return the running program, or the module of the file's name, if it is this file."""
    for module in (sys.modules.get("__main__"), sys.modules.get(file.stem)):
        own = getattr(module, "__file__", None)
        if module is not None and own and Path(own).resolve() == file:
            return module
    return None
