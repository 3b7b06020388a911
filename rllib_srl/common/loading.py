"""Load what a user names, write functions as names, and find the functions and files that settings name.

    load("my_loss:gentle")      my_loss.py of the current directory first, then what is installed
    load("my_loss.py:gentle")   the file; a relative path starts in the current directory
    import_path_of(gentle)      "my_loss:gentle"; of the program that is running "/path/to/train.py:gentle"
    functions_in({"env_config": {"reward": "rewards.py:f"}})  ["rewards.py:f"]
    with_whole_paths({"path": "rows.jsonl"})                  {"path": "/path/to/rows.jsonl"}

A file is imported once per process, under a unique name; its directory is appended to `sys.path`, so that it can
import its neighbours. A file that is already a module, such as the running program, is not imported again.

Settings hold functions by name only: they are written to files, and a checkpoint of someone else must not contain code.
This file imports nothing from the package, because the environments use it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

# Prefix of the names of imported files; `SRLConfig.reward` recognises by it a script imported for its functions.
PREFIX = "srl_file_"
CONTRIB = "contrib."  # prefix of names of files in rllib_srl/contrib
MAIN_GUARD = "put what it runs under if __name__ == '__main__':"
OWN_DATA = "question_file"  # the environment of questions from a file or the hub, for which `data` and `reward` stand
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
_NAMES_A_PATH = re.compile(r"path|directory|teacher|\w+_(path|dir)")
_URL = ("http://", "https://")
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
    member: Any = module
    for part in name.split("."):
        if not hasattr(member, part):
            public = {each: value for each, value in vars(module).items() if not each.startswith("_")}
            functions = [each for each, f in public.items() if getattr(f, "__module__", None) == module.__name__]
            raise LoadError(f"{place} has no {name!r}; it has {', '.join(functions[:8]) or 'no functions'}")
        member = getattr(member, part)
    return member


def load_function(spec: str, setting: str = "reward") -> Callable[..., Any]:
    """Return the function that `spec` names; `setting` is the setting that names it, for errors.

    Raises:
        ValueError: it cannot be imported, does not exist, or is not callable; one line.
    """
    assignment = f"{setting} = {spec!r}"
    try:
        member = load(spec)
    except LoadError as error:
        raise ValueError(f"{assignment}: {error}") from error
    except Exception as error:  # a user's module may raise anything during its import
        raise ValueError(f"{assignment} cannot be imported ({reason(error)})") from error
    if not callable(member):
        raise ValueError(f"{assignment} is a {type(member).__name__}; expected a function")
    function: Callable[..., Any] = member
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
        module_file = getattr(module, "__file__", None)
        if module is not None and module_file and Path(module_file).resolve() == file:
            return module
    return None


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
            f"{setting} = {name}: {file} starts a run while it is imported for its {setting} function; {MAIN_GUARD}"
        )
    member: Any = sys.modules.get(module)
    for part in name.split("."):
        member = getattr(member, part, None)
    if member is not function:
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


# --- what settings name ------------------------------------------------------------------------------


def with_whole_paths(settings: Any) -> Any:
    """Return settings of environments with absolute paths: the processes that read them run in other directories.

    Files of `reward`, `agent`, `load` and rules are changed at any depth ("file.py:f", and "module:f" if module.py is
    in the working directory). So are those of `agent_command` and `files`, and values of `path`, `directory`,
    `..._path` and `..._dir` that exist in the working directory. Paths within a data set of the hub (with `hub_id`),
    URLs and names of installed modules stay as they are.
    """
    return _changed(settings, partial(_with_path, path=_whole), _whole)


def with_whole_rules(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run with absolute paths in its rules; see `with_whole_paths`."""
    return {**settings, **with_whole_paths({name: value for name, value in settings.items() if name in _RULES})}


def with_file_names(settings: Any) -> Any:
    """Return settings of environments with only the name of each file that `with_whole_paths` locates.

    Settings that are equal in this form differ at most in the directories of their files.
    """
    return _changed(settings, partial(_with_path, path=_name), _name)


