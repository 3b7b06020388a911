"""Parts of diversity worked by hand, their calibration, and the source system's defects, which cannot happen here."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.diversity import measures as diversity
from rllib_srl.replay.diversity.measures import Calibrator
from rllib_srl.replay.diversity.neighbours import Neighbours
from rllib_srl.replay.schedule.spacing import SpacingState, make_spacing


def unit_vectors(num: int, dim: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((num, dim))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def source_distance_term(vectors_ND: np.ndarray) -> np.ndarray:
    """Return the distance term of the source system's D: dist(e, centroid) / (max - min + 1e-6)."""
    distance_N = np.linalg.norm(vectors_ND - vectors_ND.mean(axis=0), axis=1)
    return distance_N / (np.ptp(distance_N) + 1e-6)


def ours(vectors_ND: np.ndarray, parts: tuple[str, ...] = ("novelty", "centroid", "rarity")) -> np.ndarray:
    """Return the diversity of items whose vectors are all there is, each part calibrated on all items."""
    found = Neighbours(vectors_ND.shape[1])
    ids = np.arange(len(vectors_ND))
    found.set(ids, vectors_ND)
    raw = {
        "novelty": diversity.novelty(1.0 - found.nearest(vectors_ND, 8, exclude_ids=ids)[1]),
        "centroid": diversity.centroid_distance(vectors_ND, found.centroid()),
        "rarity": diversity.rarity(found.cluster_share(vectors_ND)),
    }
    ranks = []
    for name in parts:
        calibrator = Calibrator(seed=0)
        calibrator.add(raw[name])
        ranks.append(calibrator.rank(raw[name]))
    return diversity.combine(ranks)


def test_two_items_gave_a_diversity_of_350_000_and_have_one_half_here():
    # Distances of two items to their mean are equal, so the source divides half their distance by 1e-6.
    two = unit_vectors(2, 384)
    assert 1e5 < 0.5 * source_distance_term(two).max() < 1e6
    assert ours(two).tolist() == [0.5, 0.5]
    assert diversity.interval_factor(ours(two), coeff=1.0) == pytest.approx([2 / 3, 2 / 3])


def test_256_random_vectors_gave_a_flat_diversity_far_above_one_and_use_the_whole_range_here():
    vectors = unit_vectors(256, 768)
    source = source_distance_term(vectors)
    assert source.min() > 20 and source.std() / source.mean() < 0.02
    mine = ours(vectors, ("novelty",))
    # Without ties the ranks of 256 values are (i + 1/2) / 256; two that are equal to six places share theirs.
    assert np.sort(mine) == pytest.approx((np.arange(256) + 0.5) / 256, abs=1 / 256)


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**31))
def test_diversity_and_its_factor_are_bounded_whatever_the_vectors(num, dim, seed):
    vectors = np.random.default_rng(seed).integers(-1, 2, (num, dim)).astype(float)  # many equal ones, and zeros
    mine = ours(vectors)
    assert ((mine >= 0) & (mine <= 1)).all()
    factor = diversity.interval_factor(mine, coeff=2.0)
    assert ((factor >= 1 / 3) & (factor <= 1)).all()


def test_ten_successes_with_diversity_leave_the_base_interval_alone():
    rule = make_spacing("fsrs", 0.9)
    state = plain = SpacingState.new(1)
    source_interval = 1.0
    for visit in range(10):
        elapsed_N = np.array(plain.interval_N, float)
        state = rule.review(state, np.array([3]), elapsed_N)
        plain = rule.review(plain, np.array([3]), elapsed_N)
        # Only what is due is shortened: the product is never stored.
        due_in = state.interval_N * diversity.interval_factor(np.array([1.0]), coeff=1.0)
        assert due_in == pytest.approx(plain.interval_N / 2), visit
        # Easiness grows from 2.0 by 0.1 to 2.5; the source stores the interval after dividing it by 1 + D.
        easiness = min(2.5, 2.0 + 0.1 * (visit + 1))
        source_interval *= 1.5 * (easiness - 1) / (1 + 33.6)
    assert state.interval_N == pytest.approx(plain.interval_N)
    assert state.interval_N[0] > 10
    assert source_interval < 1e-11


