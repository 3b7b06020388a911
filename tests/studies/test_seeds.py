"""Statistics over seeds: by hand, against every sign pattern, and by how often intervals hold the truth."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.studies import seeds
from rllib_srl.studies.seeds import bootstrap_interval, holm, paired_test


def test_an_interval_by_its_laws():
    """Two values span it; it is the same each time, narrows with seeds, and needs something to resample."""
    assert bootstrap_interval(np.array([0.2, 0.6])) == pytest.approx((0.2, 0.6))
    values = np.random.default_rng(0).normal(size=40)
    assert bootstrap_interval(values) == bootstrap_interval(values)
    few, many = bootstrap_interval(values[:10]), bootstrap_interval(values)
    assert many.high - many.low < few.high - few.low
    assert bootstrap_interval(values, level=0.5).low > many.low
    assert np.isnan(bootstrap_interval(np.array([0.5]))).all()
    assert np.isnan(bootstrap_interval(np.array([0.5, np.nan, 0.7]))).all()


def test_intervals_of_ten_seeds_hold_the_truth_about_as_often_as_they_say(monkeypatch):
    monkeypatch.setattr(seeds, "NUM_RESAMPLES", 1000)
    rng = np.random.default_rng(0)
    found = [bootstrap_interval(rng.normal(0.05, 0.05, 10)) for _ in range(400)]
    held = np.mean([low <= 0.05 <= high for low, high in found])
    assert 0.92 <= held <= 0.97  # plain percentiles: .90


@given(st.lists(st.integers(-4, 4), min_size=2, max_size=8))
@settings(max_examples=40)
def test_p_is_the_share_of_sign_patterns_at_least_as_far_out(differences):
    sums = [abs(np.dot(signs, differences)) for signs in product((1, -1), repeat=len(differences))]
    expected = np.mean([total >= abs(sum(differences)) for total in sums])
    assert paired_test(np.array(differences, float)).p == pytest.approx(expected)


def test_the_smallest_p_there_is():
    # ten pairs, all positive: 2 of 2^10 patterns
    assert paired_test(np.linspace(0.01, 0.1, 10)) == pytest.approx((2 / 1024, 2 / 1024, True))
    assert paired_test(np.array([0.3])).p == 1 and paired_test(np.array([])).p == 1
    assert paired_test(np.zeros(6)).p == 1
    with pytest.raises(ValueError, match="expected finite numbers"):
        paired_test(np.array([0.1, np.nan]))


def test_too_many_patterns_are_drawn_and_said_to_be(monkeypatch):
    monkeypatch.setattr(seeds, "MAX_EXACT_PAIRS", 10)
    differences = np.random.default_rng(2).normal(0.4, 1, 12)
    drawn = paired_test(differences)
    monkeypatch.undo()
    counted = paired_test(differences)
    assert not drawn.is_exact and counted.is_exact
    assert drawn.p == pytest.approx(counted.p, abs=0.05)


def test_holm_by_hand():
    # ascending .01, .02, .03, .04: .01 * 4 = .04, .02 * 3 = .06, .03 * 2 = .06, .04 * 1 = .04 -> raised to .06
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.6]) == pytest.approx([1.0, 1.0]) and len(holm([])) == 0
    with pytest.raises(ValueError, match="from 0 to 1"):
        holm([1.5])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.5))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values, alpha):
    rejected = set()
    for done, at in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[at] * (len(p_values) - done) > alpha:
            break
        rejected.add(at)
    assert {i for i, p in enumerate(holm(p_values)) if p <= alpha} == rejected


def test_not_worse_by_a_margin_is_the_one_sided_bound():
    differences = np.array([0.02, -0.01, 0.0, 0.01, -0.02, 0.03, 0.0, -0.01])
    low = bootstrap_interval(differences, 0.9).low
    assert low < 0 and seeds.is_not_worse(differences, -low + 1e-9) and not seeds.is_not_worse(differences, -low - 1e-9)
    assert not seeds.is_not_worse(np.array([0.5]), 0.02)  # one seed shows nothing
