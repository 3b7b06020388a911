"""The baselines against the numbers of their sources: goldens, and 50,000 draws against exact probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay.selection.candidates import Candidates, SelectionSettings
from rllib_srl.replay.selection.literature import importance_weights
from rllib_srl.replay.selection.rules import SELECTIONS, make_settings
from tests.replay.frequencies import fits

DEFAULT = SelectionSettings()


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def counts(
    rule: str, candidates: Candidates, setting: SelectionSettings = DEFAULT, num_draws: int = 50_000
) -> np.ndarray:
    """Return how often each candidate was drawn, in draws of one."""
    draw, rng = SELECTIONS[rule], generator(1)
    return np.bincount([draw(candidates, 1, rng, setting)[0] for _ in range(num_draws)], minlength=len(candidates))


# Frequencies


def test_exit_draws_by_softmax_of_the_score():
    score_N = np.array([0, 0.109375, 0.1875, 0.234375, 0.25])  # G = 8, 0 to 4 of 8 right
    weight_N = np.exp(10 * score_N)
    assert weight_N[-1] / weight_N[0] == pytest.approx(12.18, abs=0.01)  # the odds at kappa 10
    candidates = Candidates.of(5, score=score_N)
    assert fits(counts("exit", candidates), weight_N / weight_N.sum())


def test_per_draws_by_the_advantage():
    weight_N = (np.array([0.0, 0.2, 0.5, 1.0, 2.0]) + 1e-6) ** 0.6
    candidates = Candidates.of(5, abs_advantage=[0.0, 0.2, 0.5, 1.0, 2.0])
    assert fits(counts("per", candidates), weight_N / weight_N.sum())


@pytest.mark.slow
def test_fresh_per_fades():
    # .6 * 347 / 500: 66 % of the mass at age 347, 30 % at age 1000, 88.7 % at age 100
    candidates = Candidates.of(4, reward=[1] * 4, age=[0, 100, 347, 1000])
    weight_N = np.exp(-0.6 * np.array([0, 100, 347, 1000]) / 500)
    np.testing.assert_allclose(weight_N, [1, 0.887, 0.66, 0.30], atol=2e-3)
    probability_N = SELECTIONS["fresh_per"].probabilities(candidates, DEFAULT)
    np.testing.assert_allclose(probability_N / probability_N[0], weight_N, rtol=1e-12)
    assert fits(counts("fresh_per", candidates), weight_N / weight_N.sum())


def test_fresh_per_moves_what_was_not_sampled_and_never_underflows():
    rule = SELECTIONS["fresh_per"]
    young = rule.probabilities(Candidates.of(2, reward=[1, 1], age=[0, 0]), DEFAULT)
    later = rule.probabilities(Candidates.of(2, reward=[1, 1], age=[0, 200]), DEFAULT)  # nobody was drawn meanwhile
    assert young[1] == 0.5 and later[1] == pytest.approx(1 / (1 + np.exp(0.24)))
    ancient = rule.probabilities(Candidates.of(2, reward=[1, 1], age=[0, 10**9]), DEFAULT)
    assert ancient[1] / ancient[0] == pytest.approx(1e-8**0.6)


def test_fresh_per_on_binary_rewards_replays_recent_successes():
    probability_N = SELECTIONS["fresh_per"].probabilities(Candidates.of(2, reward=[1, 0]), DEFAULT)
    assert probability_N[1] / probability_N[0] == pytest.approx(2.5e-4, rel=0.01)  # methods: p^alpha = 2.5e-4


def test_exgrpo_buckets_whatever_they_hold():
    """1,000 draws of 50, each one multinomial draw of 50 buckets: 50,000 against the golden."""
    golden = [0.0044, 0.0540, 0.2420, 0.3991, 0.2420, 0.0540, 0.0044]  # k = 1 to 7 of 8
    num_success = np.repeat(np.arange(9), [99, 50, 300, 60, 80, 500, 70, 55, 99])  # 0 and 8 of 8 are retired
    candidates = Candidates.of(len(num_success), num_success=num_success, group_size=[8] * len(num_success))
    rng = generator(2)
    drawn = np.concatenate([SELECTIONS["exgrpo"](candidates, 50, rng, DEFAULT) for _ in range(1000)])
    count_K = np.bincount(num_success[drawn], minlength=9)
    exact_K = np.exp(-0.5 * (np.arange(9) - 4.0) ** 2) * ([0] + [1] * 7 + [0])
    np.testing.assert_allclose((exact_K / exact_K.sum())[1:8], golden, atol=5e-5)
    assert fits(count_K, exact_K / exact_K.sum())


def test_exgrpo_is_uniform_inside_a_bucket():
    # 2 of 4 and 4 of 8 are two buckets of the same weight: 1/2 / 3 each, 1/2 / 1
    candidates = Candidates.of(5, num_success=[4, 4, 4, 2, 0], group_size=[8, 8, 8, 4, 8])
    assert fits(counts("exgrpo", candidates, num_draws=5000), np.array([1 / 6, 1 / 6, 1 / 6, 1 / 2, 0]))


def test_exgrpo_gives_what_a_bucket_lacks_to_the_others():
    # one candidate with 4 of 8, nine with 1 of 8, two retired: 10 live, then fills
    candidates = Candidates.of(12, num_success=[4] + [1] * 9 + [0, 8], group_size=[8] * 12)
    for seed in range(20):
        drawn = SELECTIONS["exgrpo"](candidates, 8, generator(seed), DEFAULT)
        assert len(set(drawn)) == 8 and 0 in drawn and not {10, 11} & set(drawn)
        filled = SELECTIONS["exgrpo"](candidates, 11, generator(seed), DEFAULT)
        assert len(set(filled)) == 11 and set(range(10)) < set(filled)


def test_difficulty_pools():
    # hard (<= .25) .2, normal 1, easy (> .75) .2, never visited 1; sum 3.6
    candidates = Candidates.of(6, reward=[0, 0.25, 0.5, 0.75, 1, 0], visits=[1, 1, 1, 1, 1, 0])
    probability_N = np.array([0.2, 0.2, 1, 1, 0.2, 1]) / 3.6
    assert fits(counts("difficulty_pool", candidates, DEFAULT, 20_000), probability_N)


def test_rlep_draws_from_the_solved():
    candidates = Candidates.of(5, num_success=[0, 1, 2, 3, 8])
    assert fits(counts("rlep", candidates, DEFAULT, 20_000), np.array([0, 0, 1, 1, 1]) / 3)
    assert set(SELECTIONS["rlep"](candidates, 4, generator(), DEFAULT)) > {2, 3, 4}
    strict = make_settings("rlep", {"rlep_min_success": 9})  # nobody: a uniform draw fills the batch
    assert fits(counts("rlep", candidates, strict, 5000), np.full(5, 0.2))


def test_nll_surprise_draws_by_perplexity():
    nll_N = np.log([1.0, 2.0, 5.0])
    candidates = Candidates.of(3, nll=nll_N)
    assert fits(counts("nll_surprise", candidates, DEFAULT, 20_000), np.array([1, 2, 5]) / 8)
    greedy = make_settings("nll_surprise", {"temperature": 0})
    assert SELECTIONS["nll_surprise"](candidates, 2, generator(), greedy).tolist() == [2, 1]
    assert SELECTIONS["nll_surprise"](Candidates.of(2, nll=[0, 5000]), 1, generator(), DEFAULT).tolist() == [1]


def test_a_uniform_floor_is_mixed_in():
    candidates = Candidates.of(4, pass_rate=[0.5, 0.5, 1, 0])
    floored = make_settings("learnability", {"uniform_floor": 0.2})
    np.testing.assert_allclose(SELECTIONS["learnability"].probabilities(candidates, floored), [0.45, 0.45, 0.05, 0.05])
    assert fits(counts("learnability", candidates, floored, 10_000), np.array([0.45, 0.45, 0.05, 0.05]))


# Goldens


@pytest.mark.parametrize(
    "pass_rate, visits, golden",
    [
        (1.0, 1, [0, 0.4863, 0.7597, 0.9135, 1]),
        (0.0, 1, [2, 1.5137, 1.2403, 1.0865, 1]),
        (0.5, 1, [1] * 5),
        (1.0, 0, [1] * 5),  # never measured: r = 0
    ],
)
def test_pier_priorities(pass_rate, visits, golden):
    # lambda = 1 makes c the normalised uncertainty: 0, .25, .5, .75, 1
    setting = make_settings("pier", {"pier_lambda": 1.0, "pier_alpha": 1.0})
    candidates = Candidates.of(5, nll=[0, 0.5, 1, 1.5, 2], pass_rate=[pass_rate] * 5, visits=[visits] * 5)
    priority_N = np.exp(SELECTIONS["pier"].log_weight(candidates, setting))
    np.testing.assert_allclose(priority_N, golden, atol=5e-5)


def test_pier_age_by_hand():
    # lambda = 0: c = 1 - k / max k, k from the oldest: 1, .5, 0; successes: p = 1, .7597, 0
    setting = make_settings("pier", {"pier_lambda": 0.0, "pier_alpha": 1.0})
    candidates = Candidates.of(3, seq=[1000, 1001, 1002], pass_rate=[1] * 3, visits=[1] * 3)
    priority_N = np.exp(SELECTIONS["pier"].log_weight(candidates, setting))
    np.testing.assert_allclose(priority_N, [1, 0.7597, 0], atol=5e-5)
    assert fits(counts("pier", candidates, setting, 10_000), priority_N / priority_N.sum())
    assert len(set(SELECTIONS["pier"](candidates, 3, generator(), DEFAULT))) == 3  # probability 0 still fills


def test_pier_weights_survive_a_probability_of_zero():
    setting = make_settings("pier", {"pier_lambda": 0.0})
    candidates = Candidates.of(3, pass_rate=[1] * 3, visits=[1] * 3)
    weights = importance_weights(SELECTIONS["pier"], candidates, np.arange(3), setting)
    # P = 1, .7597 ** 1.5 = .6622, 0: with beta 1 the least possible one has weight 1
    np.testing.assert_allclose(weights, [0.6622, 1, 1], atol=1e-4)


@pytest.mark.parametrize(
    "strategy, expected", [("highest", [2, 0]), ("max_variance", [1, 3]), ("recent", [3, 2]), ("random", None)]
)
def test_repo_strategies(strategy, expected):
    candidates = Candidates.of(4, reward=[0.8, 0.5, 1, 0.2], variance=[0.16, 0.25, 0, 0.2])
    setting = make_settings("repo", {"repo_strategy": strategy})
    if expected is None:
        assert fits(counts("repo", candidates, setting, 5000), np.full(4, 0.25))
    else:
        assert SELECTIONS["repo"](candidates, 2, generator(), setting).tolist() == expected


# Importance weights


def test_importance_weights_by_hand():
    # per_alpha 1: P = .1 .2 .7 (of 1e-6 accuracy); w = (P / .1) ** -.4
    setting = make_settings("per", {"per_alpha": 1.0})
    candidates = Candidates.of(3, abs_advantage=[0.1, 0.2, 0.7])
    weights = importance_weights(SELECTIONS["per"], candidates, np.array([2, 0]), setting)
    np.testing.assert_allclose(weights, [7**-0.4, 1], rtol=1e-4)
    half = importance_weights(SELECTIONS["per"], candidates, np.array([2]), make_settings("per", {"per_beta": 0.0}))
    assert half.tolist() == [1]
    light = importance_weights(SELECTIONS["pier"], Candidates.of(2, seq=[0, 9], visits=[1, 1]), np.array([0]), DEFAULT)
    assert light.tolist() == [1]


def test_importance_weights_follow_the_decay():
    candidates = Candidates.of(2, reward=[1, 1], age=[0, 500])
    weights = importance_weights(SELECTIONS["fresh_per"], candidates, np.array([0, 1]), DEFAULT)
    np.testing.assert_allclose(weights, [np.exp(-0.4 * 0.6), 1])


def test_importance_weights_undo_the_draw_at_beta_one():
    # E[w f] = sum P w f is proportional to the plain sum of f
    setting = make_settings("per", {"per_beta": 1.0})
    candidates = Candidates.of(4, abs_advantage=[0.1, 0.5, 1, 2])
    probability_N = SELECTIONS["per"].probabilities(candidates, setting)
    product_N = probability_N * importance_weights(SELECTIONS["per"], candidates, np.arange(4), setting)
    np.testing.assert_allclose(product_N, product_N[0])


def test_pier_beta_acts():
    candidates = Candidates.of(2, pass_rate=[0, 0.5], visits=[1, 1])
    for beta in (0.0, 0.5, 1.0):
        setting = make_settings("pier", {"pier_beta": beta, "pier_lambda": 1.0})  # p = 2 (c = 0) and 1
        weights = importance_weights(SELECTIONS["pier"], candidates, np.arange(2), setting)
        np.testing.assert_allclose(weights, [(2**1.5) ** -beta, 1])


def test_rules_without_weights_say_so():
    with pytest.raises(ValueError, match="the rule has no importance weights"):
        importance_weights(SELECTIONS["uniform"], Candidates.of(2), np.arange(2), DEFAULT)
