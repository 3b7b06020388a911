"""Rules by name: those of `contrib` are found by file, and a misspelt one lists the files there are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rllib_srl import contrib
from rllib_srl.common.rules import Rules, contrib_files, import_path


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("uniform", "uniform"),
        ("my_rules:rule", "my_rules:rule"),
        ("contrib.greso", "rllib_srl.contrib.greso:greso"),
        ("contrib.rescue:rlep", "rllib_srl.contrib.rescue:rlep"),
    ],
)
def test_contrib_stands_for_a_file_of_its_folder(name: str, path: str) -> None:
    assert import_path(name) == path


def test_a_method_of_contrib_is_loaded_when_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doubling.py").write_text("def doubling(x):\n    return 2 * x\n\ndef tripling(x):\n    return 3 * x\n")
    monkeypatch.setattr(contrib, "__path__", [*contrib.__path__, str(tmp_path)])
    monkeypatch.setattr(contrib.__spec__, "submodule_search_locations", contrib.__path__)
    rules = Rules("kind", {"single": lambda x: x})
    assert "contrib.doubling" in contrib_files()
    assert "rllib_srl.contrib.doubling" not in sys.modules
    assert rules.named("contrib.doubling")(4) == 8
    assert rules.named("contrib.doubling:tripling")(4) == 12
    assert rules.fault("doubling") == "expected one of 'single', 'module:rule'; did you mean 'contrib.doubling'?"
    listed = ", ".join(map(repr, contrib_files()))
    assert rules.fault("contrib.dubling") == f"expected one of {listed}; did you mean 'contrib.doubling'?"
    assert "has no 'other'; it has doubling, tripling" in rules.fault("contrib.doubling:other")
    sys.modules.pop("rllib_srl.contrib.doubling")
