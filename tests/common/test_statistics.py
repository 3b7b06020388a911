"""Intervals, pass@k and the diversity of answers against values worked by hand."""

from itertools import combinations
from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.common.statistics import answer_diversity, pass_at_k, pass_hat_k, wilson_interval


def test_wilson_interval_of_eight_in_ten():
    # published example: 8 of 10 at 95 % is .490 to .943
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_wilson_interval_stays_inside_and_narrows():
    assert wilson_interval(0, 20)[0] == 0 and wilson_interval(20, 20)[1] == pytest.approx(1)
    widths = [wilson_interval(n // 2, n)[1] - wilson_interval(n // 2, n)[0] for n in (10, 100, 1000)]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("n, c, k", [(5, 0, 2), (5, 1, 2), (5, 3, 2), (5, 5, 5), (6, 2, 1)])
def test_pass_at_k_and_pass_hat_k_count_draws(n, c, k):
    draws = list(combinations(range(n), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(min(draw) < c for draw in draws) / len(draws))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(max(draw) < c for draw in draws) / len(draws))
    assert pass_hat_k(n, c, 1) == pytest.approx(pass_at_k(n, c, 1))


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=7))
def test_diversity_counts_the_pairs_that_differ(answers):
    pairs = list(combinations(answers, 2))
    assert answer_diversity(answers) == pytest.approx(sum(a != b for a, b in pairs) / len(pairs))
    assert isnan(answer_diversity(answers[:1]))
