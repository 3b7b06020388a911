"""Find the documentation's code blocks and the README's tree of files, and check both against the repository.

    <!-- run: slow engine -->      the next ```python block gets these pytest marks; without a comment it is a fast test
    <!-- no-run: why -->           the next ```python block is not run
    <!-- tree -->                  the next ``` block is the map of the repository

A tree line is `path   what it is`; two spaces or more end the path, indentation nests, `test_*.py` stands for many.
tests/test_docs.py runs every block; by hand: `python scripts/docs_check.py` checks the tree and lists the blocks.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

REPO = Path(__file__).resolve().parent.parent
MARKS = ("slow", "engine")
COMMENT = re.compile(r"<!--\s*(run|no-run|tree)\b:?\s*(.*?)\s*-->")


@dataclass(frozen=True)
class Block:
    """One fenced block; `rule` is "run", "no-run" or "tree", from the comment above it, "run" without one."""

    document: str
    line: int
    language: str
    source: str
    rule: str
    argument: str

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the pytest marks the comment names.

        Raises:
            ValueError: if it names one that does not exist.
        """
        marks = tuple(self.argument.replace(",", " ").split()) if self.rule == "run" else ()
        if wrong := [mark for mark in marks if mark not in MARKS]:
            raise ValueError(f"{self.document}:{self.line}: run: {' '.join(wrong)}; expected {' or '.join(MARKS)}")
        return marks


def blocks_of(text: str, document: str) -> list[Block]:
    """Return the fenced blocks of a Markdown text, each with the rule of the comment directly above it.

    Raises:
        ValueError: if a block is not closed, or a rule stands above no block.
    """
    blocks: list[Block] = []
    rule, argument = "", ""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if found := COMMENT.fullmatch(line.strip()):
            rule, argument = found.groups()
        elif opened := re.fullmatch(r"(\s*)```(\w*).*", line):
            inside = _until_closed(lines, len(opened[1]), f"{document}:{number}")
            blocks.append(Block(document, number, opened[2], inside, rule or "run", argument))
            rule, argument = "", ""
        elif line.strip() and rule:
            raise ValueError(f"{document}:{number}: the comment '{rule}' must stand directly above a ``` block")
    return blocks


def _until_closed(lines: Iterable[tuple[int, str]], indent: int, where: str) -> str:
    inside: list[str] = []
    for _, line in lines:
        if line.strip() == "```":
            return "\n".join(inside) + "\n"
        inside.append(line[indent:])
    raise ValueError(f"{where}: the ``` block is not closed")


def documents(repo: Path = REPO) -> list[Path]:
    """Return README.md and every Markdown file under docs/."""
    return [path for path in [repo / "README.md", *sorted((repo / "docs").rglob("*.md"))] if path.exists()]


def python_blocks(repo: Path = REPO) -> list[Block]:
    """Return every ```python block that is to be run."""
    blocks = [b for path in documents(repo) for b in blocks_of(path.read_text(), path.relative_to(repo).as_posix())]
    return [block for block in blocks if block.language == "python" and block.rule == "run"]


def tree_paths(tree: str) -> list[str]:
    """Return the paths a tree names, relative to the repository, folders with a closing slash."""
    paths: list[str] = []
    folders: list[tuple[int, str]] = []
    for line in tree.splitlines():
        name = re.split(r"\s{2,}", line.strip())[0]
        if not name or line.startswith("#"):
            continue
        indent = len(line) - len(line.lstrip())
        while folders and folders[-1][0] >= indent:
            folders.pop()
        for part in name.split():  # several short names may share a line
            paths.append((folders[-1][1] if folders else "") + part)
            if part.endswith("/"):
                folders.append((indent, paths[-1]))
    return paths


def tree_faults(named: Iterable[str], files: Iterable[str]) -> list[str]:
    """Return one line for each path of the tree that is not there, and each file of two levels that is not in it.

    Args:
        named: what `tree_paths` returned.
        files: every file of the repository, with slashes.
    """
    files, named = sorted(files), list(named)
    there = set(files)
    for file in files:
        there.update(f"{folder.as_posix()}/" for folder in PurePosixPath(file).parents if folder.name)
    faults = [f"{path} is in the README's tree and not there" for path in named if not fnmatch.filter(there, path)]
    for path in sorted(there):
        if path.rstrip("/").count("/") < 2 and not any(fnmatch.fnmatchcase(path, pattern) for pattern in named):
            faults.append(f"{path} is there and not in the README's tree")
    return faults


def repository_files(repo: Path = REPO) -> list[str]:
    """Return every file that git knows or would add.

    Raises:
        RuntimeError: outside a git checkout.
    """
    command = ["git", "-C", str(repo), "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"'{' '.join(command)}' failed: {result.stderr.strip()}")
    return [name for name in result.stdout.splitlines() if (repo / name).exists()]


def readme_tree(repo: Path = REPO) -> str:
    """Return the README's tree.

    Raises:
        ValueError: unless there is exactly one.
    """
    trees = [block for block in blocks_of((repo / "README.md").read_text(), "README.md") if block.rule == "tree"]
    if len(trees) != 1:
        raise ValueError(f"README.md has {len(trees)} blocks under '<!-- tree -->'; expected 1")
    return trees[0].source


def main() -> int:
    """List the blocks and print the tree's faults; return 1 if there are any."""
    for block in python_blocks():
        print(f"{block.document}:{block.line} runs {' '.join(block.marks) or 'fast'}")
    faults = tree_faults(tree_paths(readme_tree()), repository_files())
    print("\n".join(faults) or "the README's tree agrees with the repository")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
