"""Group sizes by expected signal: the value by hand and by integration, the allocation against all others."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.rollout.knapsack import group_sizes, increments

UNIFORM = (1.0, 1.0)


def value_of(beta, n):
    """Return E[p (1 - p)^2 (1 - p^n - (1 - p)^n)] under Beta(alpha, beta), by the midpoint rule; p = x^2 (3 - 2x)."""
    x = (np.arange(200_000) + 0.5) / 200_000
    p, slope = x * x * (3 - 2 * x), 6 * x * (1 - x)  # smooths the ends, where a density with alpha < 1 is infinite
    weight = p ** (beta[0] - 1) * (1 - p) ** (beta[1] - 1) * slope
    gain = p * (1 - p) ** 2 * (1 - p**n - (1 - p) ** n)
    return float((weight * gain).sum() / weight.sum())


def test_increments_by_hand():
    """Uniform p: E[p (1-p)^2] = B(2, 3) = 1/12 at n = 0; at n = 1 E[p^2 (1-p)^3 + p^2 (1-p)^3] = 2 B(3, 4) = 1/30."""
    assert increments(np.array([UNIFORM]), 2)[0] == pytest.approx([1 / 12, 1 / 30])


@pytest.mark.parametrize("beta", [(1.0, 1.0), (0.5, 0.5), (8.5, 0.5), (0.5, 8.5), (2.0, 6.0)])
def test_increments_are_differences_of_the_value(beta):
    gain_N = increments(np.array([beta]), 12)[0]
    for n in range(12):
        assert gain_N[n] == pytest.approx(value_of(beta, n + 1) - value_of(beta, n), rel=1e-5)
    assert (np.diff(gain_N) < 0).all()


def test_a_sure_pass_rate_gives_the_value_of_the_paper():
    """With alpha + beta = 10^7 the distribution is a point: p = .25, n = 2 -> 3."""
    gain = increments(np.array([[0.25e7, 0.75e7]]), 3)[0, 2]
    of_paper = [0.25 * 0.75**2 * (1 - 0.25**n - 0.75**n) for n in (2, 3)]
    assert gain == pytest.approx(of_paper[1] - of_paper[0], rel=1e-5)


def best(beta_P2, budget, smallest, largest):
    """Return the largest total value of all allocations, one after the other."""
    value = np.cumsum(increments(beta_P2, largest), axis=1)
    sizes = product(range(smallest, largest + 1), repeat=len(beta_P2))
    return max(sum(value[i, n - 1] for i, n in enumerate(one)) for one in sizes if sum(one) == budget)


positive = st.floats(0.05, 12)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=4), st.integers(2, 3), st.data())
def test_the_allocation_is_the_best_and_keeps_the_budget(betas, smallest, data):
    largest = data.draw(st.integers(smallest, 7))
    budget = data.draw(st.integers(smallest * len(betas), largest * len(betas)))
    beta_P2 = np.array(betas)
    sizes_P = group_sizes(beta_P2, budget, smallest, largest)
    assert sizes_P.sum() == budget and sizes_P.min() >= smallest and sizes_P.max() <= largest
    value = np.cumsum(increments(beta_P2, largest), axis=1)
    total = sum(value[i, n - 1] for i, n in enumerate(sizes_P))
    assert total == pytest.approx(best(beta_P2, budget, smallest, largest), abs=1e-12)


def test_equal_prompts_get_equally_many_and_what_is_left_goes_to_the_first():
    assert group_sizes(np.array([UNIFORM] * 4), 32, 2, 32).tolist() == [8, 8, 8, 8]
    assert group_sizes(np.array([UNIFORM] * 4), 34, 2, 32).tolist() == [9, 9, 8, 8]


def test_hard_prompts_get_more_than_solved_ones():
    """Once 8 of 8, once 1 of 8, new, once 0 of 8: 8.5 and .5, 1.5 and 7.5, uniform, .5 and 8.5."""
    betas = np.array([[8.5, 0.5], [1.5, 7.5], UNIFORM, [0.5, 8.5]])
    assert group_sizes(betas, 32, 2, 32).tolist() == [2, 13, 9, 8]  # the numbers of docs/rollouts.md


def test_a_budget_that_cannot_be_kept_is_an_error():
    with pytest.raises(ValueError, match="budget = 3 for 2 prompts; expected 4 to 10"):
        group_sizes(np.array([UNIFORM] * 2), 3, 2, 5)
    assert group_sizes(np.zeros((0, 2)), 0, 2, 5).tolist() == []
