"""Advantages against values worked by hand, and the laws every rule obeys."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rllib_srl.batch.advantages import (
    ADVANTAGES,
    GROUP_NORMALISED,
    group,
    group_relative,
    has_variance,
    leave_one_out,
    mean_only,
)

REWARDS = arrays(np.float64, st.integers(2, 16), elements=st.floats(0, 1, width=32))


def test_rules_of_one_group_by_hand():
    # mean .5, deviations +-.5, unbiased std sqrt(.5) = .707107: .5 / (.707107 + 1e-4) = .707007
    np.testing.assert_allclose(group(np.array([1.0, 0.0])), [0.707007, -0.707007], atol=1e-6)
    np.testing.assert_allclose(mean_only(np.array([1.0, 0.0, 0.0, 0.0])), [0.75, -0.25, -0.25, -0.25])
    # .9 - (.3 + 0) / 2 = .75, .3 - .45 = -.15, 0 - .6 = -.6
    np.testing.assert_allclose(leave_one_out(np.array([0.9, 0.3, 0.0])), [0.75, -0.15, -0.6], atol=1e-12)


def test_batch_divides_by_the_spread_of_all_groups():
    # all rewards 1 0 | 1 1 0: mean .6, unbiased variance (3 * .16 + 2 * .36) / 4 = .3, std .547723
    one, two = group_relative([np.array([1.0, 0.0]), np.array([1.0, 1.0, 0.0])], "batch")
    np.testing.assert_allclose(one, np.array([0.5, -0.5]) / 0.547823, atol=1e-6)
    np.testing.assert_allclose(two, np.array([1, 1, -2]) / 3 / 0.547823, atol=1e-6)
    (apart,) = group_relative([np.array([1.0, 0.0])], "batch", batch_rewards=[np.array([1.0, 0.0, 1, 1, 0])])
    np.testing.assert_allclose(apart, one)


@pytest.mark.parametrize("rule", sorted(GROUP_NORMALISED))
@given(rewards_G=REWARDS)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(rule, rewards_G):
    (advantage_G,) = group_relative([rewards_G], rule)
    assert abs(advantage_G.sum()) < 1e-6 * max(1, np.abs(advantage_G).sum())
    order = np.argsort(rewards_G, kind="stable")
    assert (np.diff(advantage_G[order]) >= -1e-9).all()


def test_only_groups_that_disagree_have_signal_and_none_sees_another():
    for num_right, expected in ((0, False), (1, True), (7, True), (8, False)):
        assert has_variance(np.array([1.0] * num_right + [0.0] * (8 - num_right))) is expected
    alone = group_relative([np.array([1.0, 0.0, 0.0])])[0]
    beside = group_relative([np.array([1.0, 0.0, 0.0]), np.array([0.2, 0.9])])[0]
    np.testing.assert_array_equal(alone, beside)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="advantage = 'grpo'; expected one of"):
        group_relative([np.array([1.0, 0.0])], rule="grpo")
    with pytest.raises(ValueError, match="a group of 1 episode has no baseline"):
        group_relative([np.array([1.0])])


def test_a_registered_rule_and_one_by_import_path_are_called_with_the_rewards_of_a_group(monkeypatch):
    monkeypatch.setitem(ADVANTAGES, "mine", lambda rewards_G: 2 * rewards_G)
    assert group_relative([np.array([1.0, 0.25])], "mine")[0].tolist() == [2.0, 0.5]
    assert group_relative([np.array([1.0, 0.0])], "rllib_srl.batch.advantages:mean_only")[0].tolist() == [0.5, -0.5]
