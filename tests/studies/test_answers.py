"""Diversity of answers and pass@k, worked by hand."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.algorithm.answers import answer_diversity
from rllib_srl.common.statistics import pass_at_k, pass_hat_k


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
