"""Settings of the memory that cannot work with groups of one."""

from __future__ import annotations

from rllib_srl.replay.setting_advice import Run, group_size_errors
from rllib_srl.replay.settings import ReplaySettings

ONE = Run(group_size=1, may_revisit=True, may_reuse=True, has_posterior=True)


def faults(run: Run = ONE, **settings) -> list[str]:
    return list(group_size_errors(ReplaySettings(**settings), run))


def test_priorities_by_spread_are_refused_with_groups_of_one():
    assert faults(selection="per") == [
        "replay_selection = 'per' with group_size = 1; expected 'uniform', or by = 'reward': one reward does "
        "not vary, so that all draws would be uniform"
    ]
    assert faults(ONE._replace(group_size=2), selection="per") == faults(reuse_selection="per") == []
    assert faults(selection="per", selection_config={"by": "reward"}) == []
    assert faults(ONE._replace(may_revisit=False), selection="per") == []
    assert faults(capacity=0, revisit_fraction=0.0, selection="per") == []
