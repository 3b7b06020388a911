"""Quotas and slots by hand, exact in total under any input, and exact in the long run."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.selection.quotas import Slots, quotas


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("num", "weights", "expected"),
    [
        (8, {0: 3, 1: 1}, {0: 6, 1: 2}),
        (5, {0: 1, 1: 0}, {0: 5, 1: 0}),
        # 5 : 3 : 2 -> 2, 1.2, .8 -> 2, 1, 1: the largest remainder
        (4, {0: 5, 1: 3, 2: 2}, {0: 2, 1: 1, 2: 1}),
    ],
)
def test_quotas_by_hand(num, weights, expected):
    assert quotas(num, weights, generator(8), {}).num == expected


@pytest.mark.parametrize("weights", [{0: 9, 1: 1}, {0: 0.5, 1: 0.3, 2: 0.2}, {0: 1, 1: 1, 2: 1}])
def test_what_rounding_takes_is_carried(weights):
    rng, carry, total = generator(10), dict[int, float](), dict.fromkeys(weights, 0)
    for _ in range(250):
        nums, carry = quotas(4, weights, rng, carry)
        total = {domain: total[domain] + nums[domain] for domain in total}
    for domain, weight in weights.items():
        assert abs(total[domain] - 1000 * weight / sum(weights.values())) < 1 + 1e-6


@given(
    num=st.integers(0, 40),
    rows=st.lists(st.tuples(st.floats(0, 5), st.floats(-1, 1)), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_quotas_are_exact_in_total(num, rows, seed):
    weights, carry = ({k: row[i] for k, row in enumerate(rows)} for i in range(2))
    weights[0] += 1
    nums, carried = quotas(num, weights, generator(seed), carry)
    assert sum(nums.values()) == num and min(nums.values()) >= 0
    assert all(-1 <= value <= 1 for value in carried.values())
    assert not any(nums[k] or carried[k] for k, weight in weights.items() if not weight)


# --- slots ----------------------------------------------------------------------------------------


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
