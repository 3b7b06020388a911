"""Laws of a buffer in the long run: how often what is drawn, and are shares what they say."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from rllib_srl.replay.selection.rules import weighted
from tests.replay.frequencies import fits
from tests.replay.groups import a_buffer, a_group, a_prompt

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
