"""Every Python block of the documentation runs as it stands, every link leads somewhere, and the website builds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import docs_check
from tests.quick_workers import IMPORTS, VLLM

IN_TURN = """
import os, runpy, sys, traceback

failed = []
for path in sys.argv[1:]:
    os.chdir(os.path.dirname(path))
    try:
        runpy.run_path(path, run_name="__main__")
    except Exception:
        traceback.print_exc()
        failed.append(path)
if failed:
    sys.exit("failed: " + " ".join(failed))
"""
LONG = pytest.param(("slow", "engine"), marks=[pytest.mark.slow, pytest.mark.engine])


@pytest.mark.timeout(960)
@pytest.mark.parametrize("marks", [(), LONG], ids=["quick", "long"])
def test_the_code_blocks_run(marks: tuple[str, ...], tmp_path: Path) -> None:
    """Each with its own names and in its own folder, in one process, so that Ray and torch are imported once."""
    paths = []
    for block in (block for block in docs_check.python_blocks() if block.marks == marks):
        paths.append(tmp_path / block.document.replace("/", "-") / f"line_{block.line}" / "block.py")
        paths[-1].parent.mkdir(parents=True)
        paths[-1].write_text(block.source)
    assert paths
    (tmp_path / "in_turn.py").write_text(IN_TURN)
    result = subprocess.run(
        [sys.executable, "-m", "tests.quick_workers", "in_turn.py", *map(str, paths)],
        cwd=tmp_path,
        # A checkout that is not installed works too.
        env={**os.environ, "PYTHONPATH": str(docs_check.REPO), IMPORTS: VLLM if "engine" in marks else ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-6000:]}"


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


@pytest.mark.parametrize(("text", "error"), [
    ("```python\na", "x.md:1: the ``` block is not closed"),
    ("<!-- no-run: why -->\ntext\n", "x.md:2: the comment 'no-run' must stand directly above"),
])  # fmt: skip
def test_a_broken_document_is_named(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        docs_check.blocks_of(text, "x.md")


def test_every_link_leads_somewhere() -> None:
    assert docs_check.link_errors() == []


def test_every_path_and_module_that_is_named_exists() -> None:
    assert docs_check.path_errors() == []


def test_every_page_is_in_the_navigation() -> None:
    assert docs_check.nav_errors() == []


def test_the_readme_is_at_most_160_lines() -> None:
    assert len((docs_check.REPO / "README.md").read_text().splitlines()) <= 160


def test_errors_are_found(tmp_path: Path) -> None:
    """Of a repository whose documentation has one error of each kind beside things that are right."""
    readme = "[a](docs/a.md) [b](docs/b.md) [c](docs/a.md#two-words) [d](docs/a.md#three) [e](https://x.y/z)\n"
    page = "# Two words\n`[no](link.md)` rllib_srl.types.Group rllib_srl.types.Nothing rllib_srl.gone\n"
    files = {
        "README.md": readme + "`rllib_srl/types.py` scripts/gone.sh ~/.config/rllib_srl/judges x/tests/y.py\n",
        "docs/a.md": page,
        "docs/unlisted.md": "",
        "docs/LOG.md": "rllib_srl.gone",
        "docs/site/mkdocs.yml": "nav:\n  - A: a.md\n  - More:\n      - Lab book: LOG.md\n      - C: c.md\n",
        "rllib_srl/types.py": "class Group: ...\n",
        "rllib_srl/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert docs_check.link_errors(tmp_path) == [
        "README.md: docs/b.md does not exist",
        "README.md: docs/a.md#three names a heading that does not exist",
    ]
    assert docs_check.path_errors(tmp_path) == [
        "README.md: scripts/gone.sh does not exist",
        "docs/a.md: rllib_srl.gone does not exist",
        "docs/a.md: rllib_srl.types.Nothing does not exist",
    ]
    assert docs_check.nav_errors(tmp_path) == [
        "docs/unlisted.md is not in the navigation", "the navigation lists c.md, which does not exist"
    ]


@pytest.mark.slow
def test_the_website_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(docs_check.SITE), "-d", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(list((docs_check.REPO / "docs").rglob("*.md")))
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]*src=\"(http[^\"]*)|<link[^>]*href=\"(http[^\"]*)", page.read_text()
        )
        assert loaded == [], page.name
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    assert any(entry["location"].startswith("memory.html") and "revisit" in entry["text"] for entry in index["docs"])
    assert (tmp_path / "examples" / "minimal_grpo.py").is_file()
