#!/usr/bin/env python3
"""Count what the house costs: files that a default run enters, and lines beside the budgets of the design.

    python scripts/house.py walk                     one iteration with default settings, under a profile hook
    python scripts/house.py lines                    lines and statements by folder, settings, commands, dependencies
    python scripts/house.py lines --root DIRECTORY   the same of another checkout

`walk` counts the files of rllib_srl in which a function is called (what an import runs does not count), twice: from
`algo.train()` to the first backward pass, without what runners and memory call (rollout, engine, envs and replay), and
in the memory from the arrival of episodes to the end of the next draw.
It plays everything in one process with the tiny model and 16 prompts; the iteration that is counted draws revisits.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import inspect
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "rllib_srl" / "engine" / "tiny"
AUTOGRAD = os.path.join("torch", "autograd", "__init__.py")
MEMORY = "SRLReplayBuffer"
ARRIVALS = ("add",)
DRAWS = ("draw_prompts", "draw_groups")
OTHERS = ("rollout", "engine", "envs", "replay")  # folders of the runners' and the memory's processes
# Files at most, and the folders that do not count.
WALKS: dict[str, tuple[int, tuple[str, ...]]] = {
    "train() to the gradient": (18, OTHERS),
    "an episode to the next draw": (14, ()),
}
NUM_ITERATIONS = 3  # before the one that is counted: the memory must hold `replay_min_buffer_size` items

# Lines, at most, of folders of rllib_srl; "" stands for the files beside them.
BUDGETS = {
    "": 400,
    "common": 1400,  # with storage
    "losses": 900,
    "engine": 2500,
    "batch": 1200,
    "replay": 3300,
    "curriculum": 1100,
    "rollout": 3000,
    "learner": 3600,
    "weights": 400,
    "algorithm": 4300,
    "studies": 2000,
    "people": 3000,
    "cli": 3000,
    "core": 30000,
    "contrib": 6000,
    "envs": 19000,
    "tests": 34000,
    "files": 180,  # of rllib_srl without contrib
    "settings": 160,
}
LONGEST = 600  # lines of a file
Counts = tuple[int, int, int]  # files, lines, statements


# --- walk -------------------------------------------------------------------------------------------


class Walk:
    """The files below a folder in which functions were called between two events, in any thread."""

    def __init__(self, folder: Path) -> None:
        """Count files below `folder`."""
        self._folder = str(folder) + os.sep
        self.is_on = False
        self.files: set[str] = set()

    def enter(self, code: CodeType) -> None:
        """Note a call; bodies of modules and classes run at an import and do not count."""
        if self.is_on and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(self._folder):
            self.files.add(code.co_filename)

    def paths(self, without: Collection[str] = ()) -> list[Path]:
        """Return the files, sorted and relative to the folder, without those of some of its folders."""
        paths = [Path(name).relative_to(self._folder) for name in sorted(self.files)]
        return [path for path in paths if path.parts[0] not in without]

    def num_lines(self, without: Collection[str] = ()) -> int:
        """Return the lines of the files together."""
        return sum(num_lines(Path(self._folder) / path) for path in self.paths(without))


class Hook:
    """A profile hook for two walks: `gradient` ends at a backward pass, `memory` covers the calls of the memory.

    It does nothing unless `is_on`, so that threads which started with it run freely before.
    """

    def __init__(self, folder: Path) -> None:
        """Watch functions of files below `folder`."""
        self.gradient, self.memory = Walk(folder), Walk(folder)
        self.called: set[str] = set()  # operations of the memory
        self.has_gradient = False
        self.is_on = False
        self._depth = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call or a return."""
        code = frame.f_code
        if not self.is_on:
            return
        if event == "call":
            if code.co_name == "backward" and code.co_filename.endswith(AUTOGRAD):
                self.has_gradient |= self.gradient.is_on
                self.gradient.is_on = False
            elif operation := _operation(code):
                self._depth += 1
                self.called.add(operation)
                self.memory.is_on = True
            self.gradient.enter(code)
            self.memory.enter(code)
        elif event == "return" and _operation(code):
            self._depth -= 1
            self.memory.is_on = self._depth > 0


def _operation(code: CodeType) -> str:
    """Return the name of an operation of the memory that adds or draws, "" for other functions."""
    owner, _, name = code.co_qualname.rpartition(".")
    return name if owner == MEMORY and name in (*ARRIVALS, *DRAWS) else ""


def walk(root: Path, directory: Path) -> dict[str, Walk]:
    """Run iterations with default settings in this process and return the two walks of the last.

    Raises:
        RuntimeError: no gradient was computed, or the memory was not called: nothing was measured.
    """
    hook = Hook(root / "rllib_srl")
    threading.setprofile(hook)  # threads start in `build_algo`
    from rllib_srl import SRLConfig

    config = SRLConfig().rl_module(model_config={"model": str(TINY)})
    settings = {"num_env_runners": 0, "num_learners": 0, "engine": "transformers", "log_directory": str(directory)}
    envs = {"envs": {"compare": {"num_shots": 0}, "registers": {"num_shots": 0}}, "max_turns": 4}
    envs |= {"max_turn_tokens": 14, "max_episode_tokens": 160}
    algo = config.update_from_dict({**settings, **envs, "seed": 1, "lr": 3e-4}).build_algo()
    for _ in range(NUM_ITERATIONS):
        algo.train()
    hook.is_on = hook.gradient.is_on = True
    sys.setprofile(hook)
    try:
        algo.train()
    finally:
        hook.is_on = False
        sys.setprofile(None)
        threading.setprofile(None)
    algo.stop()
    if not hook.has_gradient or not hook.called & set(ARRIVALS) or not hook.called & set(DRAWS):
        raise RuntimeError(f"gradient: {hook.has_gradient}, calls of {MEMORY}: {sorted(hook.called)}; expected both")
    return dict(zip(WALKS, (hook.gradient, hook.memory), strict=True))


