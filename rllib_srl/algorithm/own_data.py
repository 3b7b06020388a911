"""Turn a user's data and reward functions into the env_config of the environment `question_file`.

    data_settings("my.jsonl", question="q")            {"path": "my.jsonl", "num_shots": 0, "question_field": "q"}
    data_settings("openai/gsm8k", split="main/train")  {"hub_id": "openai/gsm8k", "path": "main/train", "num_shots": 0}
    data_settings(dataset)                             its rows are written to a file in the cache directory
    reward_settings([f, "my_module:g"], weights=[.8, .2])      {"reward": [{"function": "my_module:f", ...}, ...]}

Functions become import paths here, because settings are written to files; see `import_path_of`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

from rllib_srl.common.loading import AGENT, COMMAND, REWARD, import_path_of
from rllib_srl.engine.models import cache_root
from rllib_srl.storage.disk import writing

_FILE = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|arrow)(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_RENAMED = {"timeout_s": "reward_timeout_s", "retries": "reward_retries", "concurrency": "reward_concurrency"}
_RENAMED |= {"on_error": "on_reward_error"}
_OF_ENTRY = ("name", "form", "low", "high")

RewardFunction = str | Mapping[str, Any] | Callable[..., Any]


def data_settings(
    data: Any, question: str = "", answer: str = "", split: str = "", heldout: str = "", **settings: Any
) -> dict[str, Any]:
    """Return the env_config of a user's data.

    Args:
        data: a file or a folder, the id of a data set of the Hugging Face hub, or an object that yields rows
        question: column of the question, if it has none of the known names; a dot leads into an object
        answer: column of the right answer, as for `question`
        split: split of a data set of the hub or a folder, or the path of a file in it; "": "train", or the folder
        heldout: file or split of the held-out questions; "": a fixed share of the questions
        settings: further settings of the environment

    Raises:
        ValueError: the object does not yield rows, or a row that JSON cannot hold.
    """
    if not isinstance(data, str | os.PathLike):
        place = {"path": str(_written(data)), "domain": "own_data"}
    elif names_data_set(text := os.fspath(data)):
        place = {"hub_id": text, "path": split or "train"}
    else:
        place = {"path": text}
        if split and Path(text).expanduser().is_dir():
            place, folder = {"path": os.path.abspath(Path(text).expanduser() / split), "domain": split}, Path(text)
            if heldout and not Path(heldout).expanduser().exists():
                heldout = os.path.abspath(folder.expanduser() / heldout)
            split = ""
        elif (
            not _FILE.search(text) and not Path(text).expanduser().exists()
        ):  # a split: "data/train" of train-*.parquet
            place = {"path": os.path.abspath(Path(text).expanduser()), "domain": Path(text).name}
    if split and "hub_id" not in place:
        raise ValueError(
            f"split = {split!r} with data = {data!r}; expected it only with a folder or a data set of the hub"
        )
    named = {"heldout_path": heldout, "question_field": question, "answer_field": answer}
    return {**place, "num_shots": 0, **{name: value for name, value in named.items() if value}, **settings}


def names_data_set(text: str) -> bool:
    """Return whether a text is the id of a data set of the Hugging Face hub, rather than a file or folder here."""
    if _FILE.search(text) or not _HUB_ID.fullmatch(text):
        return False
    path = Path(text)
    # "data/train" may also name the files data/train-00000-of-00002.parquet ...
    is_split = path.parent.is_dir() and any(_FILE.search(p.name) for p in path.parent.glob(f"{path.name}[-_.0-9]*"))
    return not path.exists() and not is_split


def reward_settings(
    functions: RewardFunction | Sequence[RewardFunction], weights: Sequence[float] | None = None, **settings: Any
) -> dict[str, Any]:
    """Return the part of an env_config that names reward functions.

    Args:
        functions: one or several: a function, its import path, a URL, or a mapping with "function" and other fields
        weights: one for each of several functions; None: equal ones
        settings: `name`, `form`, `low`, `high` of the functions; `timeout_s`, `retries`, `concurrency`, `on_error`

    Raises:
        ValueError: a function without an import path, or another number of weights.
    """
    entries = list(functions) if isinstance(functions, Sequence) and not isinstance(functions, str) else [functions]
    if weights is not None and len(weights) != len(entries):
        raise ValueError(f"weights = {list(weights)}; expected {len(entries)} numbers, one for each function")
    if unknown := sorted(set(settings) - {*_RENAMED, *_OF_ENTRY}):
        known = ", ".join(("weights", *_OF_ENTRY, *_RENAMED))
        raise TypeError(f"reward() got unknown settings: {', '.join(unknown)}; expected some of {known}")
    shared = {name: settings[name] for name in _OF_ENTRY if name in settings}
    specs = []
    for number, entry in enumerate(entries):
        spec = {**shared, **(dict(entry) if isinstance(entry, Mapping) else {"function": entry})}
        if callable(spec.get("function")):
            spec["function"] = import_path_of(spec["function"])
        if weights is not None:
            spec["weight"] = float(weights[number])
        specs.append(spec)
    is_plain = len(specs) == 1 and set(specs[0]) == {"function"}
    return {
        REWARD: specs[0]["function"] if is_plain else specs,
        **{_RENAMED[name]: value for name, value in settings.items() if name in _RENAMED},
    }


def agent_settings(agent: Any, command: Sequence[str] | None, tasks: Any) -> dict[str, Any]:
    """Return the env_config of an agent (the environment `agent`).

    Args:
        agent: a function or its import path; None with a command.
        command: a program and its arguments; None with a function.
        tasks: a file, or an object that yields rows; None: numbers.

    Raises:
        ValueError: both or neither are given, or a function without an import path.
    """
    if (agent is None) == (command is None):
        raise ValueError(f"agent = {agent!r} and agent_command = {command!r}; expected one of the two")
    if command is not None and (isinstance(command, str) or not command):
        raise ValueError(f"agent_command = {command!r}; expected a list: the program, then its arguments")
    named: dict[str, Any] = {COMMAND: [str(word) for word in command]} if command is not None else {}
    if agent is not None:
        named = {AGENT: import_path_of(agent, AGENT) if callable(agent) else agent}
    if tasks is None:
        return named
    return {**named, "path": os.fspath(tasks) if isinstance(tasks, str | os.PathLike) else str(_written(tasks))}


def _written(data: Any) -> Path:
    """Write the rows of a data set to a file named by their content; return it."""
    lines = []
    for number, row in enumerate(_rows_of(data), 1):
        if not isinstance(row, Mapping):
            raise ValueError(f"data: row {number} is a {type(row).__name__}; expected a mapping of columns to values")
        try:
            lines.append(json.dumps(_plain(dict(row)), ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"data: row {number} is not JSON: {error}; leave such columns out") from error
    if not lines:
        raise ValueError("data has no rows; expected questions")
    text = "\n".join(lines) + "\n"
    digest = hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=12).hexdigest()
    target = cache_root() / "data" / f"{digest}.jsonl"
    if not target.is_file():
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = target.with_name(f"{digest}.{os.getpid()}.part")
        with writing(target):
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
            part.chmod(0o600)
            part.replace(target)
    return target


def _rows_of(data: Any) -> Iterator[Any]:
    """Return the rows of a list, a `datasets.Dataset`, a `pandas.DataFrame`, a `ray.data.Dataset` and the like."""
    if isinstance(data, Mapping):  # a `datasets.DatasetDict`, or a dictionary of columns
        raise ValueError(f"data has the parts {', '.join(map(str, data))}; expected one of them: data[...]")
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return iter(data.to_dict("records"))
    if hasattr(data, "iter_rows"):
        return iter(data.iter_rows())
    if isinstance(data, Iterable):
        return iter(data)
    raise ValueError(f"data is a {type(data).__name__}; expected a file, a hub id, or an object that yields rows")


def _plain(value: Any) -> Any:
    """Return a value in JSON's types where it has an equivalent: arrays as lists, a missing number as null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [_plain(item) for item in sorted(value, key=repr)]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Decimal) and value.is_finite():
        number = int(value) if value == value.to_integral_value() else float(value)
        return number if Decimal(repr(number)) == value else f"{value:f}"  # as text, if a float has other digits
    if type(value).__name__ in ("NaTType", "NAType"):  # pandas' missing values; NaT is also a date
        return None
    if isinstance(value, date | time | UUID | Fraction):
        return str(value)
    return None if isinstance(value, float | Decimal) and math.isnan(value) else value
