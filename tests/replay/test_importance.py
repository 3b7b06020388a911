"""Loss weights of what is drawn for reuse: by hand, through a buffer, its actor and a restart."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay.rllib import RLlibReplayBuffer
from rllib_srl.replay.selection.rules import PER, SELECTIONS, Candidates, apply
from rllib_srl.replay.settings import ReplaySettings
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


def test_importance_weights_undo_the_draw_at_beta_one():
    # E[w f] = sum P w f is proportional to the plain sum of f
    candidates = Candidates(4, are_groups=True, abs_advantage=[0.1, 0.5, 1, 2])
    probability_N = (candidates.abs_advantage + 1e-6) ** 0.6
    product_N = probability_N * PER(beta=1.0).loss_weights(candidates, np.arange(4))
    np.testing.assert_allclose(product_N, product_N[0])


@pytest.mark.parametrize("beta", BY_HAND)
def test_a_draw_carries_the_weights_of_its_groups(beta):
    buffer = a_buffer(**given(beta))
    buffer.add(groups_of(), 1)
    found = {int(one.group.prompt.prompt_id[1:]): one.meta.weight for one in buffer.draw_groups(3, 2)}
    assert [found[index] for index in range(3)] == pytest.approx(BY_HAND[beta], rel=1e-5)
    # Fewer drawn weigh the same: the largest weight is that of all that could have been drawn.
    (one,) = buffer.draw_groups(1, 3)
    assert one.meta.weight == pytest.approx(BY_HAND[beta][int(one.group.prompt.prompt_id[1:])], rel=1e-5)


def test_quotas_of_domains_are_not_corrected():
    """Inside a domain the weights undo the rule; between domains the quota is wanted. Rewards .2 .6 | .4 .4."""
    rule = PER(by="reward", alpha=1.0, beta=1.0)

    def weights(rule, nums=None, are_groups=True):
        candidates = Candidates(4, are_groups=are_groups, reward=[0.2, 0.6, 0.4, 0.4], domain=[0, 0, 7, 7])
        indices, weight_N = apply("per", rule, candidates, 4, np.random.default_rng(0), nums)
        return weight_N[np.argsort(indices)].tolist()

    assert weights(rule, {0: 2, 7: 2}) == pytest.approx([1, 1 / 3, 1, 1], rel=1e-4)
    assert weights(rule) == pytest.approx([1, 1 / 3, 1 / 2, 1 / 2], rel=1e-4)
    assert weights(rule, are_groups=False) == [1, 1, 1, 1]  # revisits are played anew
    assert weights(SELECTIONS.make("uniform", {})) == [1, 1, 1, 1]


def test_weights_pass_through_the_actor_and_a_request_that_is_asked_twice():
    actor = RLlibReplayBuffer(ReplaySettings(capacity=50, admit=None, **given(1.0)))
    actor.add(groups_of(), 1, "1.add")
    metas, _ = actor.draw_apart("draw_groups", 3, 2, "2.draw_groups")
    weights = {int(meta.prompt.prompt_id[1:]): meta.weight for meta in metas}
    assert [weights[index] for index in range(3)] == pytest.approx(BY_HAND[1.0], rel=1e-5)
    again, _ = actor.draw_apart("draw_groups", 3, 2, "2.draw_groups")
    assert [meta.weight for meta in again] == [meta.weight for meta in metas]
    actor.close()


def test_a_restart_answers_with_the_same_weights(tmp_path):
    buffer = a_buffer(tmp_path, **given(1.0))
    buffer.add(groups_of(), 1, "1.add")
    first = [(one.group.group_id, one.meta.weight) for one in buffer.draw_groups(2, 2, "2.draw_groups")]
    buffer.close()
    buffer = a_buffer(tmp_path, **given(1.0))
    assert [(one.group.group_id, one.meta.weight) for one in buffer.draw_groups(2, 2, "2.draw_groups")] == first
    buffer.close()
