"""Rules of the folder `rllib_srl/contrib`: one file a method, with a test and a row in docs/contrib.md."""

import ast
import re
from pathlib import Path

from tests.test_layers import imports_of

ROOT = Path(__file__).resolve().parents[2]
CONTRIB = ROOT / "rllib_srl" / "contrib"
FILES = sorted(path.stem for path in CONTRIB.glob("*.py") if path.stem != "__init__")


def test_a_file_uses_public_names_only():
    """No name with a leading underscore is imported, and no such attribute of another object is read."""
    for name in FILES:
        source = (CONTRIB / f"{name}.py").read_text(encoding="utf-8")
        targets = [one.target for one in imports_of(source, f"rllib_srl.contrib.{name}")]
        assert not [one for one in targets if re.search(r"\._(?!_future)", one)], name
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
                owner = node.value.id if isinstance(node.value, ast.Name) else ast.unparse(node.value)
                assert owner in ("self", "cls"), f"{name}.py:{node.lineno} reads {owner}.{node.attr}"


def test_each_file_stands_alone_and_has_a_test_and_a_row():
    text = (ROOT / "docs" / "contrib.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for name in FILES:
        source = (CONTRIB / f"{name}.py").read_text(encoding="utf-8")
        others = [one.target for one in imports_of(source, f"rllib_srl.contrib.{name}")]
        assert not [one for one in others if one.startswith("rllib_srl.contrib")], name
        assert (ROOT / "tests" / "contrib" / f"test_{name}.py").is_file(), name
        assert any(re.search(rf"contrib[ .]{name}\b", row) for row in rows), f"docs/contrib.md has no row of {name}"
    assert [path for path in CONTRIB.iterdir() if path.is_dir() and path.name != "__pycache__"] == []
