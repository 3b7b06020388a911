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
    ({"rollout": "screen"}, "rollout = 'screen'; expected one of 'full', 'screening', 'knapsack'"),
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
    (
        {**SCREENING, "reuse_advantage": "recalibrated"},
        "rollout = 'screening' with reuse_advantage = 'recalibrated'; expected one of 'group'",
    ),
    ({**SCREENING, "silent_groups": "zvp"}, "rollout = 'screening' with silent_groups = 'zvp'; expected 'skip'"),
    ({**SCREENING, "rescue": "rlep"}, "rollout = 'screening' with rescue = 'rlep'; expected 'none'"),
    *(
        (
            {"rollout": {"name": "knapsack", "smallest": size}},
            f"rollout.smallest = {size!r}; expected an integer from 2 to group_size - 1 = 7",
        )
        for size in (1, 8, 2.0, None)
    ),
    *(
        (
            {"rollout": {"name": "knapsack", "largest": size}},
            f"rollout.largest = {size!r}; expected an integer above group_size = 8, or None",
        )
        for size in (8, 7, 9.0, "all")
    ),
    ({"rollout": "knapsack", "group_size": 2}, "rollout = 'knapsack' with group_size = 2; expected at least 3"),
    (
        {"rollout": "knapsack", "replay_grade": {"min_episodes": 4}},
        "rollout.smallest = 2; expected at least replay_grade.min_episodes = 4",
    ),
    ({"rollout": {"name": "knapsack", "screen_size": 2}}, "rollout.screen_size = 2; expected it only with rollout = "),
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
        {"rollout": "knapsack", "silent_groups": "zvp"},
        {"rollout": {"name": "knapsack", "smallest": 3, "largest": 9}, "rescue": "arpo"},
        {**SCREENING, "replay_grade": {"min_episodes": 4}, "replay_capacity": 0},
        {"group_size": 2, "rollout": "full"},
    ],
)
def test_what_fits_has_no_fault(config, settings):
    if settings.get("replay_capacity") == 0:
        config.replay(revisit_fraction=0.0, reuse_fraction=0.0)
    assert faults_of(config.update_from_dict(settings)) == []


def test_group_sizes_by_signal_need_a_memory(config):
    config.training(rollout="knapsack").replay(capacity=0, revisit_fraction=0.0, reuse_fraction=0.0)
    (line,) = faults_of(config)
    assert line.startswith("rollout = 'knapsack' with replay_capacity = 0; expected a memory")


def test_a_group_of_one_is_reported_once(config):
    lines = faults_of(config.training(rollout="screening", group_size=1))
    assert len(lines) == 1 and lines[0].startswith("group_size = 1; expected")


AHEAD = {"max_lag": 1}
WRONG_AHEAD = [
    *(
        ({"max_lag": lag}, f"max_lag = {lag!r}; expected an integer of at least 0")
        for lag in (-1, 1.5, None, True, "1")
    ),
    ({**AHEAD, "slice_s": 0}, "slice_s = 0; expected a number above 0"),
    ({**AHEAD, "late": "wait"}, "late = 'wait'; expected one of 'memory', 'drop'"),
    ({"in_flight": 64}, "in_flight = 64 with max_lag = 0; expected it only with max_lag above 0"),
    ({"slice_s": 1.0}, "slice_s = 1.0 with max_lag = 0; expected it only with max_lag above 0"),
    ({"late": "drop"}, "late = 'drop' with max_lag = 0; expected it only with max_lag above 0"),
    ({**AHEAD, "in_flight": 16}, "in_flight = 16; expected an integer above num_prompts_per_batch = 16, or None"),
    ({**AHEAD, "num_env_runners": 0, "num_learners": 0}, "num_env_runners = 0 with max_lag = 1; expected at least 1"),
    ({**AHEAD, "colocate": True}, "colocate = True with max_lag = 1; expected False"),
    ({**AHEAD, "rollout": "screening"}, "rollout = 'screening' with max_lag = 1; expected 'full' or 'knapsack'"),
    ({**AHEAD, "dynamic_sampling_tries": 2}, "dynamic_sampling_tries = 2 with max_lag = 1; expected 0"),
    (
        {**AHEAD, "rollout_is_correction": "none"},
        "rollout_is_correction = 'none' with max_lag = 1; expected a correction",
    ),
    (
        {**AHEAD, "kl_coeff": 0.1, "kl_estimator": "k1"},
        "kl_coeff = 0.1 with max_lag = 1; expected 0, or a KL in the loss",
    ),
]


@pytest.mark.parametrize(("settings", "reason"), WRONG_AHEAD)
def test_what_cannot_be_played_ahead_is_refused(config, settings, reason):
    (line,) = faults_of(config.env_runners(num_env_runners=1).update_from_dict(settings))
    assert line.startswith(reason)


def test_late_groups_need_a_memory_or_are_dropped(config):
    config.env_runners(num_env_runners=1, max_lag=2).replay(capacity=0, revisit_fraction=0.0, reuse_fraction=0.0)
    (line,) = faults_of(config)
    assert line.startswith("replay_capacity = 0 with max_lag = 2; expected a memory, or late = 'drop'")
    assert faults_of(config.env_runners(late="drop", in_flight=20, slice_s=2)) == []