def test_group_variance_and_exits_score_for_each_number_of_successes():
    golden = [0, 0.109375, 0.1875, 0.234375, 0.25, 0.234375, 0.1875, 0.109375, 0]  # k (8 - k) / 64
    for k, score in enumerate(golden):
        rewards_G = np.array([1.0] * k + [0.0] * (8 - k), np.float32)
        assert diversity.group_variance(rewards_G) == pytest.approx(4 * score)
    assert diversity.group_variance(np.array([-1.0, 1.0])) == 1.0  # the variance is 1, outside what [0, 1] allows


def test_the_bonus_of_the_papers_equation_worked_by_hand():
    # Mean (.75, .75); distances 1.0607, .7906, .7906, 1.7678; max - min = .9772.
    distance_G = diversity.episode_spread(np.array([[0.0, 0], [1, 0], [0, 1], [2, 2]]))
    assert diversity.bonus(distance_G, "paper") == pytest.approx([1.0854, 0.8090, 0.8090, 1.8090], abs=1e-4)
    assert diversity.bonus(distance_G, "minmax") == pytest.approx([0.2764, 0, 0, 1], abs=1e-4)
    # The mean distance is 1.1024.
    assert diversity.bonus(distance_G, "mean1") == pytest.approx([0.9621, 0.7172, 0.7172, 1.6035], abs=1e-4)
    assert diversity.bonus(distance_G, "mean1").mean() == pytest.approx(1)


@pytest.mark.parametrize("mode", diversity.BONUSES)
def test_equal_distances_give_ones_in_every_mode(mode):
    for distance_G in (np.zeros(4), np.full(4, 0.7), np.array([0.7, 0.7 + 1e-9]), np.array([0.3])):
        assert diversity.bonus(distance_G, mode).tolist() == [1.0] * len(distance_G)
    # The corners of a square around its centre, in float32: equal but for rounding.
    square = (np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]]) / 3 + 100).astype(np.float32)
    assert diversity.bonus(diversity.episode_spread(square), mode).tolist() == [1.0] * 4


@pytest.mark.parametrize("mode", diversity.BONUSES)
def test_a_bonus_follows_its_episode_and_not_its_place(mode):
    distance_G = np.random.default_rng(0).random(8)
    order = np.random.default_rng(1).permutation(8)
    assert diversity.bonus(distance_G[order], mode) == pytest.approx(diversity.bonus(distance_G, mode)[order])


def test_bad_bonuses_are_refused():
    with pytest.raises(ValueError, match="diversity_bonus = 'eq6'; expected one of paper, minmax, mean1"):
        diversity.bonus(np.ones(2), "eq6")
    with pytest.raises(ValueError, match="expected finite distances of at least 0"):
        diversity.bonus(np.array([1, np.nan]), "paper")


def test_novelty_is_the_mean_of_the_neighbours_there_are():
    distance_NK = np.array([[0.1, 0.3], [0.5, np.nan], [np.nan, np.nan]])
    assert diversity.novelty(distance_NK) == pytest.approx([0.2, 0.5, 1.0])


def test_centroid_distance_worked_by_hand():
    vectors = np.array([[1.0, 0], [0, 1], [-0.6, -0.8]])
    # The direction of the centroid is (.6, .8): cosines .6, .8 and -1.
    assert diversity.centroid_distance(vectors, np.array([0.3, 0.4])) == pytest.approx([0.4, 0.2, 2.0])
    assert diversity.centroid_distance(vectors, np.zeros(2)).tolist() == [1, 1, 1]


def test_episodic_novelty_worked_by_hand():
    east, north = [1.0, 0.0], [0.0, 1.0]
    # Turn 2 repeats turn 1 (0); turn 3 differs from both (1 and 1): mean 1/2, scaled by 1 + .4.
    assert diversity.episodic_novelty(np.array([east, east, north]), 0.4) == pytest.approx(0.7)
    # With one neighbour the fourth turn, a repetition of the first, is at distance 0: (0 + 1 + 0) / 3.
    turns = np.array([east, east, north, east])
    assert diversity.episodic_novelty(turns, 0.5, num_neighbours=1) == pytest.approx(0.5)
    assert diversity.episodic_novelty(np.array([east, east]), 1.0) == 0
    assert diversity.episodic_novelty(np.array([east]), 0.25) == 1.25  # one turn repeats nothing


