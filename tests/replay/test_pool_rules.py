"""The published rules over all prompts of a pool: cases by hand, and draws against exact probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay.selection.candidates import Candidates, SelectionSettings
from rllib_srl.replay.selection.context import Context
from rllib_srl.replay.selection.pool_rules import skipped_passes
from rllib_srl.replay.selection.rules import SELECTIONS, make_settings
from tests.replay.frequencies import fits

DEFAULT = SelectionSettings()


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_skipped_passes_by_hand():
    # q = .5: P(k or more) = .5^k, so .6 -> 0, .5 -> 0, .3 -> 1, .2 -> 2; q = 1: never
    skipped_N = skipped_passes(np.array([0.6, 0.5, 0.3, 0.2, 0.001]), np.array([0.5, 0.5, 0.5, 0.5, 1.0]))
    assert skipped_N.tolist() == [0, 0, 1, 2, 0]


def test_skipped_passes_are_geometric():
    skipped_N = skipped_passes(rng(1).random(20_000), np.full(20_000, 0.25))
    count_K = np.bincount(np.minimum(skipped_N, 6).astype(int), minlength=7)
    exact_K = 0.25 * 0.75 ** np.arange(7)
    exact_K[6] = 0.75**6
    assert fits(count_K, exact_K)


def played(num_silent: np.ndarray, num_slots: int, num_iterations: int) -> np.ndarray:
    """Return how often greso plays each of some items whose silence never changes."""
    size = len(num_silent)
    last, visits = np.zeros(size, int), np.zeros(size, int)
    for now in range(1, num_iterations + 1):
        elapsed = np.where(visits == 0, now + 1, now - last)
        candidates = Candidates.of(size, elapsed=elapsed, visits=visits, num_silent=num_silent)
        drawn = SELECTIONS["greso"](candidates, num_slots, rng(now), DEFAULT)
        last[drawn], visits[drawn] = now, visits[drawn] + 1
    return visits


def test_greso_without_silence_walks_through_the_pool():
    visits = played(np.zeros(12), 4, 30)
    assert visits.tolist() == [10] * 12


def test_greso_plays_silent_items_in_the_share_of_passes_that_it_should():
    # c = 0, 1, 2, 9: in 1, 1/2, 1/4 and max(.5^9, .01) = 1/100 of the passes
    num_silent = np.repeat([0.0, 1.0, 2.0, 9.0], 100)
    visits = played(num_silent, 20, 400)
    each = visits.reshape(4, 100).mean(axis=1)
    assert each[1] / each[0] == pytest.approx(0.5, rel=0.1)
    assert each[2] / each[0] == pytest.approx(0.25, rel=0.15)
    assert each[3] == pytest.approx(8000 / 176 / 100, abs=0.25)  # 8,000 slots, 176 a pass; deviation .07


def test_mopps_takes_the_rate_drawn_nearest_to_the_target():
    # Beta(1 + s, 1 + n - s): all but certain rates of .1, .5 and .9
    history = {"history_sum": [1e6, 5e6, 9e6], "history_count": [1e7] * 3}
    candidates = Candidates.of(3, **history)
    assert SELECTIONS["mopps"](candidates, 1, rng(), DEFAULT).tolist() == [1]
    setting = make_settings("mopps", {"mopps_target": 0.2})
    assert SELECTIONS["mopps"](candidates, 2, rng(), setting).tolist() == [0, 1]


def test_mopps_samples_the_posterior():
    # Two items, uniform posteriors: each is the nearer one with probability 1/2. Against a sure rate of .25, a uniform
    # one is nearer to .5 with probability P(|u - .5| < .25) = 1/2.
    count_K = np.zeros(2)
    candidates = Candidates.of(2, history_sum=[0, 2.5e8], history_count=[0, 1e9])
    generator = rng(2)
    for _ in range(4000):
        count_K[SELECTIONS["mopps"](candidates, 1, generator, DEFAULT)[0]] += 1
    assert fits(count_K, np.array([0.5, 0.5]))


def test_spo_draws_by_the_deviation_and_a_floor():
    # v = (1 + s) / (2 + n): 1/2, 9/10, 99/100 -> sqrt(v(1 - v)) + .05 = .55, .35, .1495
    candidates = Candidates.of(3, history_sum=[0, 8, 98], history_count=[0, 8, 98])
    weight_N = np.array([0.55, 0.35, 0.05 + np.sqrt(0.99 * 0.01)])
    probability_N = SELECTIONS["spo"].probabilities(candidates, DEFAULT)
    np.testing.assert_allclose(probability_N, weight_N / weight_N.sum())
    generator = rng(3)
    draws = [SELECTIONS["spo"](candidates, 1, generator, DEFAULT)[0] for _ in range(8000)]
    assert fits(np.bincount(draws, minlength=3), weight_N / weight_N.sum())


def test_spo_draws_by_the_prediction_of_the_posterior_baseline():
    # w0 = 2, domain means .25 and, unknown, .5: v = (.5 + 3) / (2 + 4), .5 / 2 and 1 / 2
    context = Context(mean_D=np.array([0.25]), group_size=1, prior_weight=2.0)
    columns = {"history_sum": [3, 0, 0], "history_count": [4, 0, 0], "domain": [0, 0, 1]}
    value_N = np.array([3.5 / 6, 0.25, 0.5])
    weight_N = np.sqrt(value_N * (1 - value_N)) + 0.05
    probability_N = SELECTIONS["spo"].probabilities(Candidates.of(3, context=context, **columns), DEFAULT)
    np.testing.assert_allclose(probability_N, weight_N / weight_N.sum())
    without = Context(mean_D=np.array([0.25]), group_size=1, prior_weight=0.0)  # never played: the domain's mean
    value_N = np.array([0.75, 0.25, 0.5])
    weight_N = np.sqrt(value_N * (1 - value_N)) + 0.05
    probability_N = SELECTIONS["spo"].probabilities(Candidates.of(3, context=without, **columns), DEFAULT)
    np.testing.assert_allclose(probability_N, weight_N / weight_N.sum())


@pytest.mark.parametrize("rule", ["greso", "mopps", "spo"])
def test_rules_keep_the_contract_at_the_edges(rule):
    assert len(SELECTIONS[rule](Candidates.of(0), 0, rng(), DEFAULT)) == 0
    assert sorted(SELECTIONS[rule](Candidates.of(3), 3, rng(), DEFAULT).tolist()) == [0, 1, 2]
