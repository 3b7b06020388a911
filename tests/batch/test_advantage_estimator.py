"""Whom an episode is compared with, before any sharding: shaping, recalibration, rescue, filters and scales by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.batch.advantage_estimator import AdvantageEstimator
from rllib_srl.batch.loss_weights import token_scales
from rllib_srl.batch.mixing import PartRef, is_dead, part_meta, part_of
from rllib_srl.batch.shaping import overlong, ramp, tool_reward
from rllib_srl.batch.shard import build_shards, fetched
from rllib_srl.losses import LossSettings
from rllib_srl.types import GroupMeta, ListedRef, Prompt
from tests.small_learner import GROUPS, make_group


def meta_of(rewards, key="a", origin="fresh", lengths=None, turns=None):
    """Describe a group of so many tokens an episode, that lies nowhere."""
    num = len(rewards)
    lengths = np.array(lengths if lengths is not None else [4] * num)
    group = replace(make_group(5, 3, lengths.tolist()), prompt=Prompt("world", key), group_id=f"{origin}.{key}")
    meta = GroupMeta.of(replace(group, rewards_G=np.array(rewards, np.float32)), group)
    return replace(meta, origin=origin, num_turns_G=np.array(turns if turns is not None else [1] * num))


def compare(groups, reused=(), stored=None, comparison=None, bonuses=None, kl=None, **given):
    comparison = comparison or AdvantageEstimator(LossSettings.made(**given), 0.9, seed=1)
    rewards = comparison.shaped_rewards(groups, now=1)
    bonuses = bonuses or [()] * len(groups)
    return comparison.estimate(groups, rewards, kl, bonuses, list(reused), stored or {})


def as_lists(arrays):
    return [pytest.approx(a.tolist(), abs=1e-6) for a in arrays]


# --- shaping ----------------------------------------------------------------------------------------------------


def test_the_length_penalty_is_that_of_dapo():
    """20,480 tokens with a cache of 4,096: 0, -.25, -.5, -1, and no more beyond."""
    num_tokens = np.array([100, 16384, 17408, 18432, 20480, 30000])
    np.testing.assert_allclose(overlong(num_tokens, 20480, 0.2, 1.0), [0, 0, -0.25, -0.5, -1, -1])
    np.testing.assert_allclose(overlong(num_tokens, 20480, 0.2, 0.5), [0, 0, -0.125, -0.25, -0.5, -0.5])


def test_the_ramp_is_that_of_spear():
    """T = 200 at 0, 50, 100, 150, 200: 0, .1464, .5, .8536, 1; the first iteration is 1."""
    assert [ramp(1 + t, 200) for t in (0, 50, 100, 150, 200, 900)] == pytest.approx(
        [0, 0.146447, 0.5, 0.853553, 1, 1], abs=1e-6
    )
    assert ramp(1, 0) == 1.0


def test_the_tool_reward_decays_to_nothing():
    calls = np.array([0, 1, 3, 20])
    np.testing.assert_allclose(tool_reward(calls, 0.1, 1, 200), [0, 0.1, 0.3, 1])  # 20 calls together at most 1
    np.testing.assert_allclose(tool_reward(calls, 0.1, 101, 200), [0, 0.05, 0.15, 0.5])
    np.testing.assert_allclose(tool_reward(calls, 0.1, 201, 200), [0, 0, 0, 0], atol=1e-12)


def test_shaped_rewards_see_lengths_and_turns():
    group = meta_of([1, 1, 0], lengths=[8, 10, 4], turns=[3, 1, 2])
    settings = {"longest_answer": 10, "overlong_penalty": 1.0, "overlong_share": 0.5, "tool_reward": 0.1}
    (rewards_G,) = AdvantageEstimator(LossSettings.made(**settings), 0.9, 1).shaped_rewards([group], now=1)
    # lengths 8, 10, 4 with a cache of 5: -.6, -1, 0; calls 2, 0, 1
    np.testing.assert_allclose(rewards_G, [1 - 0.6 + 0.2, 1 - 1, 0.1])
    assert AdvantageEstimator(LossSettings.made(), 0.9, 1).shaped_rewards([group], 1)[0].tolist() == [1, 1, 0]


def test_turns_are_runs_of_written_tokens():
    group = make_group(1, 4, [5, 3])
    mask_N = group.loss_mask_N.copy()
    mask_N[np.flatnonzero(mask_N)[[1, 3]]] = False  # 1 0 1 0 1 | 1 1 1
    assert replace(group, loss_mask_N=mask_N).num_turns_G().tolist() == [3, 1]
    assert replace(group, loss_mask_N=np.zeros_like(mask_N)).num_turns_G().tolist() == [0, 0]


# --- advantages -------------------------------------------------------------------------------------------------


def test_groups_without_signal_are_left_out_unless_the_rule_looks_beyond_them():
    groups = [meta_of([1, 0], "a"), meta_of([1, 1], "b")]
    compared = compare(groups, advantage="mean_only")
    assert [g.prompt.prompt_id for g in compared.groups] == ["a"]
    assert [a.tolist() for a in compared.played] == [[0.5, -0.5], [0, 0]]
    beyond = compare(groups, advantage="gae")
    assert [a.tolist() for a in beyond.advantages] == [[1, 0], [1, 1]]


def test_recalibration_remembers_group_means_and_is_saved():
    comparison = AdvantageEstimator(LossSettings.made(advantage="recalibrated", recalibration_window=3), 0.9, seed=1)
    first = compare([meta_of([1, 0], "a"), meta_of([0, 0], "b")], comparison=comparison)
    assert [a.tolist() for a in first.advantages] == [[0.75, -0.25], [-0.25, -0.25]]  # median of .5 and 0
    state = comparison.get_state()
    second = compare([meta_of([1, 1], "c"), meta_of([1, 1], "d")], comparison=comparison)
    assert [a.tolist() for a in second.advantages] == [[0, 0], [0, 0]]  # of 0, 1, 1: the oldest has left
    again = AdvantageEstimator(comparison.settings, 0.9, seed=2)
    again.set_state(state)
    repeated = compare([meta_of([1, 1], "c"), meta_of([1, 1], "d")], comparison=again)
    assert [a.tolist() for a in repeated.advantages] == [a.tolist() for a in second.advantages]
    assert again.get_state() == comparison.get_state()


def test_the_median_is_of_group_means_not_of_rewards():
    # means 1, 1, .1: median 1; of all rewards it would be 0
    groups = [meta_of([1, 1], "a"), meta_of([1, 1], "b"), meta_of([1, *[0] * 9], "c")]
    assert compare(groups, advantage="recalibrated").played[0].tolist() == [0, 0]


def test_the_kl_is_taken_off_but_decides_nothing():
    groups = [meta_of([1, 0], "a"), meta_of([1, 1], "b")]
    compared = compare(groups, advantage="mean_only", kl=[np.array([0.5, 0.0]), np.array([0.1, 0.0])])
    assert [g.prompt.prompt_id for g in compared.groups] == ["a"]
    assert compared.advantages[0].tolist() == [0.25, -0.25]


def test_a_bonus_multiplies():
    compared = compare([meta_of([1, 0], "a")], advantage="mean_only", bonuses=[(2.0, 0.5)])
    assert compared.advantages[0].tolist() == [1.0, -0.25]


def test_reused_groups_are_compared_apart_and_by_their_own_rule():
    reused = [meta_of([1, 0, 0, 0], "r", "reuse"), meta_of([0, 0], "s", "reuse")]
    compared = compare([meta_of([1, 0], "a")], reused, advantage="mean_only")
    assert [a.tolist() for a in compared.advantages] == [[0.5, -0.5], [0.75, -0.25, -0.25, -0.25]]
    apart = compare([meta_of([1, 0], "a")], reused, advantage="mean_only", reuse_advantage="recalibrated")
    assert [a.tolist() for a in apart.advantages[1:]] == [[0.5, -0.5, -0.5, -0.5], [-0.5, -0.5]]  # less median .5


def test_the_positivity_filter_keeps_episodes_above_the_baseline():
    reused = [meta_of([1, 0, 0.4, 1], "r", "reuse"), meta_of([0.1, 0], "s", "reuse")]
    compared = compare([meta_of([1, 0], "a")], reused, reuse_advantage="recalibrated", reuse_positive_only=True)
    (_, part), (_, advantage_G) = compared.groups, compared.advantages
    assert part.ref.episodes == (0, 3) and advantage_G.tolist() == [0.5, 0.5]
    assert part.rewards_G.tolist() == [1, 1] and part.origin == "reuse"
    assert compared.counts["num_episodes_not_positive"] == 4


# --- rescue -----------------------------------------------------------------------------------------------------

KEY = Prompt("world", "a").key
STORED = {KEY: meta_of([0, 1, 0.2, 1], "a", "reuse")}
DEAD = meta_of([0, 0], "a")



@pytest.mark.parametrize(
    "rewards, expected",
    [([0, 0, 0], True), ([0.2, 0.2], False), ([0, 0.2], False), ([0.15, 0.16], True), ([1, 1], False)],
)
def test_a_dead_group_is_arpos(rewards, expected):
    assert is_dead(np.array(rewards)) is expected


def test_arpo_replaces_one_episode_of_a_dead_group():
    groups = [meta_of([0, 0, 0, 0], "a"), meta_of([0, 0], "b")]
    compared = compare(groups, stored=STORED, rescue="arpo", advantage="mean_only")
    kept, joined = compared.groups
    assert kept.ref.episodes == (1, 2, 3) and kept.origin == "fresh"
    assert joined.origin == "rescue" and joined.ref.episodes in ((1,), (3,)) and joined.rewards_G.tolist() == [1]
    # 0 0 0 | 1: mean .25
    assert [a.tolist() for a in compared.advantages] == [[-0.25] * 3, [0.75]]
    assert [a.tolist() for a in compared.played] == [[0, -0.25, -0.25, -0.25], [0, 0]]
    assert (compared.counts["num_groups_rescued"], compared.counts["num_episodes_rescued"]) == (1, 1)


def test_arpo_leaves_a_group_alone_that_lives_or_has_no_success_stored():
    for group, stored in ((meta_of([1, 0], "a"), STORED), (DEAD, {}), (meta_of([0, 0], "b"), STORED)):
        assert compare([group], stored=stored, rescue="arpo").counts["num_groups_rescued"] == 0
    failures = {KEY: meta_of([0, 0.5], "a", "reuse")}
    assert compare([DEAD], stored=failures, rescue="arpo").groups == []
    assert compare([DEAD], stored=STORED).groups == []  # without rescue
    assert len(compare([DEAD], stored=STORED, rescue="arpo").groups) == 2


def test_rlep_adds_successes_to_any_group():
    living = {"stored": STORED, "rescue": "rlep", "advantage": "mean_only"}
    compared = compare([meta_of([1, 0, 0], "a")], **living, rescue_episodes=2)
    assert compared.groups[1].ref.episodes == (1, 3)
    assert not isinstance(compared.groups[0].ref, PartRef)  # it stays whole
    # 1 0 0 | 1 1: mean .6
    assert as_lists(compared.advantages) == [[0.4, -0.6, -0.6], [0.4, 0.4]]
    assert compare([meta_of([1, 0], "a")], **living, rescue_episodes=1).counts == {
        "num_groups_unsurprising": 0,
        "num_groups_rescued": 1,
        "num_episodes_rescued": 1,
        "num_episodes_not_positive": 0,
    }


def test_successes_are_drawn_evenly():
    comparison = AdvantageEstimator(LossSettings.made(rescue="arpo"), 0.9, seed=1)
    drawn = [compare([DEAD], stored=STORED, comparison=comparison).groups[1] for _ in range(400)]
    assert sum(one.ref.episodes == (1,) for one in drawn) == pytest.approx(200, abs=40)  # 4 deviations


# --- parts of groups ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.sets(st.integers(0, 4), min_size=1))
def test_a_part_is_what_its_meta_says(chosen):
    group, episodes = GROUPS[2], sorted(chosen)
    part, meta = part_of(group, episodes), part_meta(GroupMeta.of(group, group), episodes)
    part.check_valid()
    assert [part.stream(i).tolist() for i in range(part.size)] == [group.stream(g).tolist() for g in episodes]
    again = GroupMeta.of(part, group)
    for name in ("rewards_G", "lengths_G", "num_loss_tokens_G", "versions_G2", "num_turns_G"):
        np.testing.assert_array_equal(getattr(again, name), getattr(meta, name))


def test_parts_are_cut_out_where_they_are_fetched(ray_here):
    shared = ray_here.put(GROUPS)
    refs = [PartRef(ListedRef(shared, 2), (1, 4)), ListedRef(shared, 0), PartRef(GROUPS[0], (2,))]
    one, two, three = fetched(refs, 30)
    assert [one.stream(0).tolist(), one.stream(1).tolist()] == [GROUPS[2].stream(g).tolist() for g in (1, 4)]
    assert two.size == 3 and three.stream(0).tolist() == GROUPS[0].stream(2).tolist()


# --- scales -------------------------------------------------------------------------------------------------------

TOKENS = [np.array([2, 4]), np.array([1, 0]), np.array([5, 5])]  # the last is reused; one wrote nothing


@pytest.mark.parametrize(
    "rule, normalisation, expected",
    [
        ("token_mean", "split", [1 / 7, 1 / 7, 0.5 / 10]),
        ("token_mean", "joint", [1 / 17, 1 / 17, 0.5 / 17]),
        ("sequence_mean", "split", [[1 / 6, 1 / 12], [1 / 3, 1 / 3], [0.05, 0.05]]),
        ("sequence_mean", "joint", [[0.1, 0.05], [0.2, 0.2], [0.02, 0.02]]),
        ("constant", "split", [1 / 24, 1 / 24, 0.5 / 16]),
        ("constant", "joint", [1 / 40, 1 / 40, 0.5 / 40]),
    ],
)
def test_scales_by_hand(rule, normalisation, expected):
    scales = token_scales(TOKENS, [False, False, True], rule, 8, 0.5, normalisation)
    for scale, wanted in zip(scales, expected, strict=True):
        np.testing.assert_allclose(scale, wanted)


def test_golden_means_of_the_three_aggregations():
    """Token losses of the fixture, symmetric clip: -.113146, .233333, .0875 with L = 8."""
    losses = [np.array([-1.2, -1.105171]), np.array([1.105171, 0.8, 0.8, 1.0])]
    for rule, wanted in (("sequence_mean", -0.113146), ("token_mean", 0.233333), ("constant", 0.0875)):
        (scale,) = token_scales([np.array([2, 4])], [False], rule, 8)
        scale_G = np.broadcast_to(scale, 2)
        assert sum(s * one.sum() for s, one in zip(scale_G, losses, strict=True)) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("rule", ["token_mean", "sequence_mean", "constant"])
@given(num_shards=st.integers(1, 4), seed=st.integers(0, 99))
def test_shards_and_order_leave_every_scale_as_it_is(rule, num_shards, seed):
    groups = [replace(GroupMeta.of(g, g), origin="reuse" if i == 2 else "fresh") for i, g in enumerate(GROUPS)]
    order = np.random.default_rng(seed).permutation(3)
    advantages = [np.zeros(g.size) for g in GROUPS]
    shards = build_shards(
        [groups[i] for i in order], [advantages[i] for i in order], num_shards, 30, 0.5, rule, 32, "split"
    )
    found = {ref.group_id: scale for shard in shards for ref, scale in zip(shard.group_refs, shard.scales, strict=True)}
    wanted = token_scales([g.num_loss_tokens_G for g in groups], [False, False, True], rule, 32, 0.5, "split")
    for group, scale in zip(groups, wanted, strict=True):
        np.testing.assert_allclose(found[group.group_id], scale)


def test_rescued_episodes_weigh_as_played_ones_and_train_as_stored_ones():
    origins = ("fresh", "rescue", "reuse")
    metas = [replace(GroupMeta.of(g, g), origin=origin) for g, origin in zip(GROUPS, origins, strict=True)]
    (shard,) = build_shards(metas, [np.zeros(g.size) for g in GROUPS], 1, 30, 0.5)
    # loss tokens 14, 22, 16
    assert shard.scales == [1 / 36, 1 / 36, 0.5 / 16]
    assert shard.is_reused_P.tolist() == [False, True, True] and shard.num_reused_tokens == 38
