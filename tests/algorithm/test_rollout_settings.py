"""Settings of how many episodes a prompt gets: each bad value has a line with the name and the reason."""

from __future__ import annotations

import pytest

from rllib_srl import SRLConfig
from rllib_srl.algorithm.validation import faults_of


@pytest.fixture
def config(random_llama_dir):
    return SRLConfig().environment("compare").rl_module(model_config={"model": str(random_llama_dir)})


SCREENING = {"rollout": {"name": "screening", "screen_size": 3}}
WRONG = [
    ({"rollout": "screen"}, "rollout = 'screen'; expected one of 'full', 'screening'"),
    ({"rollout": {"screen_size": 3}}, "rollout.screen_size = 3; expected it only with rollout = 'screening', not"),
    ({"rollout": {"name": "screening", "size": 3}}, "rollout.size = 3; expected some of screen_size"),
    *(
        (
            {"rollout": {"name": "screening", "screen_size": size}},
            f"rollout.screen_size = {size!r}; expected an integer from 2 to group_size - 1 = 7",
        )
        for size in (1, 8, 0, -1, 2.5, True, None, "two")
    ),
    ({"rollout": "screening", "group_size": 2}, "rollout = 'screening' with group_size = 2; expected at least 3"),
    ({**SCREENING, "group_size": 3}, "rollout.screen_size = 3; expected an integer from 2 to group_size - 1 = 2"),
    ({**SCREENING, "advantage": "gae"}, "rollout = 'screening' with advantage = 'gae'; expected one of 'group'"),
    ({**SCREENING, "silent_groups": "zvp"}, "rollout = 'screening' with silent_groups = 'zvp'; expected 'skip'"),
    ({**SCREENING, "rescue": "rlep"}, "rollout = 'screening' with rescue = 'rlep'; expected 'none'"),
    (
        {**SCREENING, "replay_grade": {"min_episodes": 4}},
        "rollout.screen_size = 3; expected at least replay_grade.min_episodes = 4",
    ),
]


@pytest.mark.parametrize(("settings", "reason"), WRONG)
def test_a_wrong_value_is_refused_with_the_reason(config, settings, reason):
    (line,) = faults_of(config.update_from_dict(settings))
    assert line.startswith(reason)


@pytest.mark.parametrize(
    "settings",
    [
        SCREENING,
        {"rollout": "screening", "group_size": 3},
        {**SCREENING, "loss": "dapo"},
        {**SCREENING, "replay_grade": {"min_episodes": 4}, "replay_capacity": 0},
        {"group_size": 2, "rollout": "full"},
    ],
)
def test_what_fits_has_no_fault(config, settings):
    if settings.get("replay_capacity") == 0:
        config.replay(revisit_fraction=0.0, reuse_fraction=0.0)
    assert faults_of(config.update_from_dict(settings)) == []


def test_a_group_of_one_is_reported_once(config):
    lines = faults_of(config.training(rollout="screening", group_size=1))
    assert len(lines) == 1 and lines[0].startswith("group_size = 1; expected")
