"""Eviction by hand, quotas, and ExIt's replacement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.selection.rules import EVICTIONS, Candidates, evict


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    "rule, columns, expected",
    [
        ("fifo", {"seq": [5, 2, 9, 3]}, [1, 3]),
        ("mastered_first", {"posterior_mean": [0.9, 0.2, 0.9, 0.3], "retrievability": [0.5, 1, 0.6, 1]}, [2, 0]),
        ("least_diverse", {"diversity": [0.4, 0.1, 0.3, 0.2]}, [1, 3]),
    ],
)
def test_rules_by_hand(rule, columns, expected):
    assert EVICTIONS[rule](Candidates(4, **columns), 2, generator()).tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted(EVICTIONS.own))
@given(
    num_candidates=st.integers(0, 15),
    num=st.integers(0, 20),
    seed=st.integers(0, 99),
    weights=st.sampled_from([None, {0: 1.0, 1: 3.0}, {2: 1.0}]),
)
def test_exactly_as_many_go_as_must(rule, num_candidates, num, seed, weights):
    rng = generator(seed)
    candidates = Candidates(
        num_candidates, domain=rng.integers(0, 3, num_candidates), elapsed=rng.integers(0, 3, num_candidates)
    )
    evicted = evict(rule, EVICTIONS[rule], candidates, num, generator(seed), weights)
    assert len(evicted) == len(np.unique(evicted)) == min(num, num_candidates)
    np.testing.assert_array_equal(evicted, evict(rule, EVICTIONS[rule], candidates, num, generator(seed), weights))


def test_domains_over_their_quota_pay_first():
    candidates = Candidates(100, domain=[0] * 70 + [1] * 25 + [2] * 5)
    weights = {0: 1, 1: 1, 2: 1}

    def gone(num):
        evicted = evict("fifo", EVICTIONS["fifo"], candidates, num, generator(), weights)
        return np.bincount(candidates.domain[evicted]).tolist()

    # 90 places: 5 of domain 2 and 25 of domain 1 fit, 60 are left for domain 0; 40 places: 5, then 17 or 18 each
    assert gone(10) == [10]
    assert gone(60) in ([52, 8], [53, 7])


def test_bad_rules_are_named():
    with pytest.raises(ValueError, match="eviction = 'lru'; expected one of"):
        EVICTIONS.make("lru", {})
    with pytest.raises(ValueError, match="eviction 'mine' returned 2 indices, 1 of them distinct; expected 2"):
        evict("eviction 'mine'", lambda candidates, num, generator: np.zeros(num, int), Candidates(3), 2, generator())
