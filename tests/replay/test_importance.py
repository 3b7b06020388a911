"""Loss weights of what is drawn for reuse: by hand, through a buffer, its actor and a restart."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay.selection.rules import PER, Candidates
from tests.replay.groups import a_buffer, a_group

# per by reward with alpha 1: P is in proportion to the mean reward, .25 and .5 and .75: 1/6, 2/6 and 3/6.
# Weights (N P) ** -beta by the largest: at beta 1 (1, 1/2, 1/3), at beta 1/2 their roots, at beta 0 all 1.
REWARDS = ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0))
BY_HAND = {1.0: [1, 1 / 2, 1 / 3], 0.5: [1, 2**-0.5, 3**-0.5], 0.0: [1, 1, 1]}


def given(beta):
    return {"reuse_selection": "per", "reuse_selection_config": {"by": "reward", "alpha": 1.0, "beta": beta}}


def groups_of(now=1):
    return [a_group(place, now, place, rewards) for place, rewards in enumerate(REWARDS)]


def test_importance_weights_by_hand():
    # alpha 1: P = .1 .2 .7 (of 1e-6 accuracy); w = (P / .1) ** -.4
    candidates = Candidates(3, are_groups=True, abs_advantage=[0.1, 0.2, 0.7])
    weights = PER(alpha=1.0).loss_weights(candidates, np.array([2, 0]))
    np.testing.assert_allclose(weights, [7**-0.4, 1], rtol=1e-4)
    assert PER(alpha=1.0, beta=0.0).loss_weights(candidates, np.array([2])).tolist() == [1]


@pytest.mark.parametrize("beta", BY_HAND)
def test_a_draw_carries_the_weights_of_its_groups(beta):
    buffer = a_buffer(**given(beta))
    buffer.add(groups_of(), 1)
    found = {int(one.group.prompt.prompt_id[1:]): one.meta.weight for one in buffer.draw_groups(3, 2)}
    assert [found[index] for index in range(3)] == pytest.approx(BY_HAND[beta], rel=1e-5)
    # Fewer drawn weigh the same: the largest weight is that of all that could have been drawn.
    (one,) = buffer.draw_groups(1, 3)
    assert one.meta.weight == pytest.approx(BY_HAND[beta][int(one.group.prompt.prompt_id[1:])], rel=1e-5)
