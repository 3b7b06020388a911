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

from rllib_srl.envs.rows import usable_rows
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
        raise ValueError(f"the package bfcl-eval is not installed; expected it, by {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


@lru_cache(maxsize=16)
def tasks(category: str, data_dir: str = "") -> Mapping[str, Task]:
    """Return the tasks of a multi-turn category by id.

    Args:
        category: one of `CATEGORIES`
        data_dir: folder with BFCL_v*_multi_turn_<category>.json and possible_answer/; empty for the package's own

    Raises:
        ValueError: a file is missing, or a row cannot be read, naming file, row and field.
    """
    folder = Path(data_dir) if data_dir else package_dir() / "data"
    rows, answers = (_rows(found, category) for found in (folder, folder / "possible_answer"))
    by_id = {row["id"]: row for row in answers}
    found = {}
    for row in rows:
        if row["id"] not in by_id:
            raise ValueError(f"row {row['id']} has no ground truth in {folder / 'possible_answer'}")
        found[row["id"]] = _task(row, by_id[row["id"]], category)
    return found


@lru_cache(maxsize=32)
def method_docs(class_name: str, data_dir: str = "") -> tuple[Mapping[str, Any], ...]:
    """Return BFCL's description of each method as JSON schema: {"name", "description", "parameters"}."""
    folder = Path(data_dir) if data_dir else package_dir() / "data"
    path = folder / "multi_turn_func_doc" / f"{SIMULATORS[class_name]}.json"
    docs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return tuple({**doc, "parameters": as_json_schema(doc["parameters"])} for doc in docs)


def as_json_schema(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with JSON's type names; BFCL writes Python's "dict", "float" and "tuple", and "any"."""
    schema: dict[str, Any] = {}
    for key, value in about.items():
        if key == "properties":
            schema[key] = {name: as_json_schema(one) for name, one in value.items()}
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
    given = dict(call.kwargs)
    if call.name == "power" and len(call.args) > 1:
        given["exponent"] = call.args[1]
    if call.name in ("logarithm", "square_root", "round_number") and call.args:
        given["precision"] = call.args[-1]
    for name in _BOUNDED & set(given):
        if isinstance(given[name], (int, float)) and abs(given[name]) > _MOST:
            raise CallError(f"{call.name}: {name} is beyond {_MOST}; expected a smaller number")


def _rows(folder: Path, category: str) -> list[dict[str, Any]]:
    paths = sorted(folder.glob(f"BFCL_v*_multi_turn_{category}.json"))
    if not paths:
        raise ValueError(f"{folder} has no BFCL_v*_multi_turn_{category}.json; expected BFCL's data")
    rows, _ = usable_rows(paths[-1], _with_id, skips_broken=False)
    return rows


def _with_id(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict) or "id" not in row:
        raise ValueError("field id is missing")
    return row


def _task(row: Mapping[str, Any], answer: Mapping[str, Any], category: str) -> Task:
    missing = {"question", "initial_config", "involved_classes"} - set(row) | ({"ground_truth"} - set(answer))
    if missing:
        raise ValueError(f"row {row['id']}: field {', '.join(sorted(missing))} is missing")
    unknown = set(row["involved_classes"]) - set(SIMULATORS)
    if unknown or len(row["question"]) != len(answer["ground_truth"]):
        raise ValueError(
            f"row {row['id']}: classes {sorted(unknown)} are unknown, or {len(row['question'])} requests do not match "
            f"{len(answer['ground_truth'])} turns of ground truth"
        )
    return Task(
        task_id=row["id"],
        number=int(row["id"].rpartition("_")[2]),
        requests=tuple("\n".join(message["content"] for message in turn) for turn in row["question"]),
        ground_truth=tuple(
            tuple(call for one in turn for call in parsed_calls(one)) for turn in answer["ground_truth"]
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
        raise ValueError(f"{path} cannot be loaded; expected bfcl-eval as published, by {INSTALL}")
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
