"""Tries, micro-batches and shards: each law on random groups, and one trie worked by hand."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.batch.layout import (
    Episode,
    balanced_shards,
    episodes_of,
    micro_batch,
    micro_batches,
    padded_layout,
    trie_layout,
)
from rllib_srl.batch.parts import part_of
from rllib_srl.types import Group, Prompt, StopReason

STREAMS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


def episode(ids, num_written, index=0, advantage=1.0):
    mask = np.zeros(len(ids), bool)
    mask[len(ids) - num_written :] = True
    return Episode(np.array(ids, np.int32), mask, np.where(mask, -0.5, 0.0).astype(np.float32), advantage, index)


def test_a_trie_worked_by_hand():
    # 7 8 ─┬─ 1        streams, sorted: [7 8 1], [7 8 2 3]
    #      └─ 2 3      laid out:         7 8 1 2 3
    layout = trie_layout([np.array([7, 8, 2, 3]), np.array([7, 8, 1])])
    assert layout.token_ids_RT.tolist() == [[7, 8, 1, 2, 3]]
    assert layout.position_ids_RT.tolist() == [[0, 1, 2, 2, 3]]
    assert [path.tolist() for path in layout.paths] == [[0, 1, 3, 4], [0, 1, 2]]
    assert layout.trie.mask_TT().astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


@given(STREAMS)
def test_every_token_sees_exactly_its_own_path(streams):
    layout = trie_layout([np.array(s, np.int32) for s in streams])
    mask, ids = layout.trie.mask_TT(), layout.token_ids_RT[0]
    for stream, path in zip(streams, layout.paths, strict=True):
        assert ids[path].tolist() == stream
        assert layout.position_ids_RT[0][path].tolist() == list(range(len(stream)))
        for depth, at in enumerate(path):
            assert np.flatnonzero(mask[at]).tolist() == sorted(path[: depth + 1].tolist())
    prefixes = {tuple(s[: n + 1]) for s in streams for n in range(len(s))}
    assert layout.token_ids_RT.size == len(prefixes)  # each distinct prefix is one token, computed once


@given(STREAMS)
def test_padding_keeps_every_stream(streams):
    layout = padded_layout([np.array(s, np.int32) for s in streams])
    flat = layout.token_ids_RT.ravel()
    assert [flat[path].tolist() for path in layout.paths] == streams
    assert layout.attention_mask.sum(1).tolist() == [len(s) for s in streams]


@pytest.mark.parametrize("share", [True, False])
def test_the_row_before_a_token_predicts_it(share):
    one = micro_batch([episode([5, 6, 1, 2], 2, 0, 1.0), episode([5, 6, 3], 1, 1, -1.0)], share)
    flat = one["token_ids"].ravel()
    assert flat[one["predictor"]].tolist() == [6, 1, 6]
    assert one["target"].tolist() == [1, 2, 3]
    assert one["advantage"].tolist() == [1, 1, -1]
    assert one["scale"].tolist() == [1, 1, 1]
    assert one["episode"].tolist() == [0, 0, 1]


@settings(max_examples=40)
@given(STREAMS, st.integers(1, 30), st.booleans())
def test_micro_batches_hold_each_loss_token_once_within_the_budget(streams, max_tokens, share):
    episodes = [episode(s, len(s) - 1, index) for index, s in enumerate(streams)]
    parts = micro_batches(episodes, max_tokens, share)
    seen = sorted((int(e), int(t)) for part in parts for e, t in zip(part["episode"], part["target"], strict=True))
    assert seen == sorted((e.index, int(t)) for e in episodes for t in e.token_ids_T[e.loss_mask_T])
    for part in parts:
        assert part["token_ids"].size <= max_tokens or len(set(part["episode"].tolist())) == 1


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=6), min_size=1, max_size=6), st.integers(1, 15))
def test_cuts_compute_least_and_are_fewest(streams, max_tokens):
    """Against every way to cut the sorted streams."""
    episodes = [episode(s, len(s) - 1, index) for index, s in enumerate(sorted(streams))]

    def cost(cuts):
        tokens = [trie_layout([e.token_ids_T for e in episodes[a:b]]).token_ids_RT.size for a, b in pairwise(cuts)]
        is_over = any(t > max_tokens and b - a > 1 for t, (a, b) in zip(tokens, pairwise(cuts), strict=True))
        return (is_over, sum(tokens), len(tokens))

    num = len(episodes)
    every = [cost([0, *cuts, num]) for k in range(num) for cuts in combinations(range(1, num), k)]
    parts = micro_batches(episodes, max_tokens, share_prefixes=True)
    assert (False, sum(part["token_ids"].size for part in parts), len(parts)) == min(every)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 4))
def test_shards_are_whole_and_balanced(costs, num_shards):
    shards = balanced_shards(costs, num_shards)
    assert sorted(i for shard in shards for i in shard) == list(range(len(costs)))
    loads = [sum(costs[i] for i in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(costs)  # the law of "largest to the lightest"


def group_of_two():
    return Group(
        "g", Prompt("e", "p"), np.array([1, 2, 1, 3, 4], np.int32), np.array([0, 1, 0, 1, 1], bool),
        np.array([0, -0.5, 0, -0.25, -0.1], np.float32), np.array([0, 2, 5]), np.array([1.0, 0.0], np.float32),
        np.zeros((2, 2), np.int64), (StopReason.TERMINATED,) * 2,
    )  # fmt: skip


def test_groups_are_cut_into_episodes_whose_scale_reaches_each_loss_token():
    first, second = episodes_of([group_of_two()], [np.array([0.7, -0.7])])
    assert (first.token_ids_T.tolist(), second.token_ids_T.tolist()) == ([1, 2], [1, 3, 4])
    assert (first.advantage, second.advantage) == (0.7, -0.7)
    np.testing.assert_allclose(second.behaviour_logp_T, [0, -0.25, -0.1])
    groups, advantages = [group_of_two(), group_of_two()], [np.array([0.7, -0.7])] * 2
    one = micro_batch(episodes_of(groups, advantages, [0.5, 0.25]), share_prefixes=True)
    assert one["scale"].tolist() == [0.5] * 3 + [0.25] * 3  # three tokens of each group are the policy's
    assert one["episode"].tolist() == [0, 1, 1, 2, 3, 3]


def test_an_episode_without_loss_tokens_needs_no_pass():
    nothing, something = episode([1, 2], 0, 0), episode([3, 4], 1, 1)
    (one,) = micro_batches([nothing, something], 100, True)
    assert one["token_ids"].tolist() == [[3, 4]]
    assert micro_batches([nothing], 100, True) == []


def two_conversations(g_starts=(0, 4), extra=None):
    """Return a group of two episodes of six tokens, the second of two conversations."""
    ids = np.array([1, 2, 3, 4, 5, 6, 1, 2, 8, 9, 1, 7], np.int32)
    mask = np.array([0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1], bool)
    return Group(
        "g", Prompt("w", "p"), ids, mask, np.where(mask, -0.5, 0).astype(np.float32), np.array([0, 6, 12]),
        np.array([0, 1], np.float32), np.zeros((2, 2), np.int64), (StopReason.TERMINATED,) * 2,
        extra={"conversations": {"1": list(g_starts)}} if extra is None else extra,
    )  # fmt: skip


@pytest.mark.parametrize("share", [True, False])
def test_conversations_are_streams_of_their_own_with_the_statistics_of_one_episode(share):
    group = two_conversations()
    group.check_valid()
    batch = micro_batch(episodes_of([group], [np.array([1.0, 2.0])]), share)
    assert batch["target"].tolist() == [4, 5, 6, 8, 9, 7] and batch["episode"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["advantage"].tolist() == [1, 1, 1, 2, 2, 2]
    flat, position = batch["token_ids"].ravel(), batch["position_ids"].ravel()
    assert flat[batch["predictor"]].tolist() == [3, 4, 5, 2, 8, 1]
    assert position[batch["predictor"]].tolist() == [2, 3, 4, 1, 2, 0]  # the second conversation begins at 0
    assert batch["token_ids"].size == (9 if share else 18)  # shared: 1 2 | 3 4 5 6 | 8 9 | 7


@pytest.mark.parametrize("share", [True, False])
def test_budgets_count_every_conversation(share):
    episodes = episodes_of([two_conversations()] * 4, [np.zeros(2)] * 4)
    for limit in (8, 12, 18, 1000):
        batches = micro_batches([replace(e, index=i) for i, e in enumerate(episodes)], limit, share)
        assert sum(len(batch["target"]) for batch in batches) == 24
        assert all(batch["token_ids"].size <= limit or len(set(batch["episode"])) == 1 for batch in batches)


@pytest.mark.parametrize(
    "several",
    [{"1": [0, 5]}, {"1": [1, 4]}, {"1": [0, 6]}, {"1": [0, 4, 4]}, {"1": []}, {"1": "x"}, {"1": [0, 4.0]},
     {"2": [0, 4]}, {"x": [0]}, [[0], [0, 4]], {"1": [0, True]}],
)  # fmt: skip
def test_conversations_that_cannot_be_are_named(several):
    with pytest.raises(ValueError, match="conversation"):
        two_conversations(extra={"conversations": several}).check_valid()


def test_a_part_of_a_group_keeps_the_conversations_of_its_episodes():
    group = two_conversations()
    assert part_of(group, [1]).starts(0) == (0, 4) and part_of(group, [0]).extra == {}
    part_of(group, [1]).check_valid()
