"""IndexedSet against Python's set, and draws that know nothing of the past."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.store.tables import IndexedSet


def test_the_gap_and_the_ranks_of_a_set_worked_by_hand():
    some = IndexedSet(np.array([0, 1, 2, 64, 65, 200]))
    assert some.first_absent() == 3
    assert some.select(np.array([0, 3, 5, 2])).tolist() == [0, 64, 200, 2]
    some.add(3)
    some.remove(1)
    assert some.first_absent() == 1
    assert some.members().tolist() == [0, 2, 3, 64, 65, 200]


@given(st.lists(st.integers(0, 400), max_size=150))
@settings(max_examples=60)
def test_it_is_a_set_of_integers(toggled):
    some, twin = IndexedSet(), set()
    for member in toggled:
        (some.remove if member in twin else some.add)(member)
        twin ^= {member}
        assert len(some) == len(twin) and (member in some) == (member in twin)
        assert some.first_absent() == min(set(range(402)) - twin)
    some.check_valid()
    assert some.members().tolist() == sorted(twin)
    assert some.select(np.arange(len(twin))).tolist() == sorted(twin)


@pytest.mark.parametrize("num", [0, 3, 90])  # none, one by one, and at once
def test_it_has_all_of_some_numbers_or_not(num):
    some = IndexedSet(np.arange(0, 400, 2))
    members = list(range(0, 2 * num, 2))
    assert some.has_all(members)
    for other in (1, 399, 400, 10**6, -2):
        assert not some.has_all([*members, other])


def test_a_full_set_has_its_gap_behind_it():
    for size in (64, 128, 1024):
        assert IndexedSet(np.arange(size)).first_absent() == size


def test_draws_depend_on_the_members_and_not_on_how_they_came():
    rng = np.random.default_rng(0)
    lived = IndexedSet()
    for member in rng.permutation(5000):
        lived.add(int(member))
    for member in rng.permutation(5000)[:4000]:
        lived.remove(int(member))
    rebuilt = IndexedSet(lived.members()[::-1])
    for num in (1, 10, 999, 1000, 5000):
        one, other = np.random.default_rng(num), np.random.default_rng(num)
        drawn = lived.sample(num, one)
        assert drawn.tolist() == rebuilt.sample(num, other).tolist()
        assert len(set(drawn.tolist())) == min(num, 1000) and all(member in lived for member in drawn.tolist())
        assert one.bit_generator.state == other.bit_generator.state


def test_every_member_is_drawn_equally_often():
    members = np.array([3, 64, 65, 190, 500])
    some, rng = IndexedSet(members), np.random.default_rng(1)
    drawn = np.concatenate([some.sample(2, rng) for _ in range(1500)])
    # Each is drawn with probability 2/5: 600 of 1500 times, standard deviation sqrt(1500 * .4 * .6) = 19.
    assert np.abs([(drawn == member).sum() - 600 for member in members]).max() < 4 * 19


def test_misuse_is_refused_and_changes_nothing():
    some = IndexedSet(np.array([5]))
    for call in (lambda: some.add(5), lambda: some.add(-1), lambda: some.remove(4), lambda: some.remove(10**6)):
        with pytest.raises(ValueError, match="member = "):
            call()
    with pytest.raises(ValueError, match="ranks"):
        some.select(np.array([1]))
    assert some.members().tolist() == [5]
    assert IndexedSet().sample(3, np.random.default_rng(0)).tolist() == []


def test_a_wrong_count_is_found():
    some = IndexedSet(np.arange(100))
    some._tree_W[1] -= 1
    with pytest.raises(ValueError, match="counts its members"):
        some.check_valid()


def test_cost_does_not_grow_with_the_set():
    """A guard against a scan, not a benchmark: a scan would cost 50 times as much."""

    def cost(num):
        some = IndexedSet(np.arange(num))
        start = time.process_time()
        for member in range(0, num, num // 500):
            some.remove(member)
            assert some.first_absent() == 0
        return time.process_time() - start

    assert cost(500_000) < 10 * min(cost(10_000) for _ in range(3)) + 0.01
