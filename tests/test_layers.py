"""Who may import whom (DESIGN 4), read from the source with `ast`: imports inside functions count too.

A module missing from `LAYER_OF` fails, so that whoever adds one decides where it belongs.
"""

from __future__ import annotations

import ast
import configparser
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# The longest entry that matches a module decides; an entry that names a folder covers what lies in it.
LAYER_OF = {
    "types": 0,
    "setting_tables": 0,
    "trie": 0,
    "trie_attention": 1,
    "head": 1,
    "advantages": 1,
    "aggregation": 1,
    "comparison": 1,
    "compose": 1,
    "continual": 1,
    "critic": 1,
    "batch": 1,
    "gradients": 1,
    "group_notes": 1,
    "objective": 1,
    "reference": 1,
    "shaping": 1,
    "survey": 1,
    "checkpoints": 1,
    "hardware": 1,
    "losses": 1,
    "models": 1,
    "prompts": 1,
    "spaces": 1,
    "statistics": 1,
    "streams": 1,
    "planner": 1,
    "callbacks": 3,
    "worlds": 1,
    "replay.admission": 1,
    "replay.baselines": 1,
    "replay.calibration": 1,
    "replay.candidates": 1,
    "replay.clusters": 1,
    "replay.codec": 1,
    "replay.diversity": 1,
    "replay.domain_recall": 1,
    "replay.due_queue": 1,
    "replay.embedding": 1,
    "replay.eviction": 1,
    "replay.export": 1,
    "replay.export_rows": 1,
    "replay.grading": 1,
    "replay.growth": 1,
    "replay.indexed_set": 1,
    "replay.indexes": 1,
    "replay.inverted_lists": 1,
    "replay.journal": 1,
    "replay.journal_file": 1,
    "replay.journal_log": 1,
    "replay.journal_schema": 1,
    "replay.load": 1,
    "replay.memory": 1,
    "replay.neighbours": 1,
    "replay.ngrams": 1,
    "replay.parcels": 1,
    "replay.payloads": 1,
    "replay.quotas": 1,
    "replay.realised": 1,
    "replay.records": 1,
    "replay.secrets": 1,
    "replay.selection": 1,
    "replay.sentences": 1,
    "replay.settings": 1,
    "replay.slot_order": 1,
    "replay.snapshots": 1,
    "replay.spacing": 1,
    "replay.tables": 1,
    "replay.token_embedding": 1,
    "replay.visits": 1,
    "replay": 2,
    "replay.buffer": 2,
    "replay.successes": 2,
    "engine": 2,
    "rollout": 2,
    "companions": 3,
    "deadlines": 3,
    "env_runner": 3,
    "learner": 3,
    "adapters": 3,
    "fitting": 3,
    "optimizers": 3,
    "sharded_files": 1,
    "sharded_state": 3,
    "sharding": 3,
    "learners": 3,
    "placement": 3,
    "replay.actor": 3,
    "replay.client": 3,
    "rl_module": 3,
    "runners": 3,
    "scoring": 3,
    "shard": 3,
    "weight_sync": 3,
    "columns": 1,
    "carriers": 3,
    "weights": 3,
    "config": 4,
    "evaluation": 4,
    "planning": 4,
    "faults": 4,
    "report": 4,
    "saved": 4,
    "srl": 4,
    "study_trial": 4,
}
TOP = 4  # rllib_srl/__init__.py loads names of every layer lazily

ALLOWED_BELOW_RAY = {  # third-party packages by layer; layers 3 and 4 may import any but vLLM
    0: {"numpy"},
    1: {"numpy", "torch", "gymnasium", "xxhash"},
    2: {"numpy", "torch", "gymnasium", "xxhash", "transformers"},
}
# In layers 1 and 2, inside the functions that need them:
ALLOWED_LAZILY = {
    "faiss", "filelock", "gguf", "huggingface_hub", "pyarrow", "safetensors", "scipy", "sqlite3", "transformers"
}
RLLIB_EPISODE = ("ray.rllib.env.single_agent_episode", "ray.rllib.env.single_agent_episode.SingleAgentEpisode")
ROOMS = {  # what each folder beside rllib_srl may import, itself and the standard library aside
    "envs": {
        "bm25s",
        "docstring_parser",
        "faiss",
        "gymnasium",
        "huggingface_hub",
        "math_verify",
        "mpmath",
        "numpy",
        "pyarrow",
        "pydantic",
        "reasoning_gym",
        "sklearn",
        "textarena",
        "textworld",
        "typing_extensions",
    },
    "tune_configs": {"rllib_srl", "envs", "ray"},
}


