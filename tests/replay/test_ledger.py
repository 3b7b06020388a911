"""Transactions, and the journals of earlier runs."""

from __future__ import annotations

import numpy as np

from rllib_srl.replay.journal.journal import Journal
from rllib_srl.replay.journal.transaction import EARLIER, JOURNAL, Ledger
from rllib_srl.replay.store.items import ItemStore
from rllib_srl.replay.store.records import GROUP, ITEM, key_of
from rllib_srl.types import Prompt
from tests.replay.groups import a_group, a_prompt

STATE = {"x": 1, "y": [1, 2]}


def open_ledger(directory, run="a", max_bytes=1 << 20):
    return Ledger(directory, run, max_bytes)


def put(ledger, store, index, now=1, request="", state=STATE, answer=None, fail=False):
    """Store one item with one group, in one transaction."""
    undone = []
    with ledger.transaction(
        store, lambda: {**state, "store": store.header.to_json()}, lambda: undone.append(1), request
    ) as change:
        slot = store.add_item(key_of(a_prompt(index)), a_prompt(index), "sums", now)
        change.new_slots.add(slot)
        seq = store.header.next_group_seq
        change.vectors[slot] = np.full(3, index, np.float32)
        store.add_group(slot, born=now, size=2, num_bytes=change.keep(seq, a_group(index, now)))
        change.answer = answer
        if fail:
            raise KeyError(index)
    return slot


def test_a_transaction_is_committed_whole(tmp_path):
    ledger, store = open_ledger(tmp_path), ItemStore(8, 2)
    slot = put(ledger, store, 0, request="1.add", answer=["yes"])
    assert store.changed().items == [] and ledger.journal.position == 1
    assert ledger.journal.answer("1.add") == ["yes"]
    stored = ledger.stored()
    assert stored.slots.tolist() == [slot] and stored.prompts == [a_prompt(0)]
    assert stored.items.tobytes() == store.items[[slot]].tobytes()
    assert stored.state == {**STATE, "store": store.header.to_json(), "run": "a"}
    np.testing.assert_array_equal(ledger.payloads.get(0).token_ids_N, a_group(0, 1).token_ids_N)
    assert [(i, vector.tolist()) for i, vector in ledger.journal.vectors()] == [(slot, [0, 0, 0])]


def test_what_comes_and_goes_within_one_transaction_is_not_written():
    ledger, store = open_ledger(None), ItemStore(8, 1)
    put(ledger, store, 0)
    with ledger.transaction(store, lambda: STATE, lambda: None, "") as change:
        for salt in range(2):  # the second replaces the first, and the one on disk
            seq = store.header.next_group_seq
            _, gone = store.add_group(0, born=2, size=2, num_bytes=change.keep(seq, a_group(0, 2, salt=salt)))
            change.removed_groups += gone
        # An item comes and goes; another takes its slot.
        for index in (5, 6):
            slot = store.add_item(key_of(a_prompt(index)), a_prompt(index), "sums", 2)
            change.new_slots.add(slot)
            if index == 5:
                change.vectors[slot] = np.ones(3, np.float32)
                store.remove_item(slot)
                change.removed_slots.add(slot)
                change.vectors.pop(slot)
    stored = ledger.stored()
    assert [prompt.prompt_id for prompt in stored.prompts] == ["p0", "p6"] and stored.seqs.tolist() == [2]
    assert ledger.payloads.num_in_memory == 1 and not ledger.journal.has_group(1)
    ledger.close()


def test_a_new_item_in_an_old_slot_inherits_no_vector(tmp_path):
    ledger, store = open_ledger(tmp_path), ItemStore(8, 1)
    slot = put(ledger, store, 0)
    with ledger.transaction(store, lambda: STATE, lambda: None, "") as change:
        change.removed_groups += store.remove_item(slot)
        change.removed_slots.add(slot)
        change.new_slots.add(store.add_item(key_of(a_prompt(1)), a_prompt(1), "sums", 2))
    assert list(ledger.journal.vectors()) == [] and ledger.stored().prompts == [a_prompt(1)]


def test_a_journal_is_continued_by_its_run_and_set_aside_by_another(tmp_path):
    ledger, store = open_ledger(tmp_path, "a"), ItemStore(8, 2)
    put(ledger, store, 0)
    ledger.close()
    for run, num in (("a", 1), ("", 1), ("b", 0)):
        ledger = open_ledger(tmp_path, run)
        assert len(ledger.stored().slots) == num, run
        assert (tmp_path / EARLIER).exists() == (run == "b")
        ledger.close()
    # Nothing was committed by "b": its journal goes without a trace, and that of "a" stays where it was set aside.
    ledger = open_ledger(tmp_path, "c")
    put(ledger, ItemStore(8, 2), 7)
    ledger.close()
    assert earlier_prompts(tmp_path) == [a_prompt(0)]
    open_ledger(tmp_path, "d").close()
    assert earlier_prompts(tmp_path) == [a_prompt(7)]  # the one before it goes


def earlier_prompts(directory) -> list[Prompt]:
    journal = Journal(directory / EARLIER, ITEM, GROUP)
    prompts = journal.load().prompts
    journal.close()
    return prompts


def test_a_new_process_takes_over_from_the_earlier_journal(tmp_path):
    ledger, store = open_ledger(tmp_path, "a"), ItemStore(8, 2)
    put(ledger, store, 0)
    ledger.journal.snapshot(tmp_path / "copy")
    put(ledger, store, 1)
    ledger.close()
    ledger = open_ledger(tmp_path, "b")
    assert (tmp_path / EARLIER).exists()
    assert ledger.restore(tmp_path / "copy") == 1
    assert not (tmp_path / EARLIER).exists() and (tmp_path / JOURNAL).exists()
    assert len(ledger.stored().slots) == 1
    ledger.close()


def test_a_run_that_has_begun_does_not_look_at_the_earlier_journal(tmp_path):
    ledger, store = open_ledger(tmp_path, "a"), ItemStore(8, 2)
    put(ledger, store, 0)
    ledger.journal.snapshot(tmp_path / "copy")
    put(ledger, store, 1)
    ledger.close()
    ledger, store = open_ledger(tmp_path, "b"), ItemStore(8, 2)
    put(ledger, store, 5)
    assert ledger.restore(tmp_path / "copy") == 0 and (tmp_path / EARLIER).exists()  # "b" has another lineage
    ledger.close()
