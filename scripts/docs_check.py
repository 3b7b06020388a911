"""Check README and docs: which code blocks are run, and whether links and paths exist.

    <!-- run: slow engine -->      the next ```python block gets these pytest marks; without a comment it is a fast test
    <!-- no-run: why -->           the next ```python block is not run

`python scripts/docs_check.py` lists blocks and errors. tests/test_docs.py runs every block and fails on an error.
Paths and modules are checked everywhere except in the lab book, which keeps the names of its time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parent.parent
SITE = REPO / "docs" / "site" / "mkdocs.yml"
LAB_BOOK = "docs/LOG.md"
MARKS = ("slow", "engine")
FENCED = re.compile(r"^(\s*)```.*?^\s*```\s*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
# A path of the repository, wherever it stands: `rllib_srl/replay/`, "bash scripts/test.sh".
PATH = re.compile(r"(?<![\w/.~-])(?:rllib_srl|envs|tune_configs|scripts|tests|docs|\.ci)/[\w./-]*")
MODULE = re.compile(r"(?<![\w.\"/])rllib_srl(?:\.\w+)+")
COMMENT = re.compile(r"<!--\s*(run|no-run)\b:?\s*(.*?)\s*-->")


@dataclass(frozen=True)
class Block:
    """One fenced block; `rule` is "run" or "no-run", from the comment above it, "run" without one."""

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
        if match := COMMENT.fullmatch(line.strip()):
            rule, argument = match.groups()
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


def link_errors(repo: Path = REPO) -> list[str]:
    """Return an error message for each link to a missing page, heading or file of the repository."""
    errors = []
    for path in documents(repo):
        name = path.relative_to(repo).as_posix()
        for target in LINK.findall(INLINE.sub("", FENCED.sub("", path.read_text()))):
            file, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):  # another site
                continue
            place = (path.parent / file) if file else path
            if not place.exists():
                errors.append(f"{name}: {target} does not exist")
            elif anchor and anchor not in anchors_of(place.read_text()):
                errors.append(f"{name}: {target} names a heading that does not exist")
    return errors


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them of plain words."""
    headings = HEADING.findall(FENCED.sub("", text))
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def path_errors(repo: Path = REPO) -> list[str]:
    """Return an error message for each missing path or module of the repository that a document names."""
    errors = []
    for path in documents(repo):
        name, text = path.relative_to(repo).as_posix(), path.read_text()
        if name == LAB_BOOK:
            continue
        text = re.sub(r"\]\([^)\s]+\)", "]", text)  # links are `link_errors`'
        for mention in sorted({match.rstrip(".-") for match in PATH.findall(text)}):
            if not (repo / mention).exists():
                errors.append(f"{name}: {mention} does not exist")
        errors += [
            f"{name}: {m} does not exist" for m in sorted(set(MODULE.findall(text))) if not is_name(m, repo)
        ]
    return errors


def is_name(dotted: str, repo: Path = REPO) -> bool:
    """Return whether a dotted name is a module of the repository, or a name in its source."""
    at = repo
    for part in dotted.split("."):
        if (at / part).is_dir():
            at = at / part
        elif (at / f"{part}.py").is_file():
            at = at / f"{part}.py"
        else:
            source = at / "__init__.py" if at.is_dir() else at
            return source.is_file() and re.search(rf"\b{part}\b", source.read_text()) is not None
    return True


def nav_errors(repo: Path = REPO) -> list[str]:
    """Return an error message for each page missing in the website's navigation, and each entry without a page."""
    listed = set(_pages(yaml.safe_load((repo / SITE.relative_to(REPO)).read_text())["nav"]))
    pages = {path.relative_to(repo / "docs").as_posix() for path in (repo / "docs").rglob("*.md")}
    errors = [f"docs/{page} is not in the navigation" for page in sorted(pages - listed)]
    return errors + [f"the navigation lists {page}, which does not exist" for page in sorted(listed - pages)]


def _pages(nav: str | list[Any] | dict[str, Any]) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(part)


def main() -> int:
    """List the blocks that are run, then the errors; return 1 if there are any."""
    for block in python_blocks():
        print(f"{block.document}:{block.line} runs {' '.join(block.marks) or 'fast'}")
    errors = link_errors() + path_errors() + nav_errors()
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
