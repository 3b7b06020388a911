"""Settings of rollouts ahead of training: each bad value has a line with the name and the reason."""

from __future__ import annotations

import pytest

from rllib_srl import SRLConfig
from rllib_srl.algorithm.validation import faults_of


@pytest.fixture
def config(random_llama_dir):
    return SRLConfig().environment("compare").rl_module(model_config={"model": str(random_llama_dir)})


AHEAD = {"max_lag": 1}
WRONG_AHEAD = [
    ({"max_lag": -1}, "max_lag = -1; expected an integer of at least 0"),
    ({"in_flight": 64}, "in_flight = 64 with max_lag = 0; expected it only with max_lag above 0"),
    ({**AHEAD, "in_flight": 16}, "in_flight = 16; expected an integer above num_prompts_per_batch = 16, or None"),
    ({**AHEAD, "num_env_runners": 0, "num_learners": 0}, "num_env_runners = 0 with max_lag = 1; expected at least 1"),
    ({**AHEAD, "colocate": True}, "colocate = True with max_lag = 1; expected False"),
    ({**AHEAD, "dynamic_sampling_tries": 2}, "dynamic_sampling_tries = 2 with max_lag = 1; expected 0"),
    (
        {**AHEAD, "correction": "none"},
        "correction = 'none' with max_lag = 1; expected a correction",
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
