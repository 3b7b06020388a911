"""Rows selected by their place in an order, against a full sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.store.tables import at_ranks, earliest, sample


def test_the_earliest_are_in_order_of_time_then_seq():
    # position        0    1    2    3    4
    time_N, seq_N = np.array([7.0, 3.0, 3.0, 9.0, 1.0]), np.array([5, 4, 3, 2, 1], np.uint64)
    assert earliest(9, time_N, seq_N).tolist() == [4, 2, 1, 0, 3]  # 2 before 1: the same time, a smaller seq
    assert earliest(2, time_N, seq_N).tolist() == [4, 2], "of two with the last time, the one with the smaller seq"
    assert earliest(0, time_N, seq_N).tolist() == earliest(3, time_N[:0], seq_N[:0]).tolist() == []


@given(st.lists(st.integers(-4, 5), max_size=80), st.integers(0, 90), st.randoms())
@settings(max_examples=80)
def test_the_earliest_are_those_of_a_sort(times, num, random):
    seqs = list(range(len(times)))
    random.shuffle(seqs)
    want = sorted(range(len(times)), key=lambda at: (times[at], seqs[at]))[:num]
    assert earliest(num, np.array(times, np.int32), np.array(seqs, np.uint64)).tolist() == want


@pytest.mark.parametrize("num", [5, 300, 40_000])
@pytest.mark.parametrize("seqs", ["even", "crowded", "too wide for 64 bits"])
def test_ranks_are_those_of_a_sort(num, seqs):
    """Bins of equal width, nearly all rows in few bins, and keys that one integer cannot hold."""
    rng = np.random.default_rng(num)
    part_N, time_N = rng.integers(0, 3, num), rng.integers(-7, 900, num).astype(np.int32)
    seq_N = rng.permutation(num).astype(np.uint64)
    if seqs == "crowded":
        part_N[:], time_N[:], seq_N[0] = 1, 5, 1 << 40
    elif seqs != "even":
        seq_N[0] = (1 << 64) - 1
    sorted_N = np.lexsort((seq_N, time_N, part_N))
    for rank_K in (rng.choice(num, num // 2, replace=False), np.array([num - 1, 0]), np.array([], np.int64)):
        assert at_ranks(rank_K, part_N, time_N, seq_N).tolist() == sorted_N[rank_K].tolist()


@given(st.permutations(range(12)), st.integers(0, 14))
def test_a_sample_depends_on_the_rows_and_not_on_their_places(places, num):
    key_N, place_N = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]), np.array(places)
    seq_N = np.arange(12)
    one, other = np.random.default_rng(num), np.random.default_rng(num)
    drawn_N = sample(num, one, key_N, seq_N)
    assert place_N[sample(num, other, key_N[place_N], seq_N[place_N])].tolist() == drawn_N.tolist()
    assert len(set(drawn_N.tolist())) == min(num, 12)
    assert one.bit_generator.state == other.bit_generator.state


def test_every_row_is_drawn_equally_often_and_at_every_place():
    key_N, rng = np.array([2, 0, 1, 1]), np.random.default_rng(2)
    drawn = np.array([sample(2, rng, key_N, np.arange(4)) for _ in range(1600)])
    # Each of 4 with probability 2/4: 800 of 1600 times, deviation sqrt(1600 / 4) = 20; as the first 400 times.
    assert np.abs(np.bincount(drawn.ravel()) - 800).max() < 4 * 20
    assert np.abs(np.bincount(drawn[:, 0]) - 400).max() < 4 * 18


def test_nothing_to_draw_leaves_the_generator_alone():
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    assert sample(3, rng, np.empty(0, np.int64)).tolist() == sample(0, rng, np.arange(3)).tolist() == []
    assert rng.bit_generator.state == before
