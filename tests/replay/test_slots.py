"""Slots of the memory, by hand and in the long run."""

from __future__ import annotations

import json
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.selection.quotas import Slots


def test_slots_by_hand():
    slots = Slots(0.2)
    assert [slots.owed(4) for _ in range(10)] == [0, 1, 1, 1, 1] * 2  # .8, 1.6, 1.4, 1.2, 1.0
    assert [Slots(1.0).owed(4), Slots(0.0).owed(4)] == [4, 0]
    third = Slots(1 / 3)
    assert sum(third.owed(1) for _ in range(30_000)) == 9_999  # .3333333333333333 is less than a third
    tiny = Slots(1e-7)
    assert [tiny.owed(9_999_999), tiny.owed(1)] == [0, 1]


@given(fraction=st.integers(0, 1000).map(lambda k: k / 1000), nums=st.lists(st.integers(0, 64), max_size=60))
def test_owed_is_the_exact_fraction_rounded_down(fraction, nums):
    slots, total = Slots(fraction), 0
    for done in range(len(nums)):
        total += slots.owed(nums[done])
        assert total == Fraction(str(fraction)) * sum(nums[: done + 1]) // 1


def test_reuse_is_a_fraction_of_the_whole_batch():
    # P = 6, fraction .25: R = 2, 2 / 8 = .25; P = 16 at .2: R = 4
    assert Slots(0.25, is_added=True).owed(6) == 2 and Slots(0.2, is_added=True).owed(16) == 4
    slots = Slots(0.3, is_added=True)
    reused = sum(slots.owed(4) for _ in range(700))  # 2,800 * 3 / 7
    assert reused == 1200 and reused / (2800 + reused) == 0.3


def test_a_changed_fraction_keeps_what_is_carried():
    slots = Slots(0.4, is_added=True)
    assert slots.owed(8) == 5  # 5.33
    slots.change(0.25)
    assert slots.owed(8) == 3  # .33 + 2.67


def test_slots_resume_where_they_were():
    slots, other = Slots(0.3, is_added=True), Slots(0.3, is_added=True)
    for _ in range(5):
        slots.owed(4)
    other.set_state(json.loads(json.dumps(slots.get_state())))
    assert [slots.owed(5) for _ in range(20)] == [other.owed(5) for _ in range(20)]
