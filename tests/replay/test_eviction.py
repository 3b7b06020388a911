"""Eviction by hand, reservoirs against the uniform sample they promise, quotas, and ExIt's replacement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.selection.candidates import Candidates, SelectionSettings
from rllib_srl.replay.selection.eviction import EVICTIONS, evict, value_of
from tests.replay.frequencies import fits

DEFAULT = SelectionSettings()


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    "rule, columns, expected",
    [
        ("fifo", {"seq": [5, 2, 9, 3]}, [1, 3]),
        ("oldest", {"elapsed": [5, 2, 9, 3]}, [2, 0]),
        ("mastered_first", {"posterior_mean": [0.9, 0.2, 0.9, 0.3], "retrievability": [0.5, 1, 0.6, 1]}, [2, 0]),
        ("least_diverse", {"diversity": [0.4, 0.1, 0.3, 0.2]}, [1, 3]),
    ],
)
def test_rules_by_hand(rule, columns, expected):
    assert EVICTIONS[rule](Candidates.of(4, **columns), 2, generator(), DEFAULT).tolist() == expected


def test_value_by_hand():
    # (.01 + 4 p (1 - p)) (2 - R) (1 + .5 d)
    candidates = Candidates.of(
        5,
        posterior_mean=[0.5, 0.5, 0.5, 1.0, 0.1],
        retrievability=[1.0, 0.2, 1.0, 1.0, 0.5],
        diversity=[0, 0, 1, 1, 0],
    )
    # 1.01; 1.01 * 1.8; 1.01 * 1.5; .01 * 1.5; .37 * 1.5
    np.testing.assert_allclose(value_of(candidates, DEFAULT), [1.01, 1.818, 1.515, 0.015, 0.555])
    assert EVICTIONS["lowest_value"](candidates, 5, generator(), DEFAULT).tolist() == [3, 4, 0, 2, 1]


def test_hard_and_rare_items_outlive_mastered_ones():
    """The source system's FIFO threw out what it had learned least of."""
    candidates = Candidates.of(
        3, posterior_mean=[0.15, 0.99, 0.95], retrievability=[0.6, 0.99, 0.9], diversity=[1, 0, 0]
    )
    assert set(EVICTIONS["fifo"](candidates, 2, generator(), DEFAULT)) == {0, 1}
    assert set(EVICTIONS["lowest_value"](candidates, 2, generator(), DEFAULT)) == {1, 2}


def test_settings_act_on_value_and_reservoir():
    candidates = Candidates.of(2, posterior_mean=[0.6, 0.5], diversity=[1, 0])  # .97 * (1 + c) against 1.01
    assert EVICTIONS["lowest_value"](candidates, 1, generator(), DEFAULT).tolist() == [1]
    assert EVICTIONS["lowest_value"](candidates, 1, generator(), SelectionSettings(diversity_coeff=0)).tolist() == [0]
    # p = 1 and .5, R 0 and 1: (f) 2 against (f + 1) 1: equal at f = 1
    candidates = Candidates.of(2, posterior_mean=[1, 0.5], retrievability=[0, 1])
    assert EVICTIONS["lowest_value"](candidates, 1, generator(), SelectionSettings(signal_floor=2)).tolist() == [1]
    one, other = (
        EVICTIONS["reservoir"](Candidates.of(50), 25, generator(), SelectionSettings(reservoir_seed=seed))
        for seed in (1, 2)
    )
    assert set(one) != set(other)


def test_a_reservoir_is_uniform_over_the_order_of_insertion():
    """300 items come, 20 a time, 60 may stay; each must stay with probability 1/5, the first as the last."""
    stayed = np.zeros(300, int)
    for seed in range(400):
        setting, seqs = SelectionSettings(reservoir_seed=seed), np.arange(60)
        for start in range(60, 300, 20):
            seqs = np.concatenate([seqs, np.arange(start, start + 20)])
            seqs = np.delete(seqs, EVICTIONS["reservoir"](Candidates.of(len(seqs), seq=seqs), 20, generator(), setting))
        stayed[seqs] += 1
    by_age = stayed.reshape(15, 20).sum(1)
    assert fits(
        by_age, np.full(15, 1 / 15)
    )  # 24,000 in all; a fresh lot each time gives the first 15th 1/13 of the last


def test_one_by_one_or_at_once_the_same_reservoir_stays():
    setting, rng = SelectionSettings(reservoir_seed=3), generator()
    seqs = np.arange(30)
    for new in range(30, 100):
        seqs = np.append(seqs, new)
        seqs = np.delete(seqs, EVICTIONS["reservoir"](Candidates.of(31, seq=seqs), 1, rng, setting))
    at_once = np.delete(np.arange(100), EVICTIONS["reservoir"](Candidates.of(100), 70, rng, setting))
    np.testing.assert_array_equal(np.sort(seqs), at_once)


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted(EVICTIONS))
@given(
    num_candidates=st.integers(0, 15),
    num=st.integers(0, 20),
    seed=st.integers(0, 99),
    weights=st.sampled_from([None, {0: 1.0, 1: 3.0}, {2: 1.0}]),
)
def test_exactly_as_many_go_as_must(rule, num_candidates, num, seed, weights):
    rng = generator(seed)
    candidates = Candidates.of(
        num_candidates, domain=rng.integers(0, 3, num_candidates), elapsed=rng.integers(0, 3, num_candidates)
    )
    evicted = evict(rule, candidates, num, generator(seed), DEFAULT, weights)
    assert len(evicted) == len(np.unique(evicted)) == min(num, num_candidates)
    np.testing.assert_array_equal(evicted, evict(rule, candidates, num, generator(seed), DEFAULT, weights))


def test_domains_over_their_quota_pay_first():
    candidates = Candidates.of(100, domain=[0] * 70 + [1] * 25 + [2] * 5)
    gone = [
        np.bincount(
            candidates.domain[evict("fifo", candidates, num, generator(), DEFAULT, {0: 1, 1: 1, 2: 1})]
        ).tolist()
        for num in (10, 60)
    ]
    # 90 places: 5 of domain 2 and 25 of domain 1 fit, 60 are left for domain 0; 40 places: 5, then 17 or 18 each
    assert gone[0] == [10]
    assert gone[1] in ([52, 8], [53, 7])


def test_ties_are_broken_by_the_generator():
    gone = {tuple(EVICTIONS["least_diverse"](Candidates.of(10), 2, generator(seed), DEFAULT)) for seed in range(20)}
    assert len(gone) > 10


def test_bad_rules_are_named(monkeypatch):
    with pytest.raises(ValueError, match="eviction = 'lru'; expected one of"):
        evict("lru", Candidates.of(3), 1, generator(), DEFAULT)
    monkeypatch.setitem(EVICTIONS, "mine", lambda candidates, num, generator, settings: np.zeros(num, int))
    with pytest.raises(ValueError, match="eviction 'mine' returned 2 indices, 1 of them distinct; expected 2"):
        evict("mine", Candidates.of(3), 2, generator(), DEFAULT)
