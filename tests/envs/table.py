"""How each installed environment is made for the contract of tests/envs/test_envs.py, and what to know of it there.

An environment of setup.cfg without a row here is made with no settings: add a row where that cannot be. Left out are
those that play what someone else has written, without gold turns and without a history: `agent`, `mcp`, `verifiers` and
`openenv_experimental` (test_agent.py, test_env_mcp.py, test_verifiers.py, test_openenv.py).
"""

import configparser
import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GROUP = "rllib_srl.envs"


@dataclass(frozen=True)
class Row:
    """One way to make an environment.

    Invariant: `env_config` is plain data, so that another process makes the same environment.
    """

    env_config: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # modules that an extra brings
    is_hidden: bool = False  # two tasks may look alike at first: what tells them apart is found out by playing
    iterates: bool = False  # its history is of answers to go on from, not of turns to replay
    pays_any_text: bool = False  # a malformed answer may earn something (a rubric on form)
    is_slow: bool = False  # a program is started or compiled for each prompt
    num_checked: int = 20  # prompts a test looks at: fewer where a prompt is slow to make


def _sums(side: int = 20) -> str:
    """Write a file of side x side questions, and return its path: the same for all processes of this user."""
    numbers = range(10, 10 + side)
    rows = ({"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in numbers for b in numbers)
    path = Path(tempfile.gettempdir()) / f"sums-of-the-contract-{side}-{os.getuid()}.jsonl"
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(part, path)
    return str(path)


QUICK = {"num_shots": 1}
ROWS: dict[str, list[Row]] = {
    "code_task": [Row(), Row({"feedback_turns": 1, "num_shots": 3})],
    "chain_sum": [Row({"pool_size": 400}), Row({"pool_size": 400, "feedback_turns": 1, "num_shots": 2})],
    "compare": [Row(), Row({"num_numbers": 2, "feedback_turns": 2}), Row({"ask": "smallest"})],
    "bfcl": [Row(needs=("bfcl_eval",)), Row({"category": "miss_func", "call_format": "xml"}, needs=("bfcl_eval",))],
    "function_call": [
        Row(),
        Row({"num_calls": 2, "feedback_turns": 1}),
        Row({"num_calls": 0, "call_format": "json"}, pays_any_text=True),  # right is whatever makes no call
        Row({"bfcl": "parallel", "num_shots": 0, "call_format": "python"}, needs=("bfcl_eval",)),
    ],
    "lookup": [Row({"num_shots": 0}), Row({"num_pairs": 3, "feedback_turns": 1})],
    "oracle": [
        Row(is_hidden=True),
        Row({"num_numbers": 3, "lie_percent": 0, "cost_percent": 0, "num_shots": 0}, is_hidden=True),
    ],
    "products": [Row({"pool_size": 400})],
    "python_tool": [Row(), Row({"call_format": "line", "num_shots": 1})],
    "reasoning_gym": [Row({"dataset": "spell_backward", "pool_size": 300, "level": 0})],
    "recall": [Row(), Row({"num_shots": 2, "num_options": 2, "stage": 1, "seed": 5})],
    "registers": [
        Row(is_hidden=True),
        Row({"task": "larger", "num_shots": 1}, is_hidden=True),
        Row({"task": "smaller", "num_shots": 1}, is_hidden=True),
        Row({"task": "follow", "num_shots": 1, "num_registers": 5}, is_hidden=True),
    ],
    "question_file": [Row({"path": _sums(), "num_shots": 1})],
    "retail": [
        Row(needs=("inspect_evals",)),
        Row({"user": "asked", "num_replies": 1}, needs=("inspect_evals",), is_hidden=True),
    ],
    "retrieval": [Row(), Row({"num_hops": 1, "call_format": "line", "feedback_turns": 1})],
    "rubric": [Row(pays_any_text=True), Row({"reward": "pass"})],
    "self_iteration": [
        Row({"env": "rllib_srl.envs.math.compare:Compare", "env_config": {}}, iterates=True),
        Row({"env": "registers", "env_config": QUICK}, is_hidden=True, iterates=True),
    ],
    "self_label": [Row({"env": "rllib_srl.envs.math.compare:Compare", "env_config": QUICK})],
    "sentences": [Row(pays_any_text=True)],
}


@cache
def entry_points() -> dict[str, str]:
    """Return name -> "module:Class" of every environment that setup.cfg installs."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lines = parser["options.entry_points"][GROUP].split("\n")
    return dict(map(str.strip, line.split("=", 1)) for line in lines if line.strip())  # type: ignore[misc]


def cases() -> dict[str, tuple[str, Row]]:
    """Return "name" or "name 2" -> import path and row, for every environment and every way to make it."""
    return {
        name if number == 1 else f"{name} {number}": (path, row)
        for name, path in sorted(entry_points().items())
        if name not in ("agent", "mcp", "verifiers", "openenv_experimental")
        for number, row in enumerate(ROWS.get(name, [Row()]), 1)
    }


def missing(row: Row) -> list[str]:
    return [name for name in row.needs if importlib.util.find_spec(name) is None]


def made(path: str, row: Row, **changes: Any) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)({**row.env_config, **changes})