@dataclass(frozen=True)
class Import:
    """One imported module or name; `is_lazy` inside a function, `is_typing` under `if TYPE_CHECKING`."""

    target: str
    line: int
    is_lazy: bool
    is_typing: bool


def imports_of(source: str, module: str, is_package: bool = False) -> Iterator[Import]:
    """Yield every import statement of `source`, relative ones resolved against the dotted name `module`."""
    package = module if is_package else module.rpartition(".")[0]

    def visit(node: ast.AST, is_lazy: bool, is_typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, is_lazy, is_typing) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                parents = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
                base = ".".join([*parents, *([child.module] if child.module else [])])
                yield from (Import(f"{base}.{alias.name}", child.lineno, is_lazy, is_typing) for alias in child.names)
            elif target := _dynamic_target(child):
                yield Import(target, child.lineno, is_lazy, is_typing)  # type: ignore[attr-defined]
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from visit(child, is_lazy or inside, is_typing or guarded)

    yield from visit(ast.parse(source), is_lazy=False, is_typing=False)


def _dynamic_target(node: ast.AST) -> str:
    """Return the literal module name of `importlib.import_module("...")` or `__import__("...")`, or ""."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
        return ""
    is_import = ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
    return str(node.args[0].value) if is_import else ""


def layer_of(module: str) -> int | None:
    """Return the layer of a dotted name inside rllib_srl ("" is the package itself), or None if it has none."""
    if not module:
        return TOP
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (layer := LAYER_OF.get(".".join(parts[:end]))) is not None:
            return layer
    return None


def faults_of_package(sources: Mapping[str, str]) -> list[str]:
    """Return one line for each import of rllib_srl's modules that breaks a rule.

    Args:
        sources: source text by dotted name inside rllib_srl; "" is the package's own `__init__`.
    """
    faults = []
    for module, source in sources.items():
        layer = layer_of(module)
        if layer is None:
            faults.append(f"rllib_srl.{module} has no layer: add it to LAYER_OF in tests/test_layers.py")
            continue
        is_package = any(other.startswith(f"{module}.") for other in sources) or not module
        for found in imports_of(source, f"rllib_srl.{module}".rstrip("."), is_package):
            if fault := _fault_of(module, layer, found, sources):
                faults.append(f"rllib_srl.{module}:{found.line} (layer {layer}) imports {found.target}: {fault}")
    return faults


def _fault_of(module: str, layer: int, found: Import, sources: Mapping[str, str]) -> str:
    root = found.target.split(".")[0]
    if root == "rllib_srl":
        target = _module_named(found.target, sources)
        target_layer = layer_of(target)
        if target_layer is not None and target_layer > layer:
            return f"it is of layer {target_layer}"
        return ""
    if root in ("envs", "tune_configs", "scripts", "tests"):
        return "environments arrive by name, class or import path"
    if root == "vllm":
        return "" if module.startswith("engine.") else "vLLM is imported in rllib_srl.engine only"
    if layer >= 3:
        return ""
    if root == "ray":
        is_episode = module.split(".")[0] == "rollout" and found.target in RLLIB_EPISODE
        return "" if is_episode else "no Ray below layer 3 (rollout: SingleAgentEpisode only)"
    if root in ALLOWED_BELOW_RAY[layer] or (root in sys.stdlib_module_names and root not in ALLOWED_LAZILY):
        return ""
    if layer > 0 and root in ALLOWED_LAZILY:
        return "" if found.is_lazy or found.is_typing else "import it inside the function that needs it"
    return f"layer {layer} imports {', '.join(sorted(ALLOWED_BELOW_RAY[layer]))} and the standard library"


def _module_named(target: str, sources: Mapping[str, str]) -> str:
    """Return the longest prefix of `target` that is a module, without the package's own name."""
    parts = target.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in sources:
            return name
    return ".".join(parts[:1]) if parts and layer_of(parts[0]) is not None else ""


def faults_of_room(room: str, sources: Mapping[str, str]) -> list[str]:
    """Return one line for each import of a module in folder `room` that the room may not make."""
    allowed = ROOMS[room] | {room} | set(sys.stdlib_module_names)
    return [
        f"{module}:{found.line} imports {found.target}; {room} imports {', '.join(sorted(ROOMS[room]))}, its own files"
        for module, source in sources.items()
        for found in imports_of(source, module, is_package=module == room)
        if found.target.split(".")[0] not in allowed
    ]


