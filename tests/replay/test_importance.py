"""Importance weights of what is drawn for reuse: by hand, through a buffer, its actor and a restart."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay.actor import ReplayBufferActor
from rllib_srl.replay.selection.candidates import Candidates
from rllib_srl.replay.selection.rules import importance, make_settings
from rllib_srl.replay.selection.sampler import drawn_in
from rllib_srl.replay.settings import ReplaySettings
from tests.replay.groups import a_buffer, a_group

# fresh_per with alpha 1 and equal ages: P is in proportion to the mean reward, .25 and .5 and .75: 1/6, 2/6 and 3/6.
# Weights (N P) ** -beta by the largest: at beta 1 (1, 1/2, 1/3), at beta 1/2 their roots, at beta 0 all 1.
REWARDS = ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0))
BY_HAND = {1.0: [1, 1 / 2, 1 / 3], 0.5: [1, 2**-0.5, 3**-0.5], 0.0: [1, 1, 1]}


def given(beta, **more):
    config = {"per_alpha": 1.0, "per_beta": beta, "fresh_tau": 1e9}
    return {"reuse_selection": "fresh_per", "selection_config": config, **more}


def groups_of(now=1):
    return [a_group(place, now, place, rewards) for place, rewards in enumerate(REWARDS)]


@pytest.mark.parametrize("beta", BY_HAND)
def test_a_draw_carries_the_weights_of_its_groups(beta):
    buffer = a_buffer(**given(beta))
    buffer.add(groups_of(), 1)
    found = {int(one.group.prompt.prompt_id[1:]): one.meta.weight for one in buffer.draw(3, 2)}
    assert [found[index] for index in range(3)] == pytest.approx(BY_HAND[beta], rel=1e-5)
    # Fewer drawn weigh the same: the largest weight is that of all that could have been drawn.
    (one,) = buffer.draw(1, 3)
    assert one.meta.weight == pytest.approx(BY_HAND[beta][int(one.group.prompt.prompt_id[1:])], rel=1e-5)


@pytest.mark.parametrize("rule", ["srl", "uniform", "recent"])
def test_other_rules_weigh_everything_alike(rule):
    buffer = a_buffer(reuse_selection=rule)
    buffer.add(groups_of(), 1)
    assert [one.meta.weight for one in buffer.draw(3, 2, "2.sample")] == [1.0] * 3
    answer = buffer.ledger.journal.answer("2.sample")
    assert isinstance(answer, list) and drawn_in(answer)[1] == [1.0] * 3  # journals are what they were


def test_pier_weighs_by_its_own_exponent():
    """Never visited after insertion they would have priority 1; here failures come first, by pier's own formula."""
    weights = {}
    for beta in (0.0, 1.0):
        buffer = a_buffer(reuse_selection="pier", selection_config={"pier_beta": beta})
        buffer.add(groups_of(), 1)
        weights[beta] = sorted(one.meta.weight for one in buffer.draw(3, 2))
    assert weights[0.0] == [1.0] * 3
    assert weights[1.0][-1] == 1.0 and weights[1.0][0] < 0.9


def test_domains_that_have_quotas_keep_their_shares():
    """Inside a domain the weights undo the rule; between domains the quota is wanted. Rewards .2 .6 | .4 .4."""
    settings = make_settings("fresh_per", {"per_alpha": 1.0, "per_beta": 1.0, "fresh_tau": 1e9})
    candidates = Candidates.of(4, are_groups=True, reward=[0.2, 0.6, 0.4, 0.4], domain=[0, 0, 7, 7])
    drawn = np.array([3, 1, 0])
    by_domain = importance("fresh_per", candidates, drawn, settings, {0: 1.0, 7: 1.0})
    assert by_domain == pytest.approx([1, 1 / 3, 1], rel=1e-4)
    assert importance("fresh_per", candidates, drawn, settings) == pytest.approx([1 / 2, 1 / 3, 1], rel=1e-4)
    assert importance("fresh_per", candidates, drawn[:0], settings).shape == (0,)
    items = Candidates.of(4, reward=[0.2, 0.6, 0.4, 0.4])
    assert importance("fresh_per", items, drawn, settings).tolist() == [1, 1, 1]  # revisits are played anew


def test_weights_pass_through_the_actor_and_a_request_that_is_asked_twice():
    actor = ReplayBufferActor(ReplaySettings(capacity=50, admit=None, **given(1.0)))
    actor.add(groups_of(), 1, "1.add")
    metas, _ = actor.sample_apart(3, 2, "2.sample")
    weights = {int(meta.prompt.prompt_id[1:]): meta.weight for meta in metas}
    assert [weights[index] for index in range(3)] == pytest.approx(BY_HAND[1.0], rel=1e-5)
    again, _ = actor.sample_apart(3, 2, "2.sample")
    assert [meta.weight for meta in again] == [meta.weight for meta in metas]
    assert [meta.weight for meta in actor.sample(3, 2, "2.sample")] == [meta.weight for meta in metas]
    actor.close()


def test_a_restart_answers_with_the_same_weights(tmp_path):
    buffer = a_buffer(tmp_path, **given(1.0))
    buffer.add(groups_of(), 1, "1.add")
    first = [(one.group.group_id, one.meta.weight) for one in buffer.draw(2, 2, "2.sample")]
    buffer.close()
    buffer = a_buffer(tmp_path, **given(1.0))
    assert [(one.group.group_id, one.meta.weight) for one in buffer.draw(2, 2, "2.sample")] == first
    buffer.close()


def test_an_exponent_that_nothing_reads_is_refused():
    assert ReplaySettings(**given(1.0)).faults() == []
    (fault,) = ReplaySettings(selection="per", selection_config={"per_beta": 1.0}).faults()
    assert "per_beta weighs the loss of reused groups: expected reuse_selection = 'per' or 'fresh_per'" in fault
    (fault,) = ReplaySettings(selection="pier", selection_config={"pier_beta": 1.0}).faults()
    assert "expected reuse_selection = 'pier', not 'uniform'" in fault
    both = {"selection": "per", "reuse_selection": "pier"}
    assert ReplaySettings(**both, selection_config={"per_alpha": 1.0, "pier_beta": 0.5}).faults() == []
