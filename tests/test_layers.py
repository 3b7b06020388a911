"""Which folder may import which, read from the source with `ast`: imports inside functions and for types count too.

Folders are layers, in the order of `LAYERS`. A folder imports itself and the folders of earlier lines, never one of
its own line. docs/architecture.md has the same list with what each folder is for.
"""

import ast
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
LAYERS = [
    ["types"],
    ["common"],
    ["storage"],
    ["losses"],
    ["engine"],
    ["batch"],
    ["replay"],
    ["memory"],  # public: the parts of the memory that need no Ray
    ["curriculum", "people"],
    ["rollout", "learner"],
    ["weights"],
    ["algorithm"],
    ["studies"],
    ["cli"],
    ["contrib"],
]
LAYER_OF = {folder: number for number, folders in enumerate(LAYERS) for folder in folders}
WITHOUT_RAY = ("types", "storage", "losses", "engine", "batch", "replay.")
WITHOUT_RAY_BUT = (  # what crosses to another process, or is a class of RLlib
    *("batch.shard", "replay.client", "replay.rllib"),
)
# What the folders beside the package import; they are installed below it.
MAY_IMPORT = {
    "envs": {
        "bm25s", "docstring_parser", "gymnasium", "huggingface_hub", "math_verify", "mpmath",
        "jsonschema", "mcp", "numpy", "openai", "pyarrow", "pydantic", "reasoning_gym", "starlette",
        "typing_extensions", "uvicorn", "verifiers", "websockets",
    },
    "tune_configs": {"rllib_srl", "ray"},
}  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
MOST_FILES = 18  # of a folder, __init__ included


@dataclass(frozen=True)
class Import:
    """An imported module or name. `is_lazy`: inside a function or for types."""

    target: str
    line: int
    is_lazy: bool


