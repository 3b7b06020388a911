"""Format against content, and diversity, worked by hand."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.algorithm.answers import accuracy_given_parsed, answer_diversity, forgetting_parts
from rllib_srl.common.statistics import pass_at_k, pass_hat_k

SHARES = st.tuples(st.floats(0.01, 1), st.floats(0, 1))  # parse rate, accuracy given parsed


def test_accuracy_given_parsed():
    assert accuracy_given_parsed(0.4, 0.8) == pytest.approx(0.5)
    assert np.isnan(accuracy_given_parsed(0.0, 0.0))
    with pytest.raises(ValueError, match="expected 0 <= accuracy <= parse_rate"):
        accuracy_given_parsed(0.5, 0.4)


def test_lost_format_alone_is_superficial_and_lost_content_alone_essential():
    # right .8 of .8 parsed -> .5 of .5: what can be read is always right
    assert forgetting_parts((0.8, 0.5), (0.8, 0.5)) == pytest.approx((0.3, 0.0))
    # all answers can be read before and after, .8 -> .5 of them right
    assert forgetting_parts((0.8, 0.5), (1.0, 1.0)) == pytest.approx((0.0, 0.3))


def test_both_lost():
    # p 1 -> .5, c .8 -> .4: (1 - .5) (.8 + .4) / 2 = .3 and (.8 - .4) (1 + .5) / 2 = .3, of .8 - .2 = .6
    assert forgetting_parts((0.8, 0.2), (1.0, 0.5)) == pytest.approx((0.3, 0.3))


def test_where_nothing_can_be_read_the_whole_drop_is_superficial():
    assert forgetting_parts((0.6, 0.0), (0.9, 0.0)) == pytest.approx((0.6, 0.0))
    assert forgetting_parts((0.0, 0.0), (0.0, 0.0)) == (0.0, 0.0)


@given(SHARES, SHARES)
def test_parts_sum_to_the_drop_and_reverse_with_time(before, after):
    (p0, c0), (p1, c1) = before, after
    parts = forgetting_parts((p0 * c0, p1 * c1), (p0, p1))
    assert sum(parts) == pytest.approx(p0 * c0 - p1 * c1, abs=1e-9)
    assert forgetting_parts((p1 * c1, p0 * c0), (p1, p0)) == pytest.approx((-parts[0], -parts[1]), abs=1e-9)


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=7))
def test_diversity_counts_the_pairs_that_differ(answers):
    pairs = list(combinations(answers, 2))
    assert answer_diversity(answers) == pytest.approx(sum(a != b for a, b in pairs) / len(pairs))


def test_diversity_by_hand():
    assert answer_diversity(["7", "7", "8", "9"]) == pytest.approx(5 / 6)  # one of six pairs is equal
    assert np.isnan(answer_diversity(["7"]))


@pytest.mark.parametrize("n, c, k", [(5, 0, 2), (5, 1, 2), (5, 3, 2), (5, 5, 5), (6, 2, 1)])
def test_pass_hat_k_counts_the_draws_that_are_all_right(n, c, k):
    draws = list(combinations(range(n), k))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(max(draw) < c for draw in draws) / len(draws))
    assert pass_hat_k(n, c, k) <= pass_at_k(n, c, k) and pass_hat_k(n, c, 1) == pytest.approx(pass_at_k(n, c, 1))


def test_counts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="expected 1 <= k <= n"):
        pass_hat_k(4, 5, 1)
