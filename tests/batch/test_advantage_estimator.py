"""Whom an episode is compared with, before any sharding: shaping, parts and scales by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.batch.advantages import AdvantageEstimator, overlong
from rllib_srl.batch.parts import PartRef, part_meta, part_of
from rllib_srl.batch.shard import build_shards, fetched, token_scales
from rllib_srl.losses.settings import LossSettings
from rllib_srl.types import GroupMeta, ListedRef, Prompt
from tests.small_learner import GROUPS, make_group


def meta_of(rewards, key="a", origin="fresh", lengths=None, turns=None):
    num = len(rewards)
    lengths = np.array(lengths if lengths is not None else [4] * num)
    group = replace(make_group(5, 3, lengths.tolist()), prompt=Prompt("env", key), group_id=f"{origin}.{key}")
    meta = GroupMeta.of(replace(group, rewards_G=np.array(rewards, np.float32)), group)
    return replace(meta, origin=origin, num_turns_G=np.array(turns if turns is not None else [1] * num))


def compare(groups, reused=(), kl=None, **given):
    comparison = AdvantageEstimator(LossSettings.made(**given))
    rewards = comparison.shaped_rewards(groups)
    return comparison.estimate(groups, rewards, kl, list(reused))


def as_lists(arrays):
    return [pytest.approx(a.tolist(), abs=1e-6) for a in arrays]


def test_the_length_penalty_is_that_of_dapo_and_shapes_rewards():
    """20,480 tokens with a cache of 4,096: 0, -.25, -.5, -1, and no more beyond."""
    num_tokens = np.array([100, 16384, 17408, 18432, 20480, 30000])
    np.testing.assert_allclose(overlong(num_tokens, 20480, 0.2, 1.0), [0, 0, -0.25, -0.5, -1, -1])
    np.testing.assert_allclose(overlong(num_tokens, 20480, 0.2, 0.5), [0, 0, -0.125, -0.25, -0.5, -0.5])
    group = meta_of([1, 1, 0], lengths=[9, 10, 4])
    settings = {"longest_answer": 10, "overlong_penalty": 1.0}
    (rewards_G,) = AdvantageEstimator(LossSettings.made(**settings)).shaped_rewards([group])
    np.testing.assert_allclose(rewards_G, [1 - 0.5, 1 - 1, 0])  # lengths 9, 10, 4 with a cache of 2: -.5, -1, 0
    assert AdvantageEstimator(LossSettings.made()).shaped_rewards([group])[0].tolist() == [1, 1, 0]


def test_turns_are_runs_of_written_tokens():
    group = make_group(1, 4, [5, 3])
    mask_N = group.loss_mask_N.copy()
    mask_N[np.flatnonzero(mask_N)[[1, 3]]] = False  # 1 0 1 0 1 | 1 1 1
    assert replace(group, loss_mask_N=mask_N).num_turns_G().tolist() == [3, 1]
    assert replace(group, loss_mask_N=np.zeros_like(mask_N)).num_turns_G().tolist() == [0, 0]


def test_what_is_left_out_is_decided_without_the_kl():
    groups = [meta_of([1, 0], "a"), meta_of([1, 1], "b")]
    compared = compare(groups, advantage="mean_only")
    assert [g.prompt.prompt_id for g in compared.groups] == ["a"]
    assert [a.tolist() for a in compared.played] == [[0.5, -0.5], [0, 0]]
    taught = AdvantageEstimator(LossSettings.made(advantage="none"), trains_all=True)
    beyond = taught.estimate(groups, taught.shaped_rewards(groups), None, [])
    assert [a.tolist() for a in beyond.advantages] == [[0, 0], [0, 0]]
    groups = [meta_of([1, 0], "a"), meta_of([1, 1], "b")]
    compared = compare(groups, advantage="mean_only", kl=[np.array([0.5, 0.0]), np.array([0.1, 0.0])])
    assert [g.prompt.prompt_id for g in compared.groups] == ["a"]
    assert compared.advantages[0].tolist() == [0.25, -0.25]


def test_reused_groups_are_compared_apart():
    reused = [meta_of([1, 0, 0, 0], "r", "reuse"), meta_of([0, 0], "s", "reuse")]
    compared = compare([meta_of([1, 0], "a")], reused, advantage="mean_only")
    assert [a.tolist() for a in compared.advantages] == [[0.5, -0.5], [0.75, -0.25, -0.25, -0.25]]


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


TOKENS = [np.array([2, 4]), np.array([1, 0]), np.array([5, 5])]  # the last is reused; one wrote nothing


@pytest.mark.parametrize("rule, expected", [
    ("token_mean", [1 / 7, 1 / 7, 1 / 10]),
    ("sequence_mean", [[1 / 6, 1 / 12], [1 / 3, 1 / 3], [0.1, 0.1]]),
    ("constant", [1 / 24, 1 / 24, 1 / 16]),
])  # fmt: skip
def test_scales_by_hand(rule, expected):
    scales = token_scales(TOKENS, [False, False, True], rule, 8)
    for scale, wanted in zip(scales, expected, strict=True):
        np.testing.assert_allclose(scale, wanted)


@pytest.mark.parametrize("rule", ["token_mean", "sequence_mean", "constant"])
@given(num_shards=st.integers(1, 4), seed=st.integers(0, 99))
def test_shards_and_order_leave_every_scale_as_it_is(rule, num_shards, seed):
    groups = [replace(GroupMeta.of(g, g), origin="reuse" if i == 2 else "fresh") for i, g in enumerate(GROUPS)]
    order = np.random.default_rng(seed).permutation(3)
    advantages = [np.zeros(g.size) for g in GROUPS]
    shards = build_shards([groups[i] for i in order], [advantages[i] for i in order], num_shards, 30, rule, 32)
    found = {ref.group_id: scale for shard in shards for ref, scale in zip(shard.group_refs, shard.scales, strict=True)}
    wanted = token_scales([g.num_loss_tokens_G for g in groups], [False, False, True], rule, 32)
    for group, scale in zip(groups, wanted, strict=True):
        np.testing.assert_allclose(found[group.group_id], scale)
