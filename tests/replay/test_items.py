"""The tables of items and groups: pools by hand, uniform samples, and what is noted, broken or refused."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay.items import GROUP, ITEM, Contents, Tables, sample
from rllib_srl.types import Prompt

DOMAINS = ("sums", "products", "proofs")


def prompt(number):
    return Prompt("env", str(number), DOMAINS[number % 3], ("earlier turn ü\udc80",) * (number % 2))


def add(store, number, now=0, **fields):
    return store.add_item(number, prompt(number), DOMAINS[number % 3], now, **fields)


def add_group(store, slot, max_groups=2, **fields):
    return store.add_group(slot, f"g{store.next_group_seq}", max_groups, **fields)


# Worked by hand


def test_the_pool_is_the_earliest_due_and_then_a_sample_of_the_rested():
    store = Tables()
    rng = np.random.default_rng(0)
    due = add(store, 0, due=4, last_review=1)
    overdue = add(store, 1, due=2, last_review=1)
    rested = add(store, 2, due=9, last_review=3)
    add(store, 3, due=9, last_review=4)  # reviewed this iteration: not rested
    assert store.pool(4, 10, rng).tolist() == [overdue, due, rested]
    assert store.pool(4, 2, rng).tolist() == [overdue, due]
    assert store.pool(4, 10, rng, min_recall_interval=2).tolist() == [overdue, due]
    assert store.pool(4, 10, rng, domains=[store.domain_id("products")]).tolist() == [overdue]
    assert store.pool(4, 0, rng).tolist() == []
    assert store.num_due(4) == 2
    store.remove_item(overdue)
    assert store.pool(4, 10, rng).tolist() == [due, rested]
    assert store.slots().tolist() == [0, 2, 3]


def test_the_group_pool_holds_what_may_be_trained_on_again():
    store = Tables()
    slot, rng = add(store, 0), np.random.default_rng(0)
    good, _ = add_group(store, slot, 5, born=5, variance=0.2, size=8)
    add_group(store, slot, 5, born=7, variance=0.2, size=8)  # written in this iteration
    add_group(store, slot, 5, born=3, variance=0.2, size=8)  # too old
    add_group(store, slot, 5, born=5, variance=0.0, size=8)  # no signal
    used, _ = add_group(store, slot, 5, born=6, variance=0.1, size=8, uses=2)

    def pool(store=store, max_age=3, max_uses=3, **more):
        return sorted(store.group_pool(7, 9, rng, max_age, max_uses, **more).tolist())

    assert pool() == [good, used]
    assert len(pool(must_vary=False)) == 3
    assert pool(max_uses=2) == [good] and pool(max_age=1) == [used] and pool(domains=[9]) == []
    store.update_groups([good], uses=3)
    assert pool() == [used]


def test_the_oldest_groups_go():
    store = Tables()
    slot = add(store, 0)
    groups = [add_group(store, slot, born=0, size=2)[0] for _ in range(2)]
    assert store.groups_of(slot) == groups
    newest, evicted = add_group(store, slot, born=1, size=2)
    assert evicted == 1 and store.groups_of(slot) == [groups[1], newest]
    store.remove_group(groups[1])
    assert store.items["num_groups"][slot] == 1
    assert add_group(store, slot, born=1, size=2)[1] == 0 and store.items["num_groups"][slot] == 2
    store.remove_item(slot)
    assert store.changed().removed_groups == [0, 1, 2, 3] and store.num_groups == 0
    assert store.faults() == []


def test_a_slot_is_the_smallest_free_row_and_a_number_is_given_once():
    store = Tables()
    assert [add(store, number) for number in range(70)] == list(range(70))  # beyond the first 64 rows
    for slot in (40, 7, 69):
        store.remove_item(slot)
    assert [add(store, number) for number in (100, 101, 102)] == [7, 40, 69]
    assert store.items["seq"][[7, 40, 69]].tolist() == [70, 71, 72]


def test_rows_are_small():
    for dtype, size in ((ITEM, 152), (GROUP, 64)):
        assert dtype.itemsize == size == sum(dtype[name].itemsize for name in dtype.names), "no gaps"


def test_what_changed_is_named_until_it_is_committed():
    store = Tables()
    for number in range(3):
        add_group(store, add(store, number), size=2)
    store.committed()
    store.update([1], reps=1)
    store.remove_item(2)
    assert store.changed().items == [(1, store.items[1].tobytes(), prompt(1))]
    group, _ = add_group(store, 0, size=3)
    changed = store.changed()
    assert [slot for slot, _, _ in changed.items] == [0, 1]  # the item of the new group has one more
    assert changed.groups == [(3, store.groups[group].tobytes(), "g3")]
    assert (changed.removed_slots, changed.removed_groups) == ([2], [2])


def test_every_rested_item_is_sampled_equally_often():
    store, rng = Tables(), np.random.default_rng(0)
    for number in range(12):
        add(store, number, due=1 if number < 3 else 99, last_review=0)
    drawn = np.concatenate([store.pool(2, 6, rng)[3:] for _ in range(900)])
    # Three are due, three of the other nine are sampled: each 300 of 900 times, deviation sqrt(900 * 2/9) = 14.
    counts = np.bincount(drawn, minlength=12)
    assert counts[:3].tolist() == [0, 0, 0] and np.abs(counts[3:] - 300).max() < 4 * 14


def test_every_item_that_may_come_is_sampled_equally_often_where_due_dates_do_not_count():
    store, rng = Tables(), np.random.default_rng(0)
    for number in range(12):
        add(store, number, due=1 if number < 9 else 99, last_review=number % 2)
    add(store, 12, due=3, last_review=2)  # reviewed in this iteration
    drawn = np.concatenate([store.pool(2, 6, rng, is_by_due=False) for _ in range(600)])
    counts = np.bincount(drawn, minlength=13)  # each 600 * 6 / 12 = 300 times, deviation sqrt(600 / 4) = 12
    assert counts[12] == 0 and np.abs(counts[:12] - 300).max() < 4 * 13
    assert sorted(store.pool(2, 12, rng, is_by_due=False).tolist()) == list(range(12))


# Misuse


def set_row(table, row, /, **fields):
    """Change a row past all checks."""
    for name, value in fields.items():
        table.rows[name][row] = value


BREAKS = {
    "no seq is used twice": lambda store: set_row(store._items, 1, seq=0),
    "every key leads to its item": lambda store: set_row(store._items, 1, key=77),
    "a free row is zero": lambda store: set_row(store._items, 20, reps=1),
    "every item has a prompt": lambda store: store._prompts.pop(0),
    "alpha and beta are above 0": lambda store: set_row(store._items, 0, alpha=0),
    "numbers are finite": lambda store: set_row(store._items, 0, stability=np.inf),
    "counts at least 0": lambda store: store.update_groups([0], uses=-1),
    "no item is due before its last review": lambda store: store.update([0], due=-1),
    "every item is of a known domain": lambda store: set_row(store._items, 0, domain=3),
    "every item leads to its groups": lambda store: store._groups_of[0].append(5),
    "num_groups counts": lambda store: set_row(store._items, 0, num_groups=2),
    "every group belongs to an item": lambda store: set_row(store._groups, 0, slot=9),
    "every group has an id": lambda store: store.group_ids.clear(),
    "a target belongs to a group": lambda store: store.targets.update({(7, 0): 10}),
}


def test_a_broken_invariant_is_named():
    for law, damage in BREAKS.items():
        store = Tables()
        for number in (0, 3, 6, 1, 2):
            add(store, number)
        add_group(store, 0, born=0, variance=0.1, size=2)
        assert store.faults() == []
        damage(store)
        assert any(law in fault for fault in store.faults()), law


def test_misuse_is_refused_and_changes_nothing():
    store = Tables()
    slot = add(store, 0)
    before = store.content()
    for wrong, message in (
        (lambda: add(store, 0), "expected one that no item has"),
        (lambda: store.update([slot, slot], reps=1), "expected distinct ones that are in use"),
        (lambda: store.update([5], reps=1), "expected distinct ones that are in use"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
        assert store.content() == before
    with pytest.raises(ValueError, match="every group belongs to an item: there is none at slot 0"):
        Tables(Contents(groups=np.zeros(1, GROUP), group_ids=["g"]))


# Samples


def test_a_sample_is_drawn_as_ranks_of_a_sort():
    for seqs in ("even", "too wide for 64 bits"):
        rng = np.random.default_rng(3)
        part_N, time_N = rng.integers(0, 3, 300), rng.integers(-7, 900, 300).astype(np.int32)
        seq_N = rng.permutation(300).astype(np.uint64)
        if seqs != "even":
            seq_N[0] = (1 << 64) - 1
        one, other = np.random.default_rng(5), np.random.default_rng(5)
        want = np.lexsort((seq_N, time_N, part_N))[other.choice(300, 40, replace=False)]
        assert sample(40, one, part_N, time_N, seq_N).tolist() == want.tolist()


def test_nothing_to_draw_leaves_the_generator_alone():
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    assert sample(3, rng, np.empty(0, np.int64)).tolist() == sample(0, rng, np.arange(3)).tolist() == []
    assert rng.bit_generator.state == before
