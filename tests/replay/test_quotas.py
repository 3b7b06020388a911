"""Quotas by hand, exact in total under any input, and exact in the long run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.selection.quotas import quotas


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("num", "weights", "available", "expected"),
    [
        (8, {0: 3, 1: 1}, {0: 99, 1: 99}, {0: 6, 1: 2}),
        (8, {0: 3, 1: 1}, {0: 4, 1: 99}, {0: 4, 1: 4}),  # borrowed
        # the second has 1: 9 left over for 1 : 2 = 3, 6
        (10, {0: 1, 1: 2, 2: 2}, {0: 50, 1: 1, 2: 50}, {0: 3, 1: 1, 2: 6}),
        (5, {0: 1}, {0: 3, 1: 9}, {0: 3, 1: 2}),  # weight 0 fills
        (9, {0: 1, 1: 1}, {0: 2, 1: 3}, {0: 2, 1: 3}),
        # 5 : 3 : 2 -> 2, 1.2, .8 -> 2, 1, 1: the largest remainder
        (4, {0: 5, 1: 3, 2: 2}, {0: 9, 1: 9, 2: 9}, {0: 2, 1: 1, 2: 1}),
    ],
)
def test_quotas_by_hand(num, weights, available, expected):
    assert quotas(num, weights, available, generator(8)).num == expected


def test_ties_of_quotas_are_seeded():
    rng = generator(9)
    won = sum(quotas(1, {0: 1, 1: 1}, {0: 5, 1: 5}, rng).num[0] for _ in range(2000))
    assert won == pytest.approx(1000, abs=100)  # deviation 22


@pytest.mark.parametrize("weights", [{0: 9, 1: 1}, {0: 0.5, 1: 0.3, 2: 0.2}, {0: 1, 1: 1, 2: 1}])
def test_what_rounding_takes_is_carried(weights):
    rng, carry, total = generator(10), None, dict.fromkeys(weights, 0)
    for _ in range(250):
        nums, carry = quotas(4, weights, dict.fromkeys(weights, 99), rng, carry)
        total = {domain: total[domain] + nums[domain] for domain in total}
    for domain, weight in weights.items():
        assert abs(total[domain] - 1000 * weight / sum(weights.values())) < 1 + 1e-6


@given(
    num=st.integers(0, 40),
    rows=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 20), st.floats(-1, 1)), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_quotas_are_exact_in_total(num, rows, seed):
    weights, available, carry = ({k: row[i] for k, row in enumerate(rows)} for i in range(3))
    nums, carried = quotas(num, weights, available, generator(seed), carry)
    assert sum(nums.values()) == min(num, sum(available.values()))
    assert all(0 <= nums[k] <= available[k] for k in available)
    assert all(-1 <= value <= 1 for value in carried.values())
    spare = any(nums[k] < available[k] for k in available if weights[k] > 0)
    assert not (spare and any(nums[k] for k in available if weights[k] == 0))