def print_walk(root: Path, names: bool) -> None:
    """Print the two walks."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="house-") as directory:
        walks = walk(root, Path(directory))
    for name, (most, without) in WALKS.items():
        trace = walks[name]
        paths = trace.paths(without)
        folders = Counter(folder_of(Path("rllib_srl") / path) or "rllib_srl" for path in trace.paths())
        print(f"{name}: {len(paths)} files (at most {most}), {trace.num_lines(without):,} lines", flush=True)
        print("    all by folder: " + ", ".join(f"{folder} {num}" for folder, num in folders.items()))
        print("".join(f"    {path}\n" for path in paths) if names else "", end="", flush=True)


# --- lines ------------------------------------------------------------------------------------------


def tracked(root: Path) -> list[Path]:
    """Return the tracked Python files of a checkout, without links."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.pyi"], cwd=root, check=True, capture_output=True, text=True, timeout=60
    )
    paths = [root / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def num_lines(path: Path) -> int:
    """Return the lines of a file, blank ones too."""
    return len(path.read_text(encoding="utf-8").splitlines())


def num_statements(path: Path) -> int:
    """Return the statements of a Python file."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def folder_of(path: Path) -> str:
    """Return the row of a tracked file, given relative to the checkout: a folder of rllib_srl or of the top."""
    first, *parts = path.parts
    if first != "rllib_srl" or not parts:
        return first
    folder = parts[0] if len(parts) > 1 else ""
    return {"storage": "common"}.get(folder, folder)


def counts_by_folder(root: Path, paths: Sequence[Path]) -> dict[str, Counts]:
    """Return folder -> files, lines, statements."""
    counts: dict[str, Counts] = {}
    for path in paths:
        row = folder_of(path.relative_to(root))
        files, lines, statements = counts.get(row, (0, 0, 0))
        counts[row] = (files + 1, lines + num_lines(path), statements + num_statements(path))
    return counts


def num_settings(root: Path) -> int:
    """Return the rows of docs/settings.md that are settings and parameters; names of several words stand for others."""
    return len(re.findall(r"^\| `[^` ]+`", (root / "docs" / "settings.md").read_text(encoding="utf-8"), re.MULTILINE))


def num_commands(root: Path) -> int:
    """Return the number of commands of `srl`: the entries of `COMMANDS` in cli/main.py."""
    tree = ast.parse((root / "rllib_srl" / "cli" / "main.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(name) for name in node.targets] == ["COMMANDS"]:
            assert isinstance(node.value, ast.Dict)
            return len(node.value.keys)
    raise ValueError("rllib_srl/cli/main.py has no COMMANDS")


def dependencies(root: Path) -> list[str]:
    """Return the packages that the installation requires."""
    parser = configparser.ConfigParser()
    parser.read(root / "setup.cfg", encoding="utf-8")
    return parser["options"]["install_requires"].split("\n")[1:]


def rows_of(root: Path) -> Iterator[list[str]]:
    """Yield the rows of the table of lines: name, files, lines, statements, budget of lines."""
    paths = tracked(root)
    by_folder = counts_by_folder(root, paths)
    package = [path for path in paths if path.relative_to(root).parts[0] == "rllib_srl"]
    top = {path.relative_to(root).parts[0] for path in paths} - {"rllib_srl"}
    core = {name: row for name, row in by_folder.items() if name not in top and name != "contrib"}

    def row(name: str, counts: Iterable[Counts], budget: int | None) -> list[str]:
        return [name, *(f"{sum(numbers):,}" for numbers in zip(*counts, strict=True)), f"{budget:,}" if budget else ""]

    for name in sorted(core):
        yield row(f"rllib_srl/{name}", [core[name]], BUDGETS.get(name))
    yield row("core together", core.values(), BUDGETS["core"])
    for name in ("contrib", *sorted(top)):
        if name in by_folder:
            yield row(name, [by_folder[name]], BUDGETS.get(name))
    yield row("all tracked Python", by_folder.values(), None)
    too_long = [path for path in package if num_lines(path) > LONGEST and "contrib" not in path.parts]
    yield ["files of the core", f"{sum(files for files, _, _ in core.values())}", "", "", f"{BUDGETS['files']}"]
    yield [f"files of the core above {LONGEST} lines", f"{len(too_long)}", "", "", "0"]
    yield ["settings", f"{num_settings(root)}", "", "", f"{BUDGETS['settings']}"]
    yield ["commands", f"{num_commands(root)}", "", "", ""]
    yield ["hard dependencies", f"{len(dependencies(root))}", "", "", ""]


def print_lines(root: Path) -> None:
    """Print the table of lines."""
    rows = [["", "files", "lines", "statements", "at most"], *rows_of(root)]
    widths = [max(len(row[at]) for row in rows) for at in range(5)]
    for name, *numbers in rows:
        cells = [f"{number:>{width}}" for number, width in zip(numbers, widths[1:], strict=True)]
        print("  ".join([f"{name:<{widths[0]}}", *cells]).rstrip())


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("walk", "lines"))
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIRECTORY", help="a checkout (default: this one)")
    parser.add_argument("--names", action="store_true", help="walk: name the files too")
    arguments = parser.parse_args(argv)
    root = arguments.root.resolve()
    if arguments.what == "lines":
        print_lines(root)
        return 0
    sys.path[0] = str(root)
    os.environ["PYTHONPATH"] = str(root)
    print_walk(root, arguments.names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
