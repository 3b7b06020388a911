"""How long prompts stay silent, worked by hand, and both pilots in their shortest form."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from scripts.pilots import Silence, main


def visit(key, *rewards):
    return SimpleNamespace(prompt=SimpleNamespace(key=key), rewards_G=np.array(rewards, np.float32))


def test_how_visits_follow_each_other_by_hand():
    found = Silence()
    assert math.isnan(found.chance_after(True))
    found.add([visit("a", 0, 0), visit("b", 1, 0), visit("c", 1, 1)])
    found.add([visit("a", 0, 0), visit("b", 0, 0)])  # silent again; silent after mixed
    found.add([visit("a", 0, 1), visit("b", 1, 0), visit("c", 1, 1), visit("d", 0, 0)])
    assert found.counts == {(True, True): 2, (False, True): 1, (True, False): 2}
    assert (found.chance_after(True), found.chance_after(False)) == (2 / 4, 1.0)


@pytest.mark.slow
def test_the_pilots_print_their_figures_and_verdicts(ray_here, capsys):
    assert main(["silence", "--num-kinds", "2", "--passes", "2", "--debug"]) == 0
    printed = capsys.readouterr().out
    assert "20 prompts, 28 visits after another" in printed  # 48 in three iterations
    assert ": silence lasts (at least 0.7, and 0.2 more than after mixed)" in printed
    assert main(["facts", "--visits", "1", "--rates", "2e-4", "--debug"]) == 0
    printed = capsys.readouterr().out
    assert "missed: above 0.8 is learned, 0.15 or more is lost" in printed  # nothing is learned from one visit
    (row,) = [line.split() for line in printed.splitlines() if line.startswith("  0.0002")]
    before, learned, _, later, lost = map(float, row[1:])
    assert lost == pytest.approx(learned - later, abs=0.011) and 0 <= before <= 0.6