def test_ranks_worked_by_hand():
    calibrator = Calibrator(seed=0)
    assert calibrator.rank(np.array([3.0])).tolist() == [0.5]
    calibrator.add(np.array([1.0, 2, 2, 5]))
    # Below 2 lies one, equal are two: (1 + 2/2) / 4.
    assert calibrator.rank(np.array([0.0, 1, 2, 3, 5, 9])) == pytest.approx([0, 1 / 8, 1 / 2, 3 / 4, 7 / 8, 1])


@pytest.mark.parametrize("value", [0.0, 0.3, 33.6, 350_000.0])
def test_flat_values_have_rank_one_half(value):
    calibrator = Calibrator(seed=0)
    calibrator.add(np.full(100, value) * (1 + 1e-13 * np.random.default_rng(0).standard_normal(100)))
    assert calibrator.rank(np.array([value])).tolist() == [0.5]


@settings(max_examples=50)
@given(st.lists(st.floats(-1e3, 1e3), max_size=40), st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20))
def test_ranks_are_bounded_and_monotone(seen, asked):
    calibrator = Calibrator(seed=0, capacity=16)
    calibrator.add(np.array(seen))
    assert len(calibrator) == min(16, len(seen))
    ranks = calibrator.rank(np.sort(asked))
    assert ((ranks >= 0) & (ranks <= 1)).all()
    assert (np.diff(ranks) >= 0).all()


def test_one_call_adds_what_many_calls_add():
    values = np.random.default_rng(0).random(100)
    at_once, one_by_one = Calibrator(seed=1, capacity=10), Calibrator(seed=1, capacity=10)
    at_once.add(values)
    for value in values:
        one_by_one.add(np.array([value]))
    assert at_once.get_state() == one_by_one.get_state()


def test_a_calibrator_follows_drift():
    calibrator = Calibrator(seed=0, capacity=64)
    calibrator.add(np.zeros(64))
    assert calibrator.rank(np.array([1.0])).tolist() == [1]
    # A value survives 640 replacements with probability (1 - 1/64)^640 = 4e-5.
    calibrator.add(np.ones(640))
    assert calibrator.rank(np.array([1.0])).tolist() == [0.5]
    # After one turnover of the whole, a share of 1/e is left of what was there.
    calibrator.add(np.full(64, 2.0))
    assert calibrator.rank(np.array([1.5]))[0] == pytest.approx(np.exp(-1), abs=0.15)


def test_a_restored_calibrator_goes_on_alike():
    first = Calibrator(seed=0, capacity=8)
    first.add(np.random.default_rng(0).random(20))
    second = Calibrator(seed=5, capacity=8)
    second.set_state(json.loads(json.dumps(first.get_state())))
    for one in (first, second):
        one.add(np.random.default_rng(1).random(20))
    assert first.get_state() == second.get_state()
    assert first.rank(np.linspace(0, 1, 9)).tolist() == second.rank(np.linspace(0, 1, 9)).tolist()
    with pytest.raises(ValueError, match="capacity = 4; expected at least 8"):
        Calibrator(seed=0, capacity=4).set_state(first.get_state())


def test_bad_values_of_a_calibrator_are_refused():
    with pytest.raises(ValueError, match=r"capacity = 0.*resolution = 0"):
        Calibrator(seed=0, capacity=0, resolution=0)
    with pytest.raises(ValueError, match="1 of 2 values are not finite"):
        Calibrator(seed=0).add(np.array([0.0, np.nan]))


def test_parts_are_averaged_and_must_be_calibrated():
    assert diversity.combine([np.array([0.0, 1.0]), np.array([0.5, 0.5])]) == pytest.approx([0.25, 0.75])
    with pytest.raises(ValueError, match="calibrate them first"):
        diversity.combine([np.array([0.5, 33.6])])
    with pytest.raises(ValueError, match="expected at least one of variance, novelty"):
        diversity.combine([])
    assert diversity.interval_factor(np.array([0, 0.5, 1]), 0).tolist() == [1, 1, 1]
