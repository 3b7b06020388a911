"""The rule `signal`: cases by hand, a twin in loops, exact expectations by enumeration, and its laws."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.selection.candidates import Candidates, SelectionSettings
from rllib_srl.replay.selection.context import Context, SignalSettings
from rllib_srl.replay.selection.rules import make_settings, select
from rllib_srl.replay.selection.signal import (
    chance_of_progress,
    chance_of_signal,
    domain_slots,
    drawn_by_signal,
    expected_square,
    factors,
    highest,
    kappas,
    phis,
    signal,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def of(**parameters) -> SelectionSettings:
    return make_settings("signal", {"noise": 0.0, **parameters})


# --- by hand --------------------------------------------------------------------------------------


def test_the_chance_of_signal_by_hand():
    # (1 * .5 + 1) / (2 + c): .75, .5, .3, at most 8 counted: .15
    chance_N = chance_of_signal(np.full(5, 0.5), np.array([0, 1, 3, 8, 20]), 1.0)
    np.testing.assert_allclose(chance_N, [0.75, 0.5, 0.3, 0.15, 0.15])
    # kappa 0: silent items wait 1, 2, 3 ... passes
    np.testing.assert_allclose(1 / chance_of_signal(np.full(3, 0.9), np.arange(3.0), 0.0), [1, 2, 3])


def test_the_chance_of_progress_by_hand():
    # U = 4: 1 up to u = 8, then U / (u - U): 12 -> 4 / 8, 20 -> 4 / 16
    np.testing.assert_allclose(chance_of_progress(np.array([0, 8, 12, 20]), 4.0), [1, 1, 0.5, 0.25])


def test_kappa_and_phi_are_given_or_estimated():
    icc_D = np.array([np.nan, 0.5, 0.8, 0.0, -0.2, 1.0, 0.2])
    np.testing.assert_allclose(kappas(None, icc_D), [1, 1, 0.3, 10, 10, 0.3, 4])
    np.testing.assert_allclose(phis(None, icc_D), [0.5, 0.5, 0.2, 1, 1, 0, 0.8])
    assert kappas(0.0, icc_D).tolist() == [0.0] * 7 and phis(1.0, icc_D).tolist() == [1.0] * 7


def test_the_priority_by_hand():
    # w / cost * elapsed * S * L with kappa 1, pi .5, U 4; unseen: max(11, 4 items / 2 slots)
    candidates = Candidates.of(
        4,
        elapsed=[10, 10, 6, 11],
        visits=[3, 3, 3, 0],
        num_silent=[1, 0, 0, 0],
        num_unsolved=[0, 12, 0, 0],
        cost=[1, 1, 2, 1],
        weight=[1, 1, 4, 1],
    )
    found = factors(candidates, 4 / 2, of().signal)
    np.testing.assert_allclose(found.chance, [0.5, 0.75, 0.75, 0.75])
    np.testing.assert_allclose(found.progress, [1, 0.5, 1, 1])
    np.testing.assert_allclose(found.priority, [5, 3.75, 9, 8.25])
    assert signal(candidates, 3, rng(), of()).tolist() == [2, 3, 0]


def test_an_unseen_item_has_waited_for_a_pass():
    candidates = Candidates.of(50, elapsed=[2] * 50, visits=[0] + [1] * 49)
    assert factors(candidates, 50 / 5, of().signal).elapsed.tolist() == [10] + [2] * 49


def test_slots_of_domains_by_hand():
    # base * wait: 2*1, 1*1 -> 0; 2*1, 1*2 -> tie; after a slot of 0 its wait is 1 again
    assert domain_slots(np.array([2.1, 1.0]), np.array([1.0, 1.0]), np.array([9, 9]), 6, rng()).tolist() == [
        0, 0, 1, 0, 0, 1,
    ]  # fmt: skip
    # a domain that waited for 5 slots comes first; one with a single candidate gets one slot
    assert domain_slots(np.array([1.0, 1.0]), np.array([1.0, 5.0]), np.array([9, 1]), 3, rng()).tolist() == [1, 0, 0]


def test_a_slot_goes_to_a_domain_first():
    # n_d^(1 - phi): 4 items against 1; phi 1: domains in turn; phi .5: 2 to 1; phi 0: items alone
    domain = [0] * 4 + [1]
    elapsed = [9, 8, 7, 6, 1]
    candidates = Candidates.of(5, domain=domain, elapsed=elapsed, visits=[1] * 5)
    assert sorted(signal(candidates, 2, rng(), of(phi=1.0)).tolist()) == [0, 4]
    assert signal(candidates, 3, rng(), of(phi=0.0)).tolist() == [0, 1, 2]
    third = signal(candidates, 3, rng(), of(phi=0.4))
    assert third.tolist() == [0, 1, 4]  # 4^.6 = 2.3 twice, then 1 * 3


def test_a_draw_has_the_reasons_of_its_choice_by_hand():
    # Domains 0 (4 items) and 2 (1 item), none in 1. base 4^.5 * .5 = 1 and 1^.5 * .5 = .5, waits 3 and 8: values 3, 4.
    # Slots: 2 (4), which has no more, then 0 twice.
    waits, known = np.array([3.0, 99.0, 8.0]), {"unsolved_D": np.zeros(3), "solved_after_D": np.full(3, 4.0)}
    context = Context(live_D=np.full(3, 0.5), wait_D=waits, **known)
    candidates = Candidates.of(5, domain=[0] * 4 + [2], elapsed=[9, 8, 7, 6, 1], visits=[1] * 5, context=context)
    drawn = drawn_by_signal(candidates, 3, rng(), of(phi=0.5))
    assert drawn.indices.tolist() == [4, 0, 1] == signal(candidates, 3, rng(), of(phi=0.5)).tolist()
    assert drawn.factors.elapsed.tolist() == [1, 9, 8]
    np.testing.assert_allclose(drawn.factors.priority, [0.75, 6.75, 6])
    shared = {"num_domains": 2, "num_drawn": 3}
    assert drawn.domains.facts_of(0) == {"base": 1.0, "wait": 3, "rank": 2, "num_slots": 2, **shared}
    assert drawn.domains.facts_of(2) == {"base": 0.5, "wait": 8, "rank": 1, "num_slots": 1, **shared}
    assert drawn_by_signal(candidates, 3, rng(), of(phi=0.0)).domains is None
    assert drawn_by_signal(candidates.take(np.arange(4)), 3, rng(), of(phi=0.5)).domains is None  # one domain
    assert len(drawn_by_signal(candidates, 0, rng(), of()).indices) == 0


def test_with_the_posterior_baseline_the_base_of_a_domain_has_the_mean_chance_of_its_items():
    # Groups of one: S = 4 m (1 - m) N0 / (N0 + 1) * (N0 + 1) / N0. w0 = 0 counts as one episode of the domain's mean:
    # .5 + 4.5 of 10 and .5 + 8.5 of 10, so S is 1 and .36.
    context = Context(expected_D=np.full(2, 0.5), group_size=1)
    candidates = Candidates.of(
        3, domain=[0, 0, 1], elapsed=[1] * 3, visits=[1] * 3, cost=[2, 2, 1], history_sum=[4.5, 8.5, 8.5],
        history_count=[9] * 3, context=context,
    )  # fmt: skip
    domains = drawn_by_signal(candidates, 2, rng(), of(phi=1.0)).domains
    assert [domains.facts_of(d)["base"] for d in (0, 1)] == pytest.approx([(1 + 0.36) / 2 * 2 / 4, 0.36])


def test_the_domain_that_has_signal_comes_first_and_an_unlearnable_one_last():
    candidates = Candidates.of(3, domain=[0, 1, 2], elapsed=[1, 1, 1], visits=[1] * 3)
    context = Context(
        live_D=np.array([0.2, 0.8, 0.8]), unsolved_D=np.array([0, 0, 40]), solved_after_D=np.full(3, 4.0)
    )  # 0.2, 0.8, 0.8 * 4 / 36
    candidates = Candidates.of(3, domain=[0, 1, 2], elapsed=[1, 1, 1], visits=[1] * 3, context=context)
    assert signal(candidates, 3, rng(), of()).tolist() == [1, 0, 2]


def test_a_planners_classes_keep_the_statistics_of_their_domain():
    context = Context(live_D=np.array([0.2, 0.8]), wait_D=np.array([3.0, 4.0])).divided(3, 3)
    assert context.live_D.tolist() == [0.2] * 3 + [0.8] * 3 + [0.5] * 3
    assert context.wait_D.tolist() == [3] * 3 + [4] * 3 + [1] * 3


# --- the expected squared advantage ---------------------------------------------------------------


def exact_square(a: float, b: float, n: int) -> float:
    """Return 4 E[(r_1 - b_1)^2] by summing over all rewards of a group, p integrated out (Beta-binomial)."""

    def beta(x: float, y: float) -> float:
        return math.exp(math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y))

    total = 0.0
    for rewards in product((0, 1), repeat=n):
        k = sum(rewards)
        probability = beta(a + k, b + n - k) / beta(a, b)
        baseline = (a + sum(rewards[1:])) / (a + b + n - 1)
        total += probability * (rewards[0] - baseline) ** 2
    return 4 * total


@pytest.mark.parametrize("a, b", [(1.0, 1.0), (0.3, 1.7), (4.0, 0.5), (20.0, 20.0)])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_the_expected_squared_advantage_is_that_of_all_groups(a, b, n):
    want = exact_square(a, b, n)
    assert expected_square(np.array([a / (a + b)]), np.array([a + b]), n)[0] == pytest.approx(want, rel=1e-9)


def test_the_expected_squared_advantage_by_hand():
    # n = 1: 4 m (1 - m). n = 2, N0 = 2, m = .5: 4 * 1/4 * 2/3 * 4/3 = 8/9
    np.testing.assert_allclose(expected_square(np.array([0.5, 0.9]), np.array([2.0, 7.0]), 1), [1, 0.36])
    np.testing.assert_allclose(expected_square(np.array([0.5]), np.array([2.0]), 2), [8 / 9])


def test_with_the_posterior_baseline_uncertain_items_come_first():
    # w0 2, m_d .5: history 9 of 10 -> m = 10/12, 5 of 10 -> 6/12, none -> .5 with N0 = 2, n = 1
    context = Context(expected_D=np.array([0.5]), group_size=1, prior_weight=2.0)
    candidates = Candidates.of(
        3, elapsed=[4] * 3, visits=[1] * 3, history_sum=[9, 5, 0], history_count=[10, 10, 0], context=context
    )
    found = factors(candidates, 1.0, of().signal)
    np.testing.assert_allclose(found.chance, [4 * 10 / 12 * 2 / 12, 1, 1])
    silent = Candidates.of(1, num_silent=[8], elapsed=[4], visits=[1], context=context)
    np.testing.assert_allclose(factors(silent, 1.0, of().signal).chance, [1])  # silence is no reason to wait


# --- a twin, and laws -----------------------------------------------------------------------------


def twin(candidates: Candidates, num: int, own: SignalSettings) -> list[int]:
    """Return the draw without noise, in plain loops; ties go to the smallest index."""
    context = candidates.context
    known, n = len(context.live_D), context.group_size

    def statistic(name: str, domain: int, default: float) -> float:
        return float(getattr(context, name)[domain]) if domain < known else default

    def chance(i: int) -> float:
        domain = int(candidates.domain[i])
        if n:
            prior = context.prior_weight or 1.0
            episodes = prior + float(candidates.history_count[i])
            mean = (prior * statistic("expected_D", domain, 0.5) + float(candidates.history_sum[i])) / episodes
            return 4 * mean * (1 - mean) * episodes / (episodes + 1) * (episodes + n) / (episodes + n - 1)
        silent = min(8.0, float(candidates.num_silent[i]))
        return (own.kappa * statistic("live_D", domain, 0.5) + 1) / (own.kappa + 1 + silent)

    def live(domain: int) -> float:
        if not n:
            return statistic("live_D", domain, 0.5)
        return float(np.mean([chance(i) for i in range(len(candidates)) if candidates.domain[i] == domain]))

    def priority(i: int) -> float:
        domain = int(candidates.domain[i])
        scale = statistic("solved_after_D", domain, 4.0)
        elapsed = float(candidates.elapsed[i])
        if candidates.visits[i] == 0:
            elapsed = max(elapsed, len(candidates) / num)
        progress = 1 / (1 + max(0.0, float(candidates.num_unsolved[i]) - 2 * scale) / scale)
        return float(candidates.weight[i] / candidates.cost[i] * elapsed * chance(i) * progress)

    left = list(range(len(candidates)))
    waits = {d: statistic("wait_D", d, context.first_wait) for d in set(candidates.domain.tolist())}
    counts = Counter(candidates.domain.tolist())
    drawn = []
    for _ in range(min(num, len(candidates))):
        choices = left
        if own.phi > 0 and len(counts) > 1:
            value = {}
            for d in counts:
                mine = [i for i in range(len(candidates)) if candidates.domain[i] == d]
                if not set(mine) & set(left):
                    continue
                scale = statistic("solved_after_D", d, 4.0)
                progress = 1 / (1 + max(0.0, statistic("unsolved_D", d, 0.0) - 2 * scale) / scale)
                ratio = sum(candidates.weight[i] for i in mine) / sum(candidates.cost[i] for i in mine)
                value[d] = counts[d] ** (1 - own.phi) * live(d) * progress * ratio * waits[d]
            best = max(value, key=lambda d: value[d])
            choices = [i for i in left if candidates.domain[i] == best]
            waits = {d: 1.0 if d == best else wait + 1 for d, wait in waits.items()}
        chosen = max(choices, key=priority)
        drawn.append(chosen)
        left.remove(chosen)
    return drawn


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 40),
    num=st.integers(1, 45),
    kappa=st.floats(0, 10),
    phi=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    group_size=st.sampled_from([0, 1, 4]),
    prior_weight=st.sampled_from([0.0, 2.0]),
)
def test_the_rule_draws_as_its_twin(seed, size, num, kappa, phi, group_size, prior_weight):
    made = rng(seed)
    context = Context(
        live_D=made.random(2) + 0.01,
        expected_D=made.random(2),
        unsolved_D=made.integers(0, 40, 2).astype(float),
        solved_after_D=4 + made.random(2),
        icc_D=np.full(2, np.nan),
        wait_D=1 + 9 * made.random(2),
        first_wait=2 + made.random(),
        group_size=group_size,
        prior_weight=prior_weight,
    )
    episodes = 9 * made.random(size)
    candidates = Candidates.of(
        size,
        context=context,
        domain=made.integers(0, 4, size),
        elapsed=made.integers(1, 60, size),
        visits=made.integers(0, 3, size),
        num_silent=8 * made.random(size),
        num_unsolved=made.integers(0, 40, size),
        cost=made.random(size) + 0.1,
        weight=made.random(size) + 0.1,
        history_count=episodes,
        history_sum=episodes * made.random(size),
    )
    drawn = signal(candidates, num, rng(), of(kappa=kappa, phi=phi))
    assert drawn.tolist() == twin(candidates, num, of(kappa=kappa, phi=phi).signal)


@given(values=st.lists(st.integers(0, 5), min_size=1, max_size=30), num=st.integers(0, 30), seed=st.integers(0, 9))
def test_the_highest_are_those_of_a_sort(values, num, seed):
    num = min(num, len(values))
    found = highest(np.array(values, float), num, rng(seed), np.zeros(len(values))).tolist()
    assert [values[i] for i in found] == sorted(values, reverse=True)[:num]
    assert len(set(found)) == num


def test_ties_go_to_the_fewest_visits():
    visits = np.array([2, 1, 1, 2, 0])
    assert sorted(highest(np.ones(5), 3, rng(), visits).tolist()) == [1, 2, 4]
    assert highest(np.array([1.0, 1, 1, 2, 2]), 2, rng(), visits).tolist() == [4, 3]


def test_equal_items_come_oldest_first_and_each_once_a_pass():
    num_items, num_slots = 23, 4
    last, visits = np.full(num_items, 0), np.zeros(num_items, int)
    for now in range(1, 40):
        elapsed = np.where(visits == 0, now + 1, now - last)
        candidates = Candidates.of(num_items, elapsed=elapsed, visits=visits)
        drawn = signal(candidates, num_slots, rng(now), of())
        last[drawn], visits[drawn] = now, visits[drawn] + 1
        assert visits.max() - visits.min() <= 1


def test_noise_breaks_ties_and_moves_near_ones():
    candidates = Candidates.of(20, elapsed=np.full(20, 5), visits=np.ones(20, int))
    firsts = {int(signal(candidates, 1, rng(seed), of(noise=0.1))[0]) for seed in range(60)}
    assert len(firsts) > 10
    apart = Candidates.of(2, elapsed=[100, 10], visits=[1, 1])
    assert {int(signal(apart, 1, rng(seed), of(noise=0.1))[0]) for seed in range(60)} == {0}


def test_the_rule_keeps_the_contract_of_a_selection():
    candidates = Candidates.of(9, domain=[0, 1, 2] * 3, elapsed=np.arange(9), visits=np.ones(9, int))
    assert len(select("signal", candidates, 7, rng(), of()).indices) == 7
    assert len(select("signal", candidates, 99, rng(), of()).indices) == 9
    assert len(select("signal", Candidates.of(0), 3, rng(), of()).indices) == 0


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, message",
    [
        ({"kappa": -1}, r"kappa = -1; expected a number in \[0, 10\], or None"),
        ({"kappa": 11}, "kappa = 11; expected"),
        ({"kappa": "much"}, "kappa = 'much'; expected"),
        ({"phi": 1.1}, r"phi = 1.1; expected a number in \[0, 1\], or None"),
        ({"noise": None}, r"noise = None; expected a number in \[0, 10\]"),
        ({"weights": {"sums": 0}}, "weights = {'sums': 0}; expected weights above 0 by domain"),
        ({"weights": 3}, "weights = 3; expected weights above 0 by domain"),
        ({"temperature": 1.0}, "temperature = 1.0; expected a setting of signal"),
    ],
)
def test_parameters_out_of_range_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        make_settings("signal", given)


def test_kappa_belongs_to_the_first_rule_that_reads_it():
    both = make_settings("signal", {"kappa": 2.0}, beside=["exit"])
    assert (both.signal.kappa, both.kappa) == (2.0, 10.0)
    both = make_settings("exit", {"kappa": 20.0}, beside=["signal"])
    assert (both.signal.kappa, both.kappa) == (1.0, 20.0)
