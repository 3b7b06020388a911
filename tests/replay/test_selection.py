"""The rules by hand, draws against exact probabilities, and two old defects: leeches that take all, short batches."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.selection.candidates import COLUMNS, SETTING_NAMES, Candidates, SelectionSettings, first, weighted
from rllib_srl.replay.selection.rules import SELECTIONS, SETTINGS_OF, Carry, make_settings, select, srl
from tests.replay.frequencies import fits

GREEDY = SelectionSettings(temperature=0)
DEFAULT = SelectionSettings()


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def some(num: int, seed: int = 0, **columns) -> Candidates:
    """Return candidates whose every column varies."""
    rng = generator(seed)
    group_size = np.full(num, 8)
    values = {
        "domain": rng.integers(0, 3, num),
        "num_success": (num_success := rng.integers(0, 9, num)),
        "group_size": group_size,
        "pass_rate": num_success / group_size,
        "reward": num_success / group_size,
        "variance": num_success / 8 * (1 - num_success / 8),
        "score": num_success / 8 * (1 - num_success / 8),
        "abs_advantage": rng.random(num),
        "nll": rng.random(num),
        "diversity": rng.random(num),
        "age": rng.integers(0, 50, num),
        "elapsed": rng.integers(0, 50, num),
        "overdue": rng.normal(size=num),
        "retrievability": rng.random(num),
        "uses": rng.integers(0, 4, num),
        "visits": rng.integers(0, 4, num),
        "is_new": rng.random(num) < 0.3,
        "posterior_mean": rng.random(num),
    }
    later = {"num_silent": rng.integers(0, 9, num), "history_count": (count_N := rng.integers(0, 90, num))}
    values |= later | {"history_sum": count_N * rng.random(num)}
    return Candidates.of(num, **{**values, **columns})


# By hand


def test_due_items_come_first_by_lateness_learnability_and_diversity():
    # (1 + overdue)(1 + 3 * 4p(1 - p))(1 + .5 d):  2 * 1 * 1 = 2;  1 * 4 * 1 = 4;  1 * 4 * 1.5 = 6;  early; early
    candidates = Candidates.of(
        5,
        overdue=[1, 0, 0, -0.1, -0.5],
        posterior_mean=[1, 0.5, 0.5, 0.5, 0.5],
        diversity=[0, 0, 1, 1, 1],
        retrievability=[0.5, 0.5, 0.5, 0.95, 0.92],
    )
    assert srl(candidates, 5, generator(), GREEDY).tolist() == [2, 1, 0, 4, 3]


def test_srl_draws_in_proportion_to_the_priority():
    # priorities 2, 4, 6 as above: probabilities 1/6, 1/3, 1/2; the early one is not drawn
    candidates = Candidates.of(4, overdue=[1, 0, 0, -1], posterior_mean=[1, 0.5, 0.5, 0.5], diversity=[0, 0, 1, 0])
    rng = generator(1)
    count_N = np.bincount([srl(candidates, 1, rng, DEFAULT)[0] for _ in range(10_000)], minlength=4)
    assert fits(count_N, np.array([1 / 6, 1 / 3, 1 / 2, 0]))


def test_srl_weighs_groups_by_signal_diversity_freshness_and_uses():
    # (.01 + 4 var)(1 + .5 d) exp(-age / 16) / (1 + uses): .51; .765; .51 * e^-1 = .188; .255; .01
    columns = {
        "variance": [0.125] * 4 + [0],
        "diversity": [0, 1, 0, 0, 0],
        "age": [0, 0, 16, 0, 0],
        "uses": [0, 0, 0, 1, 0],
    }
    candidates = Candidates.of(5, are_groups=True, **columns)
    assert srl(candidates, 5, generator(), GREEDY).tolist() == [1, 0, 3, 2, 4]
    priority_N = np.array([0.51, 0.765, 0.51 * np.exp(-1), 0.255, 0.01])
    rng = generator(2)
    count_N = np.bincount([srl(candidates, 1, rng, DEFAULT)[0] for _ in range(10_000)], minlength=5)
    assert fits(count_N, priority_N / priority_N.sum())


def test_a_slot_goes_to_a_new_item_with_probability_epsilon():
    candidates = Candidates.of(8, is_new=[True] * 4 + [False] * 4, overdue=[0] * 4 + [100] * 4)
    setting = SelectionSettings(temperature=0, epsilon_new=0.3)
    rng = generator(3)
    share = np.mean([np.mean(srl(candidates, 4, rng, setting) < 4) for _ in range(2000)])
    assert share == pytest.approx(0.3, abs=0.02)  # deviation .005
    assert (srl(candidates, 4, rng, GREEDY) >= 4).all()


def test_a_temperature_flattens_and_zero_takes_the_top():
    candidates = Candidates.of(2, overdue=[0, 3])  # priorities 1 : 4 (p = .5 in both)
    rng = generator(4)
    for temperature, expected in ((2.0, 2 / 3), (1.0, 4 / 5), (0.5, 16 / 17), (0.0, 1.0)):
        setting = SelectionSettings(temperature=temperature)
        share = np.mean([srl(candidates, 1, rng, setting)[0] for _ in range(2000)])
        assert share == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    "rule, columns, expected",
    [
        ("fifo", {"elapsed": [1, 5, 5, 0], "seq": [0, 7, 3, 9]}, [2, 1, 0]),
        ("recent", {"seq": [4, 9, 1, 7]}, [1, 3, 0]),
        ("hardest", {"pass_rate": [0.1, 0.9, 0.5, 0]}, [3, 0, 2]),
    ],
)
def test_deterministic_rules(rule, columns, expected):
    assert SELECTIONS[rule](Candidates.of(4, **columns), 3, generator(), DEFAULT).tolist() == expected


def test_high_reward_draws_uniformly_among_twice_as_many():
    """Rewards .9 .8 .5 .4 .1: two slots draw any two of the first four alike, one slot one of the first two."""
    candidates = Candidates.of(5, reward=[0.5, 0.9, 0.1, 0.8, 0.4])
    rule, rng = SELECTIONS["high_reward"], generator(3)
    pairs = Counter(tuple(sorted(rule(candidates, 2, rng, DEFAULT).tolist())) for _ in range(6000))
    assert set(pairs) == set(itertools.combinations([0, 1, 3, 4], 2))
    assert min(pairs.values()) > 900 and max(pairs.values()) < 1100  # 1000 each, deviation 29
    assert {int(rule(candidates, 1, rng, DEFAULT)[0]) for _ in range(50)} == {1, 3}
    assert sorted(rule(candidates, 5, rng, DEFAULT)) == [0, 1, 2, 3, 4]
    top = make_settings("high_reward", {"high_reward_factor": 1.0})
    assert {tuple(sorted(rule(candidates, 3, rng, top))) for _ in range(20)} == {(0, 1, 3)}
    odd = make_settings("high_reward", {"high_reward_factor": 1.5})  # ceil(1.5) = 2
    assert {int(rule(candidates, 1, rng, odd)[0]) for _ in range(50)} == {1, 3}


def test_ties_are_broken_by_the_generator():
    candidates = Candidates.of(10)
    for rule in ("high_reward", "hardest", "fifo"):
        columns = {"seq": [0] * 10} if rule == "fifo" else {}
        drawn = [tuple(SELECTIONS[rule](Candidates.of(10, **columns), 3, generator(s), DEFAULT)) for s in range(20)]
        assert len(set(drawn)) > 10
    assert (srl(candidates, 3, generator(5), GREEDY) == srl(candidates, 3, generator(5), GREEDY)).all()


def test_balanced_gives_domains_equal_slots():
    candidates = Candidates.of(100, domain=[0] * 90 + [1] * 8 + [2] * 2)
    drawn = SELECTIONS["balanced"](candidates, 12, generator(), DEFAULT)
    # 4 each; domain 2 has 2 and lends 2 to the others
    assert np.bincount(candidates.domain[drawn]).tolist() == [5, 5, 2]


# Draw frequencies


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["uniform", "learnability"])
def test_draw_frequencies(rule):
    pass_rate = np.array([0, 0.125, 0.25, 0.5, 0.75, 1])
    weight = {"uniform": np.ones(6), "learnability": np.array([0, 7, 12, 16, 12, 0.0])}[rule]  # 64 p (1 - p)
    candidates, rng = Candidates.of(6, pass_rate=pass_rate), generator(6)
    count_N = np.bincount([SELECTIONS[rule](candidates, 1, rng, DEFAULT)[0] for _ in range(50_000)], minlength=6)
    assert fits(count_N, weight / weight.sum())


def test_the_second_draw_is_from_what_is_left():
    # w = 1, 2, 5: P(first i, then j) = w_i / 8 * w_j / (8 - w_i)
    rng, log_weight = generator(7), np.log([1.0, 2.0, 5.0])
    pairs = np.array([weighted(log_weight, 2, rng) for _ in range(20_000)])
    count = np.bincount(pairs[:, 0] * 3 + pairs[:, 1], minlength=9)
    w = np.array([1.0, 2.0, 5.0])
    expected = np.array([w[i] / 8 * w[j] / (8 - w[i]) if i != j else 0 for i in range(3) for j in range(3)])
    assert fits(count, expected)


def test_weights_of_zero_fill_at_random_and_bad_ones_are_named():
    log_weight = np.array([-np.inf, 0, -np.inf, -np.inf])
    drawn = [weighted(log_weight, 3, generator(seed)).tolist() for seed in range(30)]
    assert all(each[0] == 1 and len(set(each)) == 3 for each in drawn)
    assert len({tuple(each) for each in drawn}) > 3
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="expected finite numbers or -inf"):
            weighted(np.array([0, bad]), 1, generator())


# select: contract over every rule


@pytest.mark.parametrize("rule", sorted(SELECTIONS))
@settings(max_examples=15)
@given(
    num=st.integers(0, 14),
    num_candidates=st.integers(0, 12),
    seed=st.integers(0, 99),
    are_groups=st.booleans(),
    weights=st.sampled_from([None, {0: 1.0, 1: 1.0}, {0: 5.0, 1: 0.0, 2: 1.0}]),
    with_leeches=st.booleans(),
)
def test_a_batch_is_full_distinct_and_seeded(rule, num, num_candidates, seed, are_groups, weights, with_leeches):
    candidates = some(num_candidates, seed)
    candidates = Candidates.of(num_candidates, are_groups, **{name: getattr(candidates, name) for name in COLUMNS})
    is_leech = np.arange(num_candidates) % 3 == 0 if with_leeches else None
    draws = [select(rule, candidates, num, generator(seed), DEFAULT, weights, is_leech) for _ in range(2)]
    assert len(draws[0].indices) == len(np.unique(draws[0].indices)) == min(num, num_candidates)
    assert set(draws[0].indices) <= set(range(num_candidates))
    np.testing.assert_array_equal(draws[0].indices, draws[1].indices)
    if with_leeches:
        drawn = int(is_leech[draws[0].indices].sum())
        forced = max(min(num, num_candidates) - int((~is_leech).sum()), 0)
        assert drawn <= max(int(0.1 * min(num, num_candidates) + 1e-9), forced)


def test_select_divides_slots_among_domains():
    candidates = some(300)
    indices = select("srl", candidates, 20, generator(), DEFAULT, {0: 5, 1: 3, 2: 2}).indices
    assert np.bincount(candidates.domain[indices]).tolist() == [10, 6, 4]


def test_the_leech_cap_is_carried():
    # 4 slots at .1: .4 .8 1.2 1.6 2.0 -> 0 0 1 0 1, although leeches are the hardest of all
    candidates = Candidates.of(40, pass_rate=[0] * 8 + [0.5] * 32)
    is_leech, carry, counts = np.arange(40) < 8, None, []
    for seed in range(10):
        indices, carry = select("hardest", candidates, 4, generator(seed), DEFAULT, None, is_leech, carry)
        counts.append(int(is_leech[indices].sum()))
    assert counts == [0, 0, 1, 0, 1] * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("knows_leeches", [True, False])
def test_leeches_cannot_monopolise(temperature, knows_leeches):
    """8 unlearnable items of 40 took all replay slots in the source system; 32 were never replayed."""
    num_items, is_leech = 40, np.arange(40) < 8
    interval, due, passed, visits = np.ones(40), np.zeros(40), np.ones(40), np.zeros(40, int)
    failed, carry, rng = np.ones(40), Carry(), generator(11)
    setting = SelectionSettings(temperature=temperature)
    for now in range(200):
        candidates = Candidates.of(num_items, overdue=(now - due) / interval, posterior_mean=passed / (passed + failed))
        mask = is_leech if knows_leeches else None
        indices, carry = select("srl", candidates, 4, rng, setting, None, mask, carry)
        visits[indices] += 1
        passed[indices] += ~is_leech[indices]
        failed[indices] += is_leech[indices]
        interval[indices] = np.where(is_leech[indices], 1, interval[indices] * 1.5)
        due[indices] = now + interval[indices]
    assert visits[~is_leech].min() >= 3
    assert visits[is_leech].sum() <= (81 if knows_leeches else 500)  # of 800: .1 + 1, or no monopoly


def test_no_due_item_starves_under_greedy():
    overdue_since, visits, rng = np.zeros(20), np.zeros(20, int), generator(12)
    recall = np.where(np.arange(20) < 4, 0.5, 1.0)  # four are worth four times the others
    for now in range(200):
        candidates = Candidates.of(20, overdue=now - overdue_since, posterior_mean=recall)
        index = srl(candidates, 1, rng, GREEDY)[0]
        visits[index] += 1
        overdue_since[index] = now + 1
    assert visits.min() >= 2
    assert visits[:4].min() > visits[4:].max()


# Settings


ACTS = {  # setting -> a rule whose draws it changes, and another value
    "temperature": ("srl", 0.0),
    "epsilon_new": ("srl", 1.0),
    "diversity_coeff": ("srl", 50.0),
    "learnability_coeff": ("srl", 500.0),
    "leech_share": ("hardest", 1.0),
    "uniform_floor": ("learnability", 1.0),
    "high_reward_factor": ("high_reward", 1.0),
    "kappa": ("exit", 1000.0),
    "per_alpha": ("per", 20.0),
    "fresh_tau": ("fresh_per", 0.1),
    "pier_lambda": ("pier", 1.0),
    "pier_base": ("pier", 1e9),
    "pier_alpha": ("pier", 50.0),
    "pool_hard": ("difficulty_pool", 0.7),
    "pool_easy": ("difficulty_pool", 0.3),
    "pool_hard_weight": ("difficulty_pool", 50.0),
    "pool_easy_weight": ("difficulty_pool", 50.0),
    "exgrpo_sigma": ("exgrpo", 0.1),
    "repo_strategy": ("repo", "recent"),
    "rlep_min_success": ("rlep", 7),
    "greso_least": ("greso", 1.0),
    "mopps_target": ("mopps", 0.0),
    "spo_floor": ("spo", 100.0),
    "signal_floor": ("srl groups", 100.0),
    "age_scale": ("srl groups", 0.1),
}
ELSEWHERE = {"per_beta", "pier_beta", "reservoir_seed"}  # importance weights and eviction: seen to act in their tests


def test_every_setting_is_seen_to_act():
    assert set(ACTS) | ELSEWHERE == set(SETTING_NAMES)


@pytest.mark.parametrize("name", sorted(ACTS))
def test_a_setting_changes_who_is_drawn(name):
    rule, value = ACTS[name]
    source = some(40, 13)
    candidates = Candidates.of(40, rule.endswith("groups"), **{each: getattr(source, each) for each in COLUMNS})
    is_leech = source.pass_rate == 0

    def draws(setting: SelectionSettings) -> np.ndarray:
        rng = generator(1)
        return np.concatenate(
            [select(rule.split()[0], candidates, 5, rng, setting, None, is_leech).indices for _ in range(20)]
        )

    # With one seed, draws differ only because the setting acts.
    assert (draws(DEFAULT) == draws(DEFAULT)).all()
    assert (draws(DEFAULT) != draws(make_settings(rule.split()[0], {name: value}))).any()


def test_settings_are_refused_with_all_faults_at_once():
    with pytest.raises(
        ValueError, match=r"kapa = 3; expected a setting of exit.*kappa = -1; expected a number of at l"
    ):
        make_settings("exit", {"kapa": 3, "kappa": -1})
    with pytest.raises(ValueError, match="temperature = 1.0; expected a setting of exit"):
        make_settings("exit", {"temperature": 1.0})
    assert make_settings("exit", {"temperature": 2.0, "kappa": 5}, beside=["srl"]).kappa == 5
    with pytest.raises(ValueError, match="selection = 'best'; expected one of"):
        make_settings("best", {})
    with pytest.raises(ValueError, match="pool_hard = 0.8; expected less than pool_easy = 0.75"):
        SelectionSettings(pool_hard=0.8)


@pytest.mark.parametrize("name", sorted(SETTING_NAMES))
def test_every_setting_has_a_range(name):
    for bad in (-1, float("nan"), "much", True):
        with pytest.raises(ValueError, match=f"{name} = {bad!r}; expected "):
            SelectionSettings(**{name: bad})


def test_every_rule_names_its_settings():
    assert set(SETTINGS_OF) == set(SELECTIONS)
    for rule, names in SETTINGS_OF.items():
        default = DEFAULT.signal if rule == "signal" else DEFAULT
        make_settings(rule, {name: getattr(default, name) for name in names})


# Bad input


def test_columns_that_do_not_fit_are_named_with_both_lengths():
    with pytest.raises(ValueError, match="domain has 3 entries, seq has 4; reward has 1 entries that are not finite"):
        Candidates.of(4, domain=[0] * 3, reward=[0, 1, np.nan, 1])
    with pytest.raises(ValueError, match=r"columns = \['colour'\]; expected some of"):
        Candidates.of(2, colour=[0, 1])
    with pytest.raises(ValueError, match="is_leech_N has 3 entries, candidates have 4"):
        select("srl", Candidates.of(4), 1, generator(), DEFAULT, None, np.zeros(3, bool))


def test_take_keeps_every_column():
    source = some(10)
    taken = source.take(np.array([7, 2]))
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(taken, name), getattr(source, name)[[7, 2]])


def test_a_users_own_rule_is_held_to_the_contract(monkeypatch):
    monkeypatch.setitem(SELECTIONS, "mine", lambda candidates, num, generator, settings: np.zeros(num, int))
    with pytest.raises(
        ValueError, match="selection 'mine' returned 3 indices, 1 of them distinct; expected 3 distinct"
    ):
        select("mine", Candidates.of(5), 3, generator(), make_settings("mine", {"kappa": 3}))
    assert select("mine", Candidates.of(5), 1, generator(), DEFAULT).indices.tolist() == [0]
    with pytest.raises(ValueError, match="selection = 'yours'; expected one of"):
        select("yours", Candidates.of(5), 1, generator(), DEFAULT)


def test_first_sorts_by_all_columns():
    assert first(3, generator(), np.array([1, 0, 1]), np.array([0, 9, -1])).tolist() == [1, 2, 0]
