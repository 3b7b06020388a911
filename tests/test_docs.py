"""Every Python block of the documentation runs as it stands, and the README's tree is the repository's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import docs_check

TIMEOUT_S = {False: 60, True: 1200}  # by whether the block is marked slow or engine


def _params() -> list:
    return [
        pytest.param(
            block,
            id=f"{block.document}:{block.line}",
            marks=[*(getattr(pytest.mark, mark) for mark in block.marks), pytest.mark.timeout(TIMEOUT_S[True] + 60)],
        )
        for block in docs_check.python_blocks()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("block", _params())
def test_code_block_runs(block: docs_check.Block, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(block.source)
    result = subprocess.run(
        [sys.executable, "block.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(docs_check.REPO)},  # a checkout that is not installed works too
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S[bool(block.marks)],
        check=False,
    )
    assert result.returncode == 0, f"{block.document}:{block.line}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


def test_readme_tree_is_the_repository() -> None:
    if not (docs_check.REPO / ".git").exists():
        pytest.skip("not a git checkout: no list of the repository's files")
    named = docs_check.tree_paths(docs_check.readme_tree())
    assert docs_check.tree_faults(named, docs_check.repository_files()) == []


MARKDOWN = """
<!-- run: slow engine -->
```python
a = 1
```
<!-- no-run: needs two machines -->
```python
b = 2
```
- a list
  ```python
  if c:
      d()
  ```
"""


def test_blocks_carry_the_rule_above_them() -> None:
    first, second, third = docs_check.blocks_of(MARKDOWN, "x.md")
    assert (first.source, first.line, first.marks) == ("a = 1\n", 3, ("slow", "engine"))
    assert (second.rule, second.argument) == ("no-run", "needs two machines")
    assert (third.source, third.rule, third.marks) == ("if c:\n    d()\n", "run", ())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```python\na", "x.md:1: the ``` block is not closed"),
        ("<!-- no-run: why -->\ntext\n", "x.md:2: the comment 'no-run' must stand directly above"),
    ],
)
def test_a_broken_document_is_named(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        docs_check.blocks_of(text, "x.md")


def test_an_unknown_mark_is_named() -> None:
    (block,) = docs_check.blocks_of("<!-- run: fast -->\n```python\n```\n", "x.md")
    with pytest.raises(ValueError, match="run: fast; expected slow or engine"):
        _ = block.marks


def test_tree_faults_are_found_both_ways() -> None:
    tree = "setup.cfg       metadata\npkg/            the package\n    core/   sub\n        x.py  leaf\n    a.py  b\n"
    tree += "tests/\n    test_*.py            mirrors pkg\n"
    named = docs_check.tree_paths(tree)
    assert named == ["setup.cfg", "pkg/", "pkg/core/", "pkg/core/x.py", "pkg/a.py", "tests/", "tests/test_*.py"]
    files = ["setup.cfg", "pkg/a.py", "pkg/core/x.py", "pkg/core/y.py", "tests/test_a.py"]
    assert docs_check.tree_faults(named, files) == []  # pkg/core/y.py is on the third level
    assert docs_check.tree_faults([*named, "gone.py"], files) == ["gone.py is in the README's tree and not there"]
    assert docs_check.tree_faults(named, [*files, "pkg/b.py", "LICENSE"]) == [
        "LICENSE is there and not in the README's tree",
        "pkg/b.py is there and not in the README's tree",
    ]
