"""Grades against tables worked by hand, and the laws of noisy recall."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.schedule.recall import Evidence, by_pass_rate, by_reward, grades_of_ratings, posterior


def an_evidence(**columns) -> Evidence:
    """Return the columns of some visits; those that are not given hold nothing."""
    return Evidence(**{**dict.fromkeys(Evidence._fields, np.empty(0)), **columns})


def grade_group(num_success, size, alpha=0.5, beta=0.5, min_graded=2) -> SimpleNamespace:
    """Grade one group by its pass rate."""
    alpha_N, beta_N = posterior(np.array([num_success]), np.array([size]), alpha, beta)
    evidence = an_evidence(size_N=np.array([size]), alpha_N=alpha_N, beta_N=beta_N)
    grade = int(by_pass_rate(evidence, min_graded=min_graded)[0])
    (alpha,), (beta,) = alpha_N.tolist(), beta_N.tolist()
    return SimpleNamespace(grade=grade, alpha=alpha, beta=beta, recall=alpha / (alpha + beta))


@pytest.mark.parametrize(
    ("size", "grades"),
    [
        # Jeffreys' mean (s + .5) / (n + 1), cut at .35, .65, .9
        (8, [1, 1, 1, 2, 2, 2, 3, 3, 4]),  # .06 .17 .28 | .39 .5 .61 | .72 .83 | .94
        (4, [1, 1, 2, 3, 4]),  # .1 .3 | .5 | .7 | .9
        (2, [1, 2, 3]),  # .17 | .5 | .83: two are too few for Easy
    ],
)
def test_pass_rates_of_new_items(size, grades) -> None:
    assert [grade_group(s, size).grade for s in range(size + 1)] == grades


def test_a_quarter_of_earlier_visits_counts() -> None:
    first = grade_group(8, 8)
    assert (first.alpha, first.beta) == (8.5, 0.5)
    # a quarter of 8 earlier successes is 2: (.5 + 2 + 2) / (1 + 2 + 8) = .409, where 2 of 8 alone were .278
    second = grade_group(2, 8, first.alpha, first.beta)
    assert (second.alpha, second.beta, second.grade) == (4.5, 6.5, 2)
    assert second.recall == pytest.approx(0.409, abs=1e-3)
    assert grade_group(0, 8, first.alpha, first.beta).grade == 1  # 2.5 / 11: forgetting shows at once
    assert posterior(8, 8, alpha_N=0.5, beta_N=8.5) == (8.5, 2.5)  # failures are forgotten as successes are


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16), st.integers(0, 16), st.integers(0, 16))))
def test_many_are_graded_as_one_by_one_and_more_success_is_no_worse(rows) -> None:
    s, extra, s0, f0 = np.array(rows, int).reshape(-1, 4).T
    n, alpha, beta = s + extra, 0.5 + s0, 0.5 + f0
    after = posterior(s, n, alpha, beta)
    grade_N = by_pass_rate(an_evidence(size_N=n, alpha_N=after[0], beta_N=after[1]), min_graded=0)
    assert grade_N.tolist() == [grade_group(*row, min_graded=0).grade for row in zip(s, n, alpha, beta)]
    better = posterior(s + 1, n + 1, alpha, beta)
    assert (by_pass_rate(an_evidence(size_N=n, alpha_N=better[0], beta_N=better[1]), min_graded=0) >= grade_N).all()


def test_too_few_episodes_grade_nothing() -> None:
    assert grade_group(1, 1).grade == 0
    assert grade_group(1, 1, min_graded=1).grade == 3  # 1.5 / 2
    assert by_reward(an_evidence(size_N=np.array([1, 2]), reward_N=np.ones(2))).tolist() == [0, 4]


def test_mean_rewards() -> None:
    evidence = an_evidence(size_N=np.full(5, 8), reward_N=np.array([0.0, 0.35, 0.649, 0.65, 0.9]))
    assert by_reward(evidence).tolist() == [1, 2, 2, 3, 4]


def test_ratings() -> None:
    def rated(values, scale):
        return grades_of_ratings(np.array(values), scale).tolist()

    assert rated([1, 2, 3, 4, 5], "ordinal") == [1, 1, 2, 3, 4]
    assert rated([0, 1], "binary") == [1, 3]
    assert rated([0, 0.5, 0.7, 1], "normalised") == [1, 2, 3, 4]
    for values, scale in (([0.0], "ordinal"), ([np.nan], "ordinal"), ([0.5], "binary"), ([1.1], "normalised")):
        with pytest.raises(ValueError, match=rf"rating = \[{values[0]}\]; expected . to . \({scale}\)"):
            rated(values, scale)
