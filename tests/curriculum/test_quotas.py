"""Quotas by hand, exact in total under any input, and exact in the long run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.curriculum.quotas import quotas


@pytest.mark.parametrize(("num", "weights", "expected"), [
    (8, {0: 3, 1: 1}, {0: 6, 1: 2}),
    (5, {0: 1, 1: 0}, {0: 5, 1: 0}),
    # 5 : 3 : 2 -> 2, 1.2, .8 -> 2, 1, 1: the largest remainder
    (4, {0: 5, 1: 3, 2: 2}, {0: 2, 1: 1, 2: 1}),
])  # fmt: skip
def test_quotas_by_hand(num, weights, expected):
    assert quotas(num, weights, np.random.default_rng(8), {}).num == expected


@pytest.mark.parametrize("weights", [{0: 9, 1: 1}, {0: 0.5, 1: 0.3, 2: 0.2}, {0: 1, 1: 1, 2: 1}])
def test_what_rounding_takes_is_carried(weights):
    rng, carry, total = np.random.default_rng(10), dict[int, float](), dict.fromkeys(weights, 0)
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
    nums, carried = quotas(num, weights, np.random.default_rng(seed), carry)
    assert sum(nums.values()) == num and min(nums.values()) >= 0
    assert all(-1 <= value <= 1 for value in carried.values())
    assert not any(nums[k] or carried[k] for k, weight in weights.items() if not weight)
