"""Intervals and pass@k against values worked by hand."""

from __future__ import annotations

from itertools import combinations

import pytest

from rllib_srl.common.statistics import pass_at_k, wilson_interval


def test_wilson_interval_of_eight_in_ten():
    # published example: 8 of 10 at 95 % is .490 to .943
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_wilson_interval_stays_inside_and_narrows():
    assert wilson_interval(0, 20)[0] == 0 and wilson_interval(20, 20)[1] == pytest.approx(1)
    widths = [wilson_interval(n // 2, n)[1] - wilson_interval(n // 2, n)[0] for n in (10, 100, 1000)]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("n, c, k", [(5, 0, 2), (5, 1, 2), (5, 3, 2), (5, 5, 5), (6, 2, 1)])
def test_pass_at_k_counts_the_draws_that_hold_a_right_answer(n, c, k):
    draws = list(combinations(range(n), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(min(draw) < c for draw in draws) / len(draws))


@pytest.mark.parametrize("arguments", [(4, 5, 1), (4, 2, 5), (4, -1, 1), (4, 2, 0)])
def test_counts_that_do_not_fit_are_refused(arguments):
    with pytest.raises(ValueError, match="expected 1 <= k <= n"):
        pass_at_k(*arguments)