def without_users_rules(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run that does not train, without rules that are import paths: such a run calls none."""
    idle = {"advantage": "group", "clip_rule": "higher", "correction": "none"}  # compatible with any clip bounds
    is_users = {name for name in _RULES if functions_in({name: settings.get(name)})}
    kept = {name: idle[name] if name in is_users else value for name, value in settings.items() if name in idle}
    return {**{name: value for name, value in settings.items() if name not in is_users}, **kept}


def functions_in(settings: Any) -> list[str]:
    """Return the functions that settings name, at any depth, sorted, without URLs.

    They are rewards, agents, loaders of environments, and the rules and environments that are import paths. The
    command of an agent counts as one, written as a shell command.
    """
    names: set[str] = set()

    def note(setting: str, named: Any) -> Any:
        if setting == COMMAND:
            names.update([shlex.join(map(str, named))] if named else [])
        elif setting in (REWARD, LOAD):
            names.update([] if setting == REWARD and named.startswith(_URL) else [named])
        elif ":" in named and (setting == AGENT or not named.startswith(CONTRIB)):
            names.add(named)
        return named

    _changed(settings, note, lambda path: path)
    return sorted(names)


def _changed(settings: Any, function: Callable[[str, Any], Any], path: Callable[[str], str]) -> Any:
    """Return settings, at any depth, with other functions and files.

    Args:
        function: setting and name -> another name, of a function or environment; of `COMMAND` list -> list.
        path: path of a file -> another path.
    """
    if isinstance(settings, list | tuple):
        return type(settings)(_changed(part, function, path) for part in settings)
    if not isinstance(settings, Mapping):
        return settings
    changed = {}
    for name, value in settings.items():
        if name == REWARD or (name in (AGENT, LOAD) and isinstance(value, str)):  # "agent" is also an environment
            changed[name] = _texts_changed(value, partial(function, name), "function")
        elif name in _RULES or name in _ENVS:
            changed[name] = _changed(_names_changed(value, partial(function, name)), function, path)
        elif name == COMMAND and isinstance(value, list | tuple):
            changed[name] = function(name, value)
        elif name == FILES:
            changed[name] = _texts_changed(value, path, "data")
        elif isinstance(value, str) and value and not settings.get("hub_id") and _NAMES_A_PATH.fullmatch(str(name)):
            changed[name] = path(value)
        else:
            changed[name] = _changed(value, function, path)
    return changed


def _texts_changed(value: Any, change: Callable[[str], str], key: str) -> Any:
    """Return a text changed, alone, in a list or under `key` of a mapping; anything else as it is."""
    if isinstance(value, list | tuple):
        return [_texts_changed(part, change, key) for part in value]
    if isinstance(value, Mapping) and key in value:
        return {**value, key: _texts_changed(value[key], change, key)}
    return change(value) if isinstance(value, str) and value else value


def _names_changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return a text changed, alone, in a list or as a key of a mapping; anything else as it is."""
    if isinstance(value, list | tuple):
        return type(value)(_names_changed(part, change) for part in value)
    if isinstance(value, Mapping):
        return {change(str(name)): part for name, part in value.items()}
    return change(value) if isinstance(value, str) else value


def _with_path(setting: str, named: Any, path: Callable[[str], str]) -> Any:
    """Return the name of a function with another path of its file; names of installed modules stay."""
    if setting == COMMAND:
        return [path(word) if isinstance(word, str) and Path(word).is_file() else word for word in named]
    place, _, name = named.rpartition(":")
    if setting in _ENVS or not place or named.startswith((*_URL, CONTRIB)):
        return named
    file = place if place.endswith(".py") else local_file(place)
    return f"{path(str(file))}:{name}" if file else named


def _whole(path: str) -> str:
    # Links are not resolved: the Python of a virtual environment is a link, and finds its packages by its own path.
    place = os.path.abspath(Path(path).expanduser())
    return place if os.path.exists(place) else path


def _name(path: str) -> str:
    return Path(path).name
