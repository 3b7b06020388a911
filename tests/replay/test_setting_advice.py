"""Settings of the memory that cannot work with groups of one, and those without effect."""

from __future__ import annotations

import pytest

from rllib_srl.replay.setting_advice import Run, group_size_faults, warnings_of
from rllib_srl.replay.settings import ReplaySettings

EIGHT = Run(group_size=8, may_revisit=True, may_reuse=False, has_posterior=False)
ONE = Run(group_size=1, may_revisit=True, may_reuse=True, has_posterior=True)


def said(run: Run = EIGHT, **settings) -> list[str]:
    return warnings_of(ReplaySettings(**settings), run)


def faults(run: Run = ONE, **settings) -> list[str]:
    return list(group_size_faults(ReplaySettings(**settings), run))


# --- what has no effect ---------------------------------------------------------------------------


def test_defaults_and_settings_that_act_are_not_warned_of():
    for run in (EIGHT, ONE, ONE._replace(may_revisit=False, may_reuse=False), EIGHT._replace(has_posterior=True)):
        assert said(run) == []
    assert said(spacing="fsrs", selection="srl") == said(spacing="fsrs", fill_with_not_due=False) == []
    assert said(history_by="kl", selection=OWN) == said(EIGHT._replace(has_posterior=True), history_by="kl") == []
    off = {"capacity": 0, "revisit_fraction": 0, "reuse_fraction": 0}
    assert said(EIGHT._replace(may_revisit=False), selection="srl", **off) == []


OWN = "rllib_srl.replay.selection.rules:recent"  # by its path, as a rule of a user


def test_due_dates_that_no_draw_reads():
    (line,) = said(spacing="fsrs")
    assert line.startswith("replay_spacing = 'fsrs' with replay_selection = 'uniform': ")


def test_settings_of_reuse_without_reuse_and_of_revisits_without_revisits():
    assert said(EIGHT._replace(may_reuse=True), max_uses=9) == []
    assert said(max_uses=9) == [
        "replay_max_uses = 9 has no effect with replay_reuse_fraction = 0: nothing is trained on again"
    ]
    none = EIGHT._replace(may_revisit=False)
    assert said(none, selection="per") == [
        "replay_selection = 'per' has no effect with replay_revisit_fraction = 0: no prompt is drawn from the memory"
    ]
    assert said(none, reuse_selection="uniform") == []


@pytest.mark.parametrize("selection", ["uniform", "per"])
def test_how_history_is_discounted_where_nothing_reads_it(selection):
    reads = "history is read with advantage = 'posterior' or by rules such as replay_selection = 'contrib.mopps'"
    assert said(history_by="kl", selection=selection) == [
        f"replay_history_by = 'kl' changes metrics only, at the cost of a forward pass in each iteration: {reads}"
    ]
    assert said(history_half_life=2.0, selection=selection) == [
        f"replay_history_half_life = 2.0 changes metrics only: {reads}"
    ]
    none = EIGHT._replace(may_revisit=False)
    assert any("changes metrics only" in line for line in said(none, history_by="visits", selection=OWN))


# --- groups of one --------------------------------------------------------------------------------


def test_priorities_by_spread_are_refused_with_groups_of_one():
    assert faults(selection="per") == [
        "replay_selection = 'per' with group_size = 1; expected 'uniform', or by = 'reward': one episode has no "
        "spread, so that all draws would be uniform"
    ]
    assert faults(ONE._replace(group_size=2), selection="per") == faults(reuse_selection="per") == []
    assert faults(selection="per", selection_config={"by": "reward"}) == []
    assert faults(ONE._replace(may_revisit=False), selection="per") == []
    assert faults(capacity=0, revisit_fraction=0.0, selection="per") == []
