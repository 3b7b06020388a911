"""The figures by which kinds are kept for a pool, worked by hand, and the script on two kinds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from scripts.pool_kinds import figures_of, main, rows_of, summary_of


def test_figures_by_hand():
    rewards_PG = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0.5, 0.5, 0.5, 0.5]], float)
    found = figures_of(rewards_PG, 3.5)
    assert (found.pass_rate, found.silent, found.none, found.all) == (7 / 16, 3 / 4, 1 / 4, 1 / 4)
    assert found.num_tokens == 3.5
    live = figures_of(np.array([[1, 0], [0, 1]], float), 2.0)
    never = figures_of(np.zeros((2, 2)), 2.0)
    assert [row[0] for row in rows_of({"a": found, "b": live})] == ["kind", "b", "a"]  # most signal first
    assert summary_of({"a": found, "b": live, "c": never}) == (
        "3 kinds: 0.58 of groups silent, 0.67 of kinds with a pass rate from .1 to .9"
    )


@pytest.mark.slow
def test_two_kinds_are_played(ray_here, tmp_path, capsys):
    path = tmp_path / "figures.json"
    words = ["--kinds", "compare_3_largest", "copy_4_forwards", "--num-prompts", "4", "--group-size", "4"]
    assert main([*words, "--json", str(path), "--debug"]) == 0
    assert "1/2 compare_3_largest: pass rate" in capsys.readouterr().out
    figures = json.loads(path.read_text())
    assert set(figures) == {"compare_3_largest", "copy_4_forwards"}
    assert figures["copy_4_forwards"]["pass_rate"] == 0.0 and figures["copy_4_forwards"]["silent"] == 1.0