@cache
def imports_of(source: str, module: str, is_package: bool = False) -> tuple[Import, ...]:
    """Return every import of `source`; relative ones are resolved against the dotted name `module`."""
    package = module if is_package else module.rpartition(".")[0]
    found: list[Import] = []
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while nodes:  # a stack: recursive generators take several times as long
        node, is_lazy = nodes.pop()
        if isinstance(node, ast.Import):
            found += (Import(alias.name, node.lineno, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found += (Import(f"{base}.{alias.name}", node.lineno, is_lazy) for alias in node.names)
        elif isinstance(node, ast.Call) and (target := _dynamic_target(node)):
            found.append(Import(target, node.lineno, is_lazy))
        is_lazy |= isinstance(node, _FUNCTIONS)
        is_lazy |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        nodes += ((child, is_lazy) for child in ast.iter_child_nodes(node))
    return tuple(sorted(found, key=lambda one: one.line))


def _dynamic_target(node: ast.Call) -> str:
    """Return the literal module name of `importlib.import_module("...")` or `__import__("...")`, or ""."""
    if not node.args or not isinstance(node.args[0], ast.Constant):
        return ""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return str(node.args[0].value) if name in ("import_module", "__import__") else ""


def config_errors(sources: Mapping[str, str]) -> list[str]:
    """Return one line for each import that breaks a rule, of sources by their dotted names inside rllib_srl.

    "" is the package's own `__init__`, which names public classes of every layer.
    """
    errors = []
    for module, source in sources.items():
        folder = module.split(".")[0]
        if not module:
            continue
        if folder not in LAYER_OF and folder not in MAY_IMPORT:
            errors.append(f"rllib_srl.{module}: folder {folder!r} has no line in LAYERS")
            continue
        is_package = any(other.startswith(f"{module}.") for other in sources)
        for found in imports_of(source, f"rllib_srl.{module}", is_package):
            rule = _beside if folder in MAY_IMPORT else _within
            if error := rule(module, folder, found.target):
                errors.append(f"rllib_srl.{module}:{found.line} imports {found.target}: {error}")
    return errors


def _within(module: str, folder: str, target: str) -> str:
    root, _, rest = target.partition(".")
    if root in ("envs", "tune_configs", "scripts", "tests"):
        return "not an installed name"
    if root == "vllm" and folder != "engine":
        return "vLLM is imported in engine/ only"
    if root == "ray" and module.startswith(WITHOUT_RAY) and module not in WITHOUT_RAY_BUT:
        return f"{folder}/ works without Ray"
    if root != "rllib_srl":
        return ""
    other = rest.split(".")[0]
    if other in MAY_IMPORT:
        return "" if folder in ("cli", "contrib") else "environments and studies are found by name"
    if other not in LAYER_OF:
        return "" if folder in ("cli", "contrib") else "public names are for users; import the module"
    if other != folder and LAYER_OF[other] >= LAYER_OF[folder]:
        return f"{other}/ is not below {folder}/"
    return ""


def _beside(module: str, folder: str, target: str) -> str:
    allowed = MAY_IMPORT[folder] | set(sys.stdlib_module_names)
    is_own = target.startswith(f"rllib_srl.{folder}")
    is_own |= folder == "envs" and target.startswith("rllib_srl.common.loading.")  # which imports nothing
    is_allowed = is_own or target.split(".")[0] in allowed
    return "" if is_allowed else f"{folder}/ imports {', '.join(sorted(MAY_IMPORT[folder]))}"


def cycle_of(sources: Mapping[str, str]) -> list[str]:
    """Return the modules of one cycle of imports at module level, empty if there is none."""
    graph = {
        module: {
            _module_named(found.target, sources)
            for found in imports_of(source, f"rllib_srl.{module}", any(o.startswith(f"{module}.") for o in sources))
            if found.target.startswith("rllib_srl.") and not found.is_lazy
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


def _module_named(target: str, sources: Mapping[str, str]) -> str:
    parts = target.split(".")[1:]
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if name in sources), "")


def read(folder: Path) -> dict[str, str]:
    """Return the source of every module under `folder`, links followed, by dotted name."""
    paths = sorted({*folder.rglob("*.py")} | {path for name in MAY_IMPORT for path in (folder / name).rglob("*.py")})
    names = [path.relative_to(folder).with_suffix("").parts for path in paths]
    names = [parts[:-1] if parts[-1] == "__init__" else parts for parts in names]
    return {".".join(parts): path.read_text() for parts, path in zip(names, paths, strict=True)}


SOURCES = read(REPO / "rllib_srl")


def test_folders_are_layers() -> None:
    assert {"types", "envs.math.compare", "tune_configs.replay"} <= set(SOURCES)
    assert config_errors(SOURCES) == []


def test_there_is_no_import_cycle() -> None:
    assert cycle_of(SOURCES) == []


def test_the_root_holds_folders_and_no_folder_is_wide() -> None:
    files = {path.name for path in (REPO / "rllib_srl").iterdir() if path.is_file()}
    assert files == {"__init__.py", "types.py", "memory.py", "py.typed"}
    folders = {path.parent for path in (REPO / "rllib_srl").rglob("*.py")}
    sizes = {str(folder.relative_to(REPO)): len([*folder.glob("*.py")]) for folder in folders}
    wide = {folder: num for folder, num in sizes.items() if num > MOST_FILES}
    assert wide == {}


@pytest.mark.parametrize("folder", ["envs", "tune_configs", "scripts", "tests"])
def test_code_imports_installed_names_only(folder: str) -> None:
    found = [
        f"{path.relative_to(REPO)}:{one.line}"
        for path in (REPO / folder).rglob("*.py")
        for one in imports_of(path.read_text(), "x")
        if one.target.split(".")[0] in ("envs", "tune_configs")
        or (one.target.split(".")[0] == "tests" and folder != "tests")
    ]
    assert found == []


@pytest.mark.parametrize(("module", "source", "error"), [
    ("losses.kl", "from rllib_srl.engine.protocol import Turn", "engine/ is not below losses/"),
    ("rollout.episodes", "def f():\n    from rllib_srl.learner import scoring", "learner/ is not below rollout/"),
    ("losses.kl", "def f():\n    import ray", "works without Ray"),
    ("replay.buffer", "import ray", "works without Ray"),
    ("common.x", "import importlib\nimportlib.import_module('rllib_srl.envs.math.compare')", "by name"),
    ("learner.learner", "def f():\n    from vllm import LLM", "engine/ only"),
    ("engine.sync", "from ..learner import scoring", "learner/ is not below engine/"),
    ("engine.sync", "from rllib_srl import SRLConfig", "import the module"),
    ("engine.sync", "import envs.compare", "not an installed name"),
    ("envs.x", "import torch", "envs/ imports"),
    ("novel.x", "", "has no line in LAYERS"),
])  # fmt: skip
def test_a_broken_rule_is_found(module: str, source: str, error: str) -> None:
    (line,) = config_errors({"": "", "engine": "", "engine.sync": "", "learner": "", module: source})
    assert error in line


def test_cycles_are_found() -> None:
    a, b = "from rllib_srl.b import f", "from rllib_srl import a"
    assert set(cycle_of({"": "", "a": a, "b": b})) == {"a", "b"}
    assert cycle_of({"": "", "a": a, "b": f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {b}"}) == []


@pytest.mark.skipif(not (REPO / ".git").exists(), reason="not a clone")
def test_tracked_links_stay_inside_the_repository() -> None:
    """A tracked link to elsewhere, such as .venv of a worktree, would replace what others have under its name."""
    command = ["git", "ls-files", "-s"]
    listed = subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True, timeout=60).stdout
    links = [line.split("\t")[1] for line in listed.splitlines() if line.startswith("120000")]
    assert [name for name in links if not (REPO / name).resolve().is_relative_to(REPO)] == []
