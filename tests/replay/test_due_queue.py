"""DueQueue and its SlotOrder against sorted lists, with blocks so small that they split and join all the time."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.store import due_queue
from rllib_srl.replay.store import due_queue as slot_order
from rllib_srl.replay.store.due_queue import DueQueue, SlotOrder
from rllib_srl.replay.store.tables import Table

ROW = np.dtype([("seq", "u8"), ("due", "f8")])


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(slot_order, "BLOCK", 4)
    monkeypatch.setattr(due_queue, "BLOCK", 4)


def table_of(due_N, seq_N=None):
    """Return a table whose slots are due at these times; seq runs against the slots, to tell the two apart."""
    num = len(due_N)
    table = Table(ROW, num)
    for slot in range(num):
        seq = num - slot if seq_N is None else seq_N[slot]
        assert table.free_slot() == slot
        table.write(slot, np.array((seq, due_N[slot]), ROW))
    return table


def queue_of(table, parts):
    queue = DueQueue(table)
    for slot, part in enumerate(parts):
        queue.insert(slot, part)
    return queue


def test_the_earliest_are_in_order_of_due_then_seq():
    # slot   0    1    2    3    4     seq 5 4 3 2 1
    table = table_of([7.0, 3.0, 3.0, 9.0, 1.0])
    queue = queue_of(table, [0, 0, 1, 1, 0])
    assert queue.earliest(9, 10).tolist() == [4, 2, 1, 0, 3]  # 2 before 1: equally due, smaller seq
    assert queue.earliest(7, 10).tolist() == [4, 2, 1, 0]  # due at now is due
    assert queue.earliest(6.9, 2).tolist() == [4, 2]
    assert queue.earliest(9, 10, [1]).tolist() == [2, 3]
    assert queue.earliest(9, 10, [5]).tolist() == queue.earliest(0, 10).tolist() == queue.earliest(9, 0).tolist() == []
    assert len(queue) == 5 and queue.count(3) == 3 and queue.count(9, [1]) == 2


def test_a_new_date_takes_a_slot_elsewhere():
    table = table_of([1.0, 2.0, 3.0])
    queue = queue_of(table, [0, 0, 0])
    queue.remove(0, 0)
    table.columns["due"][0] = 2.5
    queue.insert(0, 0)
    assert queue.earliest(9, 9).tolist() == [1, 0, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", range(6))
def test_random_operations_match_a_sorted_list(seed):
    rng = np.random.default_rng(seed)
    num = 120
    table = table_of(rng.integers(0, 20, num).astype(float))
    queue, part_of = DueQueue(table), {}
    phases = np.repeat([0.9, 0.2, 0.7, 0.05], 200)  # fill, empty, fill, empty: blocks split and join
    for grows in phases:
        slot = int(rng.integers(num))
        if slot in part_of:
            if rng.random() > grows:
                queue.remove(slot, part_of.pop(slot))
                continue
            queue.remove(slot, part_of[slot])
        elif rng.random() > grows:
            continue
        table.columns["due"][slot] = float(rng.integers(0, 20))
        part_of[slot] = int(rng.integers(3))
        queue.insert(slot, part_of[slot])
        assert list(queue.faults()) == []
        now, most = float(rng.integers(0, 20)), int(rng.integers(0, 40))
        parts = None if rng.random() < 0.5 else [0, 2]
        column = table.columns
        due = [s for s in part_of if column["due"][s] <= now and (parts is None or part_of[s] in parts)]
        due.sort(key=lambda s: (column["due"][s], column["seq"][s]))
        assert queue.earliest(now, most, parts).tolist() == due[:most]
        assert queue.count(now, parts) == len(due)
        within = {s for s in due if column["due"][s] > now - 5}
        drawn = queue.sample(most, rng, now, now - 5, parts).tolist()
        assert len(drawn) == len(set(drawn)) == min(most, len(within)) and set(drawn) <= within


@pytest.mark.parametrize("num_many", [2, 90])  # slot by slot, and built anew
def test_many_at_once_are_as_one_by_one(num_many):
    rng = np.random.default_rng(num_many)
    table = table_of(rng.integers(0, 20, 600).astype(float))
    at_once, one_by_one = DueQueue(table), DueQueue(table)
    for queue in (at_once, one_by_one):
        queue.build("a", np.arange(300))
        queue.build("b", np.arange(300, 560))
    moved = rng.choice(300, num_many, replace=False).tolist()
    at_once.remove_many(moved, "a")
    at_once.insert_many(moved, "b")
    for slot in moved:
        one_by_one.remove(slot, "a")
        one_by_one.insert(slot, "b")
    for part in ("a", "b"):
        assert at_once.slots_of(part).tolist() == one_by_one.slots_of(part).tolist()
    assert list(at_once.faults()) == []
    at_once.insert_many([570, 571], "c")
    at_once.remove_many([571, 570], "c")
    assert at_once.parts == ["a", "b"]
    for wrong in ([moved[0]], [*range(550, 560), 599]):
        with pytest.raises(ValueError, match="slot"):
            at_once.remove_many(wrong, "a")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.randoms())
@settings(max_examples=40)
def test_how_slots_came_and_went_shows_nowhere(times, random):
    num = len(times)
    table = table_of([float(time) for time in times])
    order = list(range(num))
    random.shuffle(order)
    lived, built = DueQueue(table), DueQueue(table)
    for slot in order:
        lived.insert(slot, slot % 2)
    for slot in order[: num // 2]:
        lived.remove(slot, slot % 2)
    left = np.array(sorted(order[num // 2 :]))
    for part in (1, 0):
        built.build(part, left[left % 2 == part])
    for most in (0, 1, num // 2, num):
        one, other = np.random.default_rng(most), np.random.default_rng(most)
        assert lived.sample(most, one, 4).tolist() == built.sample(most, other, 4).tolist()
        assert one.bit_generator.state == other.bit_generator.state
        assert lived.earliest(4, most).tolist() == built.earliest(4, most).tolist()


def test_every_slot_between_two_times_is_drawn_equally_often():
    table = table_of([0.0, 1.0, 1.0, 2.0, 3.0, 4.0])
    queue, rng = queue_of(table, [0, 0, 1, 1, 0, 1]), np.random.default_rng(2)
    drawn = np.concatenate([queue.sample(2, rng, until=3, after=0) for _ in range(1600)])
    # Slots 1 to 4, each with probability 2/4: 800 of 1600 times, standard deviation sqrt(1600 / 4) = 20.
    counts = np.bincount(drawn, minlength=6)
    assert counts[[0, 5]].tolist() == [0, 0]
    assert np.abs(counts[1:5] - 800).max() < 4 * 20
    first = np.array([queue.sample(4, rng, until=3, after=0)[0] for _ in range(1600)])
    assert np.abs(np.bincount(first, minlength=6)[1:5] - 400).max() < 4 * 18, "the order is random too"


def test_many_domains_give_the_same_order_as_one():
    rng = np.random.default_rng(3)
    table = table_of(rng.random(20_000).round(3))
    parts = rng.integers(0, 7, 20_000)
    queue = DueQueue(table)
    for part in range(7):
        queue.build(part, np.flatnonzero(parts == part))
    whole = SlotOrder(table, "due", np.arange(20_000))
    for most in (1, 500, 5000, 19_999):
        assert queue.earliest(0.9, most).tolist() == whole.at(np.arange(min(most, whole.rank(0.9)))).tolist()


def test_blocks_are_joined_so_that_nothing_is_left_behind(monkeypatch):
    monkeypatch.setattr(slot_order, "BLOCK", 64)
    table = table_of(np.random.default_rng(4).random(2000))
    order = SlotOrder(table, "due")
    for slot in range(2000):
        order.insert(slot)
    for slot in range(1960):
        order.remove(slot)
    assert order._num_blocks <= 4 * 40 / 64 + 1 and list(order.faults()) == []


def test_slots_that_come_in_order_fill_their_blocks():
    table = table_of(np.arange(5120.0))
    order = SlotOrder(table, "due")
    for slot in range(5120):
        order.insert(slot)
    assert order._num_blocks == 10


def test_a_slot_that_is_not_where_its_row_says_is_refused():
    table = table_of([1.0, 2.0, 3.0])
    queue = queue_of(table, [0, 0, 0])
    with pytest.raises(ValueError, match="part = 7"):
        queue.remove(0, 7)
    table.columns["due"][0] = 5.0
    with pytest.raises(ValueError, match="slot = 0"):
        queue.remove(0, 0)


def test_faults_are_named():
    table = table_of([1.0, 2.0, 3.0])
    queue = queue_of(table, [0, 0, 0])
    table.columns["due"][1] = 9.0
    assert "ascending" in " ".join(queue.faults())
    table.columns["due"][1] = 2.0
    queue._parts[0]._firsts[0] = (0.0, 0)
    assert "first key" in " ".join(queue.faults())


def test_cost_does_not_grow_with_the_queue():
    """A guard against a scan, not a benchmark: a scan would cost 30 times as much."""

    def cost(num):
        rng = np.random.default_rng(5)
        table = Table(ROW, num)
        rows_N = np.zeros(num, ROW)
        rows_N["seq"], rows_N["due"] = np.arange(num), rng.random(num)
        table.load({slot: row.tobytes() for slot, row in enumerate(rows_N)})
        queue = DueQueue(table)
        queue.build(0, np.arange(num))
        start = time.process_time()
        for slot in range(0, num, num // 200):
            queue.remove(slot, 0)
            table.columns["due"][slot] = rng.random()
            queue.insert(slot, 0)
            queue.earliest(0.5, 64)
        return time.process_time() - start

    assert cost(300_000) < 5 * min(cost(10_000) for _ in range(3)) + 0.01
