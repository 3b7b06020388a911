"""The rules by hand, draws against exact probabilities, and the contract that every rule is held to."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.common.setting_model import Settings, setting
from rllib_srl.replay.selection.rules import (
    COLUMNS,
    EVICTIONS,
    PER,
    SELECTIONS,
    SRL,
    Candidates,
    apply,
    balanced,
    fifo,
    first,
    recent,
    uniform,
    weighted,
)
from rllib_srl.replay.settings import ReplaySettings
from tests.replay.frequencies import fits
from tests.replay.groups import a_buffer, a_group

GREEDY = SRL(temperature=0)
TIMES = 20_000  # draws


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def some(num: int, seed: int = 0, are_groups: bool = False) -> Candidates:
    """Return candidates whose every column varies."""
    rng = generator(seed)
    num_success = rng.integers(0, 9, num)
    floats = ("abs_advantage", "nll", "diversity", "retrievability", "posterior_mean")
    values = {
        "domain": rng.integers(0, 3, num),
        "pass_rate": num_success / 8,
        "reward": num_success / 8,
        "variance": num_success / 8 * (1 - num_success / 8),
        "overdue": rng.normal(size=num),
        "history_count": (count_N := rng.integers(0, 90, num)),
        "history_sum": count_N * rng.random(num),
        **{name: rng.random(num) for name in floats},
        **{name: rng.integers(0, 9, num) for name in ("age", "elapsed", "uses", "visits", "num_zero_variance")},
    }
    return Candidates(num, are_groups, 0.5, **values)


def test_due_items_come_first_by_lateness_learnability_and_diversity():
    # (1 + overdue)(1 + 3 * 4p(1 - p))(1 + .5 d):  2 * 1 * 1 = 2;  1 * 4 * 1 = 4;  1 * 4 * 1.5 = 6;  early; early
    columns = {"overdue": [1, 0, 0, -0.1, -0.5], "retrievability": [0.5, 0.5, 0.5, 0.95, 0.92]}
    columns |= {"posterior_mean": [1, 0.5, 0.5, 0.5, 0.5], "diversity": [0, 0, 1, 1, 1]}
    assert GREEDY(Candidates(5, diversity_coeff=0.5, **columns), 5, generator()).tolist() == [2, 1, 0, 4, 3]


def test_a_temperature_flattens_and_zero_takes_the_top():
    candidates = Candidates(2, overdue=[0, 3])  # priorities 1 : 4 (p = .5 in both)
    for temperature, expected in ((2.0, 2 / 3), (1.0, 4 / 5), (0.5, 16 / 17), (0.0, 1.0)):
        rule, rng = SRL(temperature=temperature), generator(4)
        assert np.mean([rule(candidates, 1, rng)[0] for _ in range(2000)]) == pytest.approx(expected, abs=0.05)


def test_rules_that_sort():
    assert fifo(Candidates(4, elapsed=[1, 5, 5, 0], seq=[0, 7, 3, 9]), 3, generator()).tolist() == [2, 1, 0]
    assert recent(Candidates(4, seq=[4, 9, 1, 7]), 3, generator()).tolist() == [1, 3, 0]
    assert first(3, generator(), np.array([1, 0, 1]), np.array([0, 9, -1])).tolist() == [1, 2, 0]
    drawn = [tuple(fifo(Candidates(10, seq=[0] * 10), 3, generator(s))) for s in range(20)]
    assert len(set(drawn)) > 10  # ties are broken by the generator


def test_high_reward_draws_uniformly_among_twice_as_many():
    """Rewards .9 .8 .5 .4 .1: two slots draw any two of the first four alike, one slot one of the first two."""
    candidates = Candidates(5, reward=[0.5, 0.9, 0.1, 0.8, 0.4])
    rule, rng = SELECTIONS["high_reward"], generator(3)
    pairs = Counter(tuple(sorted(rule(candidates, 2, rng).tolist())) for _ in range(6000))
    assert set(pairs) == set(itertools.combinations([0, 1, 3, 4], 2))
    assert min(pairs.values()) > 900 and max(pairs.values()) < 1100  # 1000 each, deviation 29
    assert sorted(rule(candidates, 5, rng)) == [0, 1, 2, 3, 4]
    assert {int(rule(candidates, 1, rng)[0]) for _ in range(50)} == {1, 3}


def test_balanced_gives_domains_equal_slots():
    candidates = Candidates(100, domain=[0] * 90 + [1] * 8 + [2] * 2)
    drawn = balanced(candidates, 12, generator())
    # 4 each; domain 2 has 2 and lends 2 to the others
    assert np.bincount(candidates.domain[drawn]).tolist() == [5, 5, 2]


@pytest.mark.parametrize(("rule", "columns", "expected"), [
    ("fifo", {"seq": [5, 2, 9, 3]}, [1, 3]),
    ("mastered_first", {"posterior_mean": [0.9, 0.2, 0.9, 0.3], "retrievability": [0.5, 1, 0.6, 1]}, [2, 0]),
    ("least_diverse", {"diversity": [0.4, 0.1, 0.3, 0.2]}, [1, 3]),
    ("largest_domain", {"domain": [7, 0, 7, 7], "seq": [5, 2, 9, 3]}, [3, 0]),
])  # fmt: skip
def test_evictions(rule, columns, expected):
    assert EVICTIONS[rule](Candidates(4, **columns), 2, generator()).tolist() == expected


def in_order(weights) -> dict[tuple[int, int], float]:
    """Return the probability of each ordered pair drawn without replacement: w_i / W * w_j / (W - w_i)."""
    total, numbers = sum(weights), range(len(weights))
    pairs = itertools.product(numbers, numbers)
    return {(i, j): weights[i] / total * weights[j] / (total - weights[i]) if i != j else 0.0 for i, j in pairs}


def agrees(draw, probabilities, times=TIMES) -> bool:
    """Return whether draws are as frequent as they should be; `draw` returns indices."""
    counts = Counter(tuple(draw().tolist()) for _ in range(times))
    assert set(counts) <= set(probabilities)
    return fits(np.array([counts[key] for key in probabilities]), np.array(list(probabilities.values())))


def test_pairs_are_drawn_in_proportion_to_what_is_left():
    rng, candidates = generator(7), Candidates(5)
    assert agrees(lambda: weighted(np.log([1.0, 2.0, 5.0]), 2, rng), in_order([1.0, 2.0, 5.0]))
    assert agrees(lambda: uniform(candidates, 2, rng), in_order([1.0] * 5))
    assert not agrees(lambda: uniform(candidates, 2, rng), in_order([1.0] * 4 + [1.25]))


def test_balanced_draws_a_domain_and_then_one_of_its_candidates():
    rng, candidates = generator(8), Candidates(6, domain=[0, 0, 0, 0, 5, 5])
    assert agrees(lambda: balanced(candidates, 1, rng), {(i,): 1 / 8 if i < 4 else 1 / 4 for i in range(6)}, 4000)
    pairs = {pair: 1 / 16 for i in range(4) for j in (4, 5) for pair in ((i, j), (j, i))}
    assert agrees(lambda: balanced(candidates, 2, rng), pairs, 4000)


def naive_weight(rule, row) -> float:
    """Return the weight of one candidate as the documentation of its rule says."""
    if isinstance(rule, PER):
        return (abs(row[rule.by]) + 1e-6) ** rule.alpha
    diverse = 1 + 0.5 * row["diversity"]
    if row["are_groups"]:
        return (0.01 + 4 * row["variance"]) * diverse * math.exp(-row["age"] / 16) / (1 + row["uses"])
    if row["overdue"] < 0:
        return 0.0
    p = row["posterior_mean"]
    return (1 + row["overdue"]) * (1 + 12 * p * (1 - p)) * diverse


@pytest.mark.parametrize("are_groups", [False, True])
@pytest.mark.parametrize("rule", [SRL(), PER(), PER(by="reward", alpha=1.0)])
def test_priorities_agree_with_a_naive_twin(rule, are_groups):
    candidates = some(8, 5, are_groups)
    rows = [{name: getattr(candidates, name)[n] for name in COLUMNS} | {"are_groups": are_groups} for n in range(8)]
    weights = np.array([naive_weight(rule, row) for row in rows])
    rng, single = generator(1), dict.fromkeys(((n,) for n in range(8)), 0.0)
    single |= {(n,): weight / weights.sum() for n, weight in enumerate(weights.tolist())}
    assert agrees(lambda: rule(candidates, 1, rng), single)
    if isinstance(rule, SRL):  # the priority itself, where it decides
        decided = weights > 0
        np.testing.assert_allclose(np.exp(rule.log_priority(candidates))[decided], weights[decided])
    else:
        np.testing.assert_allclose(np.exp(rule.log_weight(candidates)), weights)


def test_weights_of_zero_fill_at_random_and_bad_ones_are_named():
    log_weight = np.array([-np.inf, 0, -np.inf, -np.inf])
    drawn = [weighted(log_weight, 3, generator(seed)).tolist() for seed in range(30)]
    assert all(each[0] == 1 and len(set(each)) == 3 for each in drawn)
    assert len({tuple(each) for each in drawn}) > 3
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="expected finite numbers or -inf"):
            weighted(np.array([0, bad]), 1, generator())


RULES = [(table, name) for table in (SELECTIONS, EVICTIONS) for name in table.own]


@pytest.mark.parametrize(("table", "name"), RULES, ids=[name for _, name in RULES])
@settings(max_examples=15)
@given(num=st.integers(0, 14), num_candidates=st.integers(0, 12), seed=st.integers(0, 99), are_groups=st.booleans())
def test_a_batch_is_full_distinct_and_seeded(table, name, num, num_candidates, seed, are_groups):
    candidates, rule = some(num_candidates, seed, are_groups), table.make(name, {})
    draws = [apply(name, rule, candidates, num, generator(seed)) for _ in range(2)]
    assert len(draws[0]) == len(np.unique(draws[0])) == min(num, num_candidates)
    assert set(draws[0]) <= set(range(num_candidates))
    np.testing.assert_array_equal(draws[0], draws[1])


def test_a_users_rule_is_held_to_the_contract():
    def mine(candidates, num, generator):
        return np.zeros(num, int)

    error = "selection 'mine' returned 3 indices, 1 of them distinct; expected at most 3 distinct ones below 5"
    with pytest.raises(ValueError, match=error):
        apply("selection 'mine'", mine, Candidates(5), 3, generator())
    assert apply("selection 'mine'", mine, Candidates(5), 1, generator()).tolist() == [0]
    for wrong in ([0, 1, 2, 3], [5], [-1], [0.5]):
        with pytest.raises(ValueError, match="expected at most 3 distinct ones below 5"):
            apply("selection 'mine'", lambda *_, wrong=wrong: wrong, Candidates(5), 3, generator())


def unsolved(candidates, num, generator):
    """Draw what earned less than half: a rule that leaves candidates out."""
    left = np.flatnonzero(candidates.reward < 0.5)
    return left[uniform(candidates.take(left), num, generator)]


def test_a_rule_that_leaves_candidates_out_draws_fewer():
    path, rewards = f"{__name__}:unsolved", ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0))
    buffer = a_buffer(selection=path, reuse_selection=path)
    buffer.add([a_group(i, 1, i, rewards[i % 2]) for i in range(12)], 1)
    assert {prompt.prompt_id for prompt in buffer.draw_prompts(9, 2)} == {f"p{i}" for i in range(0, 12, 2)}
    assert len(buffer.draw_prompts(4, 3)) == 4
    assert {one.prompt.prompt_id for one in buffer.draw_groups(9, 4)} == {f"p{i}" for i in range(0, 12, 2)}
    full = a_buffer(eviction=path, capacity=4)
    with pytest.raises(ValueError, match="eviction '.*unsolved' returned no item; expected at least one"):
        full.add([a_group(i, 1, i, rewards[1]) for i in range(5)], 1)
    assert len(full) == 0


class Newest(Settings):
    """A rule of a user: the newest candidates, without the first `skipped` of them."""

    skipped: int = setting(0, "candidates that are passed over")

    def __call__(self, candidates, num, generator):
        return np.roll(np.argsort(-candidates.seq), -self.skipped)[:num]


def test_a_rule_of_a_user_has_parameters():
    path = f"{__name__}:Newest"
    values = {"selection": path, "selection_config": {"skipped": 2}, "admit": None}
    buffer = a_buffer(**values)
    buffer.add([a_group(i, 1, i) for i in range(6)], 1)
    assert [prompt.prompt_id for prompt in buffer.draw_prompts(2, 2)] == ["p3", "p2"]
    (error,) = ReplaySettings.errors({**values, "selection_config": {"skiped": 2}})
    assert "has no parameters ['skiped']; expected some of skipped" in error


def test_no_due_item_starves_under_greedy():
    overdue_since, visits, rng = np.zeros(20), np.zeros(20, int), generator(12)
    recall = np.where(np.arange(20) < 4, 0.5, 1.0)  # four are worth four times the others
    for now in range(200):
        index = GREEDY(Candidates(20, overdue=now - overdue_since, posterior_mean=recall), 1, rng)[0]
        visits[index] += 1
        overdue_since[index] = now + 1
    assert visits.min() >= 2
    assert visits[:4].min() > visits[4:].max()
