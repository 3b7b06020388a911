"""The rule of a screen, and the weights of groups that follow from it, by enumeration."""

from __future__ import annotations

import re
from itertools import combinations
from math import comb
from pathlib import Path
from types import SimpleNamespace

import pytest

from rllib_srl.rollout.screening import with_signal
from rllib_srl.types import StopReason


def episode(group_id, reward, reason=StopReason.TERMINATED):
    return SimpleNamespace(custom_data={"group_id": group_id, "stop_reason": reason}, get_return=lambda: reward)


def test_a_group_has_signal_if_the_rewards_of_its_valid_episodes_differ():
    lost = StopReason.ENGINE_FAILED
    screen = [episode("a", 1.0), episode("b", 0.0), episode("a", 0.0), episode("b", 0.0)]
    screen += [episode("c", 1.0), episode("c", 0.0, lost), episode("d", 0.5), episode("d", 0.25), episode("e", 0, lost)]
    assert with_signal(screen) == {"a", "d"}
    assert with_signal([]) == frozenset()


@pytest.mark.parametrize(("group_size", "screen_size"), [(8, 2), (8, 4), (5, 3), (3, 2)])
def test_the_share_of_groups_that_pass_is_that_of_the_docstring(group_size, screen_size):
    """All places of k successes among G episodes are equally likely."""
    for k in range(group_size + 1):
        places = list(combinations(range(group_size), k))
        mixed = [p for p in places if 0 < sum(at < screen_size for at in p) < screen_size]
        formula = 1 - (comb(k, screen_size) + comb(group_size - k, screen_size)) / comb(group_size, screen_size)
        assert len(mixed) / len(places) == pytest.approx(formula)


def test_the_weights_of_the_docstring():
    shares = [1 - (comb(k, 2) + comb(8 - k, 2)) / comb(8, 2) for k in range(1, 8)]
    assert [round(share, 2) for share in shares] == [0.25, 0.43, 0.54, 0.57, 0.54, 0.43, 0.25]


def test_the_costs_of_the_document():
    """Episodes per group with signal: (s + passed (G - s)) / passed, G / mixed without a screen."""
    text = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    rows = {"all": 1.0, "half": 0.5, "a fifth": 0.2}
    lines = [line for line in text.splitlines() if re.match(r"\| (all|half|a fifth) at", line)]
    assert len(lines) == 6
    for line in lines:
        name, *costs = [cell.strip() for cell in line.strip("|").split("|")]
        share = next(value for row, value in rows.items() if name.startswith(row))
        p = float(re.search(r"at (\.\d)", name)[1])
        for screen_size, cost in zip((8, 2, 3, 4), costs, strict=True):
            passed = share * (1 - p**screen_size - (1 - p) ** screen_size)
            assert round((screen_size + passed * (8 - screen_size)) / passed, 1) == float(cost)
