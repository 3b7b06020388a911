"""Former names of metrics."""

from __future__ import annotations

import pytest

from rllib_srl.common.metric_names import RENAMED, current_metric
from rllib_srl.learner.objective import SUMS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("clipped", "clip_fraction"),
        ("learners/default_policy/mismatch", "learners/default_policy/rollout_logp_abs_diff"),
        ("learners/default_policy/reuse/clipped", "learners/default_policy/reuse/clip_fraction"),
        ("env_runners/num_clipped", "env_runners/num_clipped"),
    ],
)
def test_former_names_lead_to_the_present_ones(name, expected):
    assert current_metric(name) == expected


def test_the_learner_has_the_present_names_only():
    last = {name.rpartition("/")[2] for name in SUMS}
    assert set(RENAMED.values()) <= last and not set(RENAMED) & last
