"""Laws of a buffer in the long run: how often what is drawn, and are shares what they say."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from rllib_srl.replay.selection.quotas import Slots
from rllib_srl.replay.selection.rules import weighted
from tests.replay.frequencies import fits
from tests.replay.groups import a_buffer, a_group, a_prompt, drawn_groups

# --- frequencies ----------------------------------------------------------------------------------


def filled(num, **given):
    """Return a buffer of `num` items of different pass rates and scores, all due."""
    buffer = a_buffer(**given)
    groups = [a_group(a_prompt(i, "ab"[i % 2]), 1, i, [1.0] * (i + 1) + [0.0] * (8 - i)) for i in range(num)]
    buffer.add(groups, 1)
    return buffer


def by_learnability(candidates, num, generator):
    """Draw in proportion to p (1 - p): a rule of a user."""
    return weighted(np.log(candidates.pass_rate * (1 - candidates.pass_rate)), num, generator)


RULES = {"uniform": "uniform", "learnability": f"{__name__}:by_learnability"}
WEIGHTS = {"uniform": lambda p_N: np.ones(len(p_N)), "learnability": lambda p_N: p_N * (1 - p_N)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["items", "groups"])
@pytest.mark.parametrize("rule", WEIGHTS)
def test_draws_are_as_frequent_as_they_should_be(rule, kind):
    # Without replacement, in order: P(i, j, ...) = w_i/W w_j/(W - w_i) ...; 25,000 draws of items, as many of groups.
    num, size, times = 5, 4, 6_250
    buffer = filled(num, selection=RULES[rule], reuse_selection=RULES[rule])
    draw, table = getattr(buffer.draws, kind), buffer.tables.items if kind == "items" else buffer.tables.groups
    p_N = np.array([(i + 1) / 9 for i in range(num)])
    assert [float(rate) for rate in buffer.tables.items["pass_rate"][:num]] == pytest.approx(p_N.tolist())
    weight_N = WEIGHTS[rule](p_N)
    probabilities = {}
    for order in itertools.permutations(range(num), size):
        left, chance = weight_N.sum(), 1.0
        for i in order:
            chance *= weight_N[i] / left
            left -= weight_N[i]
        probabilities[order] = chance
    generator, counts = np.random.default_rng(5), Counter()
    for _ in range(times):
        drawn = draw(size, 30, generator)
        counts[tuple(table["seq"][drawn if kind == "items" else drawn[0]].tolist())] += 1
    assert counts.total() == times and set(counts) <= set(probabilities)
    assert fits(np.array([counts[order] for order in probabilities]), np.array(list(probabilities.values())))


def test_the_same_counts_do_not_fit_another_rule():
    # The bar of the test above tells rules apart with far fewer draws.
    buffer = filled(5, selection=RULES["learnability"])
    drawn = [int(buffer.draws.items(1, 30, np.random.default_rng(i))[0]) for i in range(1000)]
    assert not fits(np.bincount(drawn, minlength=5), np.full(5, 0.2))


@pytest.mark.parametrize("quotas, share", [({"a": 3.0, "b": 1.0}, 0.75), ("equal", 0.5), ({"b": 1.0}, 0.0)])
def test_domains_have_exactly_their_quota_in_the_long_run(quotas, share):
    buffer = filled(8, domain_quotas=quotas, capacity=64)
    generator, num_a = np.random.default_rng(0), 0
    for _ in range(300):
        drawn = buffer.draws.items(3, 60, generator)
        num_a += int((buffer.tables.items["domain"][drawn] == 0).sum())
    assert abs(num_a - 300 * 3 * share) <= 1  # what rounding owes is carried, so the total is exact


@pytest.mark.slow
def test_a_share_of_a_fifth_of_four_is_a_fifth_in_the_long_run():
    # int(4 * 0.2) = 0: the source never replayed at all.
    buffer = filled(8, max_uses=10_000, max_age=10_000, capacity=64)
    revisits, reuses, num_due, num_reused, num_played = Slots(0.2), Slots(0.2, is_added=True), 0, 0, 0
    for now in range(3, 403):
        prompts = buffer.draw_prompts(revisits.owed(4), now)
        num_due += len(prompts)
        num_played += 4
        if prompts:
            buffer.add([a_group(p, now, i, (1.0, 0.0)) for i, p in enumerate(prompts)], now)
        num_reused += len(drawn_groups(buffer, reuses.owed(4), now)) if now % 5 == 0 else reuses.owed(4)
    assert num_due / num_played == pytest.approx(0.2, rel=0.01)
    assert num_reused / (num_played + num_reused) == pytest.approx(0.2, rel=0.01)
