"""Shares of slots, by hand and in the long run."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.schedule.slots import Share, reuse_share


def test_a_share_by_hand():
    share = Share(0.2)
    assert [share.owed(4) for _ in range(10)] == [0, 1, 1, 1, 1] * 2  # .8, 1.6, 1.4, 1.2, 1.0
    assert [Share(1.0).owed(4), Share(0.0).owed(4)] == [4, 0]
    third = Share(1 / 3)
    assert sum(third.owed(1) for _ in range(30_000)) == 9_999  # .3333333333333333 is less than a third


def test_the_long_run_share_is_what_it_says():
    """The source system replayed int(4 * 0.2) = 0 prompts."""
    share = Share(0.2)
    assert sum(share.owed(4) for _ in range(1000)) == 800


@given(fraction=st.integers(0, 1000).map(lambda k: k / 1000), nums=st.lists(st.integers(0, 64), max_size=60))
def test_owed_is_the_exact_share_rounded_down(fraction, nums):
    share, total = Share(fraction), 0
    for done in range(len(nums)):
        total += share.owed(nums[done])
        assert total == Fraction(str(fraction)) * sum(nums[: done + 1]) // 1


def test_a_share_that_is_tiny_is_not_floored_away():
    share = Share(1e-7)
    assert share.owed(9_999_999) == 0
    assert share.owed(1) == 1


def test_reuse_is_a_share_of_the_whole_batch():
    # P = 6, fraction .25: R = 2, 2 / 8 = .25; P = 16 at .2: R = 4
    assert reuse_share(0.25).owed(6) == 2 and reuse_share(0.2).owed(16) == 4
    share = reuse_share(0.3)
    reused = sum(share.owed(4) for _ in range(700))  # 2,800 * 3 / 7
    assert reused == 1200 and reused / (2800 + reused) == 0.3


def test_a_share_resumes_where_it_was():
    share = reuse_share(0.3)
    for _ in range(5):
        share.owed(4)
    state = json.loads(json.dumps(share.get_state()))
    other = reuse_share(0.3)
    other.set_state(state)
    assert [share.owed(5) for _ in range(20)] == [other.owed(5) for _ in range(20)]


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), "half", True, None])
def test_bad_fractions_are_named(bad):
    with pytest.raises(ValueError, match="fraction = .*; expected a number in"):
        Share(bad)
    with pytest.raises(ValueError, match="fraction = 1.0; expected less than 1"):
        reuse_share(1.0)
    with pytest.raises(ValueError, match="num = -1; expected at least 0"):
        Share(0.5).owed(-1)
