"""The simulators and data of the Berkeley Function-Calling Leaderboard (package `bfcl-eval`), isolated per environment.

    SIMULATORS   GorillaFileSystem, MathAPI, MessageAPI, TwitterAPI, TicketAPI, TradingBot, TravelAPI, VehicleControlAPI
    tasks("base")                            200 rows: requests, start state, ground-truth calls
    Simulation(library, row).run(call)       the text that BFCL's executor would show

The package runs model text through `eval` and keeps instances among its globals. This module uses neither: a call is a
name and plain values, looked up among the public methods of instances made for one episode. The simulator modules are
loaded outside the import system, once per environment, because two of them modify global state: the weather report of
a long context changes a dictionary of its module, and the precision of logarithms is set in mpmath.

Source: Patil et al., 2025, BFCL (multi-turn, v3 and v4); the package bfcl-eval 2026.3.23.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from rllib_srl.envs.tools.calls import CallError, ToolCall, parsed_calls

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
SIMULATORS = {  # class -> its module, and the file that describes its methods
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
STATELESS = frozenset({"MathAPI"})
INSTALL = "pip install --no-deps bfcl-eval==2026.3.23, and mpmath"

# Python computes 10 ** 10 ** 9 without releasing the GIL, so no deadline would end it.
_BOUNDED = frozenset({"exponent", "precision", "decimal_places"})
_MOST = 1000


@dataclass(frozen=True)
class Task:
    """One row of a category.

    Invariant: `requests` and `ground_truth` have one entry per user turn.
    """

    task_id: str
    number: int  # the same in every category for tasks that are variants of each other
    requests: tuple[str, ...]  # empty where the user only adds functions
    ground_truth: tuple[tuple[ToolCall, ...], ...]
    initial_config: Mapping[str, Any]
    classes: tuple[str, ...]
    added: Mapping[int, tuple[str, ...]]  # user turn -> functions that are offered from then on
    has_long_context: bool


def package_dir() -> Path:
    """Return the folder of the installed bfcl-eval, without importing it.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the package bfcl-eval is not installed; install it with {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


@lru_cache(maxsize=16)
def tasks(category: str) -> Mapping[str, Task]:
    """Return the tasks of one of `CATEGORIES` by id. Raises as `package_dir`."""
    folder, name = package_dir() / "data", f"BFCL_v4_multi_turn_{category}.json"
    answers = {row["id"]: row for row in _rows(folder / "possible_answer" / name)}
    return {row["id"]: _task(row, answers[row["id"]], category) for row in _rows(folder / name)}


@lru_cache(maxsize=32)
def method_docs(class_name: str) -> tuple[Mapping[str, Any], ...]:
    """Return BFCL's description of each method as JSON schema: {"name", "description", "parameters"}."""
    path = package_dir() / "data" / "multi_turn_func_doc" / f"{SIMULATORS[class_name]}.json"
    return tuple({**doc, "parameters": as_json_schema(doc["parameters"])} for doc in _rows(path))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def as_json_schema(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with JSON's type names; BFCL writes Python's "dict", "float" and "tuple", and "any"."""
    schema: dict[str, Any] = {}
    for key, value in about.items():
        if key == "properties":
            schema[key] = {name: as_json_schema(part) for name, part in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, Mapping):
            schema[key] = as_json_schema(value)
        elif key == "type" and isinstance(value, str):
            schema.update({"type": _JSON_TYPES.get(value, value)} if value != "any" else {})
        else:
            schema[key] = value
    return schema


_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "Boolean": "boolean"}


class Library:
    """The simulator classes of one environment. Invariant: calls of other environments change nothing in them."""

    def __init__(self) -> None:
        self._classes: dict[str, type] = {}

    def simulator(self, class_name: str) -> type:
        """Return a class, loaded on first use."""
        if class_name not in self._classes:
            module = _loaded_apart(SIMULATORS[class_name])
            self._classes[class_name] = getattr(module, class_name)
        return self._classes[class_name]


class Simulation:
    """The instances of one episode.

    Invariant: equal calls on two simulations of the same task give equal texts and states.
    """

    def __init__(self, library: Library, task: Task) -> None:
        self.instances: dict[str, Any] = {}
        self._methods: dict[str, Callable[..., Any]] = {}
        for class_name in task.classes:
            instance = library.simulator(class_name)()
            if class_name not in STATELESS:
                config = copy.deepcopy(task.initial_config.get(class_name, {}))
                instance._load_scenario(config, long_context=task.has_long_context)
            self.instances[class_name] = instance
            for name, method in inspect.getmembers(instance, predicate=inspect.ismethod):
                if not name.startswith("_"):
                    self._methods[name] = method

    def run(self, call: ToolCall) -> str:
        """Return the text of BFCL's executor for a call, errors included.

        Raises:
            CallError: there is no such method, or a number is too large to compute with in time.
        """
        if call.name not in self._methods:
            raise CallError(f"there is no function {call.name[:60]!r}")
        _check_numbers(call)
        try:
            result = self._methods[call.name](*call.args, **call.kwargs)
        except Exception as error:  # as BFCL's executor does
            return f"Error during execution: {error}"
        if isinstance(result, dict):
            try:
                return json.dumps(result)
            except (TypeError, ValueError):
                return str(result)
        return str(result)

    def has_state_of(self, other: Simulation) -> bool:
        """Return whether every public attribute of every instance is equal."""
        return all(
            getattr(self.instances[name], attribute) == value
            for name, instance in other.instances.items()
            for attribute, value in vars(instance).items()
            if not attribute.startswith("_")
        )


def _check_numbers(call: ToolCall) -> None:
    arguments = dict(call.kwargs)
    if call.name == "power" and len(call.args) > 1:
        arguments["exponent"] = call.args[1]
    if call.name in ("logarithm", "square_root", "round_number") and call.args:
        arguments["precision"] = call.args[-1]
    for name in _BOUNDED & set(arguments):
        if isinstance(arguments[name], (int, float)) and abs(arguments[name]) > _MOST:
            raise CallError(f"{call.name}: {name} is beyond {_MOST}; expected a smaller number")


def _task(row: Mapping[str, Any], answer: Mapping[str, Any], category: str) -> Task:
    return Task(
        task_id=row["id"],
        number=int(row["id"].rpartition("_")[2]),
        requests=tuple("\n".join(message["content"] for message in turn) for turn in row["question"]),
        ground_truth=tuple(
            tuple(call for text in turn for call in parsed_calls(text)) for turn in answer["ground_truth"]
        ),
        initial_config=row["initial_config"],
        classes=tuple(row["involved_classes"]),
        added={int(turn): tuple(names) for turn, names in row.get("missed_function", {}).items()},
        has_long_context=category == "long_context",
    )


def _loaded_apart(name: str) -> ModuleType:
    """Execute a simulator's module under a name outside `sys.modules`, with its own mutable globals."""
    path = package_dir() / "eval_checker" / "multi_turn_eval" / "func_source_code" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_apart_{name}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be loaded; reinstall bfcl-eval with {INSTALL}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for key, value in list(vars(module).items()):
        if isinstance(value, (dict, list)) and not key.startswith("__"):
            setattr(module, key, copy.deepcopy(value))
    if name == "math_api":
        import mpmath

        context = mpmath.MPContext()
        module.mpmath = SimpleNamespace(mp=context, log=context.log)  # type: ignore[attr-defined]
    return module