def cycle_of(sources: Mapping[str, str]) -> list[str]:
    """Return the modules of one import cycle, empty if there is none.

    Only imports at module level count: an algorithm and its config name each other inside functions, as RLlib's do.
    """
    graph = {
        module: {
            _module_named(found.target, sources)
            for found in imports_of(source, f"rllib_srl.{module}", any(o.startswith(f"{module}.") for o in sources))
            if found.target.startswith("rllib_srl.") and not found.is_typing and not found.is_lazy
        }
        - {module}
        for module, source in sources.items()
        if module
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def read(folder: str, keep_folder_name: bool) -> dict[str, str]:
    """Return the source of every module under `folder` by dotted name."""
    sources = {}
    for path in sorted((REPO / folder).rglob("*.py")):
        parts = list(path.relative_to(REPO / folder).with_suffix("").parts)
        parts = [folder] * keep_folder_name + (parts[:-1] if parts[-1] == "__init__" else parts)
        sources[".".join(parts)] = path.read_text()
    return sources


def test_rllib_srl_keeps_its_layers() -> None:
    sources = read("rllib_srl", keep_folder_name=False)
    assert "types" in sources
    assert faults_of_package(sources) == []


def test_rllib_srl_has_no_import_cycle() -> None:
    assert cycle_of(read("rllib_srl", keep_folder_name=False)) == []


def test_mypy_checks_every_module_below_layer_3() -> None:
    parser = configparser.ConfigParser()
    parser.read(REPO / "setup.cfg")
    unchecked = {name for section in parser if section.startswith("mypy-rllib_srl") for name in section[5:].split(",")}
    modules = {module for module in read("rllib_srl", keep_folder_name=False) if module}
    assert unchecked >= {f"rllib_srl.{module}" for module in modules if (layer_of(module) or 0) >= 3}
    assert unchecked.isdisjoint(f"rllib_srl.{module}" for module in modules if (layer_of(module) or 0) < 3)


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_import_what_they_may(room: str) -> None:
    assert faults_of_room(room, read(room, keep_folder_name=True)) == []


@pytest.mark.parametrize("folder", ["rllib_srl", "envs", "tune_configs", "scripts"])
def test_nothing_imports_the_tests(folder: str) -> None:
    for module, source in read(folder, keep_folder_name=True).items():
        assert [found for found in imports_of(source, module) if found.target.split(".")[0] == "tests"] == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("types", "import torch", "layer 0 imports numpy"),
        ("losses", "from rllib_srl.engine.protocol import Turn", "it is of layer 2"),
        ("losses", "def f():\n    import ray", "no Ray below layer 3"),
        ("batch", "import transformers", "inside the function"),
        ("worlds", "import importlib\nimportlib.import_module('envs.compare')", "arrive by name"),
        ("models", "import vllm", "rllib_srl.engine only"),
        ("learner", "def f():\n    from vllm import LLM", "rllib_srl.engine only"),
        ("engine.sync", "from ..learner import Learner", "it is of layer 3"),
        ("engine.sync", "from rllib_srl import SRLConfig", "it is of layer 4"),
        ("engine.protocol", "import pandas", "layer 2 imports"),
        ("rollout.play", "from ray.rllib.env.env_runner import EnvRunner", "SingleAgentEpisode only"),
        ("novel", "", "add it to LAYER_OF"),
    ],
)
def test_a_broken_rule_is_found(module: str, source: str, fault: str) -> None:
    rest = {"": "", "engine": "", "engine.sync": "", "engine.protocol": "", "learner": "", "srl": ""}
    (line,) = faults_of_package({**rest, module: source})
    assert fault in line


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("losses", "import math, torch\nfrom rllib_srl.types import Group"),
        ("models", "def load():\n    import transformers"),
        ("rollout.play", "from ray.rllib.env.single_agent_episode import SingleAgentEpisode"),
        ("engine.vllm_engine", "from vllm import LLM\nfrom . import sync"),
        ("srl", "import ray\nfrom rllib_srl.learner import L\nfrom rllib_srl import types"),
    ],
)
def test_what_the_design_allows_is_no_fault(module: str, source: str) -> None:
    rest = {"": "", "types": "", "engine": "", "engine.sync": "", "learner": ""}
    assert faults_of_package({**rest, module: source}) == []


def test_rules_of_rooms_and_cycles_can_fail() -> None:
    assert "envs.x:1 imports torch" in faults_of_room("envs", {"envs.x": "import torch"})[0]
    assert faults_of_room("envs", {"envs": "from . import x", "envs.x": "from envs.y import z"}) == []
    a, b = "from rllib_srl.b import f", "from rllib_srl import a"
    assert set(cycle_of({"": "", "a": a, "b": b})) == {"a", "b"}
    assert cycle_of({"": "", "a": a, "b": f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {b}"}) == []
