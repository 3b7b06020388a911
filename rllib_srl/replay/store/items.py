"""Store all items and their groups in two tables, with transactions and with draws that do not scan them.

    add_item, remove_item, update       ┐ rows and their       pool, group_pool        ┐ slots of candidates
    add_group, remove_group, ...        ┘ indexes              oldest, waiting, ...    ┘ for a selection rule

    ... ─> changed() ─> item_row, group_row ─> the journal's commit ─┬─ done:   commit()
                                                                     └─ failed: rollback()
    header + rows ─> MemoryStore.load                   a store that continues exactly like one never stopped

*The rows and the header are the whole state.* Indexes and draws are functions of them. They do not depend on the
order in which rows were added and removed, or on when the store was loaded. Spacing, grading and selection decide how
rows change; this module only stores the result. `items` and `groups` are read-only views: rows change only through
`update` and the other methods, because a change may move a row in the indexes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator

from rllib_srl.replay.store.indexes import Changes, Domains, Indexes
from rllib_srl.replay.store.records import (
    GROUP,
    ITEM,
    WAITING,
    Header,
    faults_of_fields,
    faults_of_groups,
    faults_of_items,
    filled,
    pack_item,
    rows_at,
    unpack_item,
)
from rllib_srl.replay.store.tables import Table
from rllib_srl.types import Prompt

_INDEXED = {"status", "domain", "due", "last_review", "created"}


class MemoryStore:
    """The rows of all items and of their groups.

    Invariant: `check_valid` passes; `indexes.py` and `records.py` state the conditions.
    """

    def __init__(self, capacity: int, groups_per_item: int) -> None:
        """Create an empty store.

        Args:
            capacity: items, at least 1.
            groups_per_item: number of newest groups kept of each item, at least 1.

        Raises:
            ValueError: naming every argument below 1.
        """
        sizes = {"capacity": capacity, "groups_per_item": groups_per_item}
        if faults := [f"{name} = {value!r}; expected at least 1" for name, value in sizes.items() if value < 1]:
            raise ValueError("; ".join(faults))
        self.capacity, self.groups_per_item = capacity, groups_per_item
        self._items, self._groups = Table(ITEM, capacity), Table(GROUP, capacity * groups_per_item)
        self._index = Indexes(self._items, self._groups, groups_per_item)
        self._header = self._header_before = Header()

    # Contents

    @property
    def items(self) -> np.ndarray:
        """Return a read-only view of the item table, free rows included; stale after `add_item`, which may move it."""
        return self._items.view

    @property
    def groups(self) -> np.ndarray:
        """Return a read-only view of the group table, free rows included; stale after `add_group`."""
        return self._groups.view

    @property
    def domains(self) -> tuple[str, ...]:
        """Return the names of all domains seen so far, to which an item's `domain` is an index; positions are final."""
        return self._header.domains

    @property
    def num_groups(self) -> int:
        """Return the number of groups."""
        return len(self._groups)

    @property
    def num_bytes(self) -> int:
        """Return the sum of the groups' `num_bytes`."""
        return self._index.num_bytes

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tables and indexes, without the prompts."""
        return self._items.nbytes + self._groups.nbytes + self._index.nbytes

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def num_items(self, status: int | None = None, domain: int | None = None) -> int:
        """Return the number of items, or of those with a status, in a domain, or both."""
        return self._index.num_items(status, domain)

    def domain_id(self, name: str) -> int | None:
        """Return the number of a domain, or None if no item of it was ever added."""
        return self.domains.index(name) if name in self.domains else None

    def slot_of(self, key: int) -> int | None:
        """Return the slot of the item with a key (`records.key_of(prompt)`), or None."""
        return self._index.keys.find(key)

    def prompt_of(self, slot: int) -> Prompt:
        """Return the prompt of an item.

        Raises:
            ValueError: there is no item at the slot.
        """
        return self._items.object_of(self._items.check_live([slot])[0])

    def slots(self) -> np.ndarray:
        """Return the slots of all items, ascending. Costs O(n)."""
        return self._items.live.members()

    def groups_of(self, slot: int) -> list[int]:
        """Return the group slots of an item, oldest first."""
        return self._index.groups_of(self._items.check_live([slot])[0])

    # Items

    def add_item(self, key: int, prompt: Prompt, domain: str, now: int, **fields: Any) -> int:
        """Add an item at the smallest free slot and return the slot.

        Defaults, which `fields` override: the status is waiting; creation, last review and due date are `now`; the
        posterior of its recall is uniform (alpha = beta = 1); all other fields are 0.

        Raises:
            ValueError: the store is full, the key is taken, or a field is unknown, not settable or of a wrong type.
        """
        faults = faults_of_fields(fields, ITEM)
        if len(self) >= self.capacity:
            faults.append(f"num_items = {len(self)}; expected less than capacity = {self.capacity}")
        if not 0 <= key < 1 << 64 or self.slot_of(key) is not None:
            faults.append(f"key = {key:#x}; expected one in [0, 2**64) that no item has")
        if "domain" in fields:
            faults.append(f"domain = {fields['domain']!r}; expected its name as an argument of its own")
        if faults:
            raise ValueError("; ".join(faults))
        given = {"status": WAITING, "created": now, "last_review": now, "due": now, "alpha": 1, "beta": 1} | fields
        row = filled(np.zeros((), ITEM), given | {"key": key, "seq": self._header.next_seq})
        self._header = self._header.after_item(domain)
        row["domain"] = self.domains.index(domain)
        slot = self._items.free_slot()
        self._items.write(slot, row, prompt)
        self._index.add_item(slot)
        return slot

    def remove_item(self, slot: int) -> list[int]:
        """Remove an item and its groups; return the seqs of those groups, oldest first.

        Raises:
            ValueError: there is no item at the slot.
        """
        slot = self._items.check_live([slot])[0]
        removed = [self.remove_group(group) for group in self.groups_of(slot)]
        self._index.remove_item(slot)
        self._items.free(slot)
        return removed

    def update(self, slot: int, **fields: Any) -> None:
        """Set fields of one item; see `update_many`."""
        self.update_many([slot], **fields)

    def update_many(self, slots: Sequence[int] | np.ndarray, **fields: Any) -> None:
        """Set fields of several items at once.

        Args:
            slots: distinct.
            fields: by name, an array with one entry per slot or one value for all; `domain` by number.

        Raises:
            ValueError: slots without an item or given twice, fields that are unknown, not settable or of a wrong
                type; then nothing has changed.
        """
        listed, rows_N = self._updated(self._items, slots, fields)
        if "domain" in fields and not ((rows_N["domain"] >= 0) & (rows_N["domain"] < len(self.domains))).all():
            raise ValueError(f"domain = {fields['domain']!r}; expected numbers in [0, {len(self.domains)})")
        write = self._index.move_item if fields.keys() & _INDEXED else self._items.write
        for slot, row in zip(listed, rows_N):
            write(slot, row)

    # Groups

    def add_group(self, slot: int, **fields: Any) -> tuple[int, list[int]]:
        """Add a group to an item; return its slot and the seqs of the groups evicted for it, oldest first.

        Orphans are evicted first, so that the run keeps the same groups of its own as it would without orphans.

        Raises:
            ValueError: there is no item, a field is unknown, not settable or of a wrong type, or the group is an
                orphan and its item already has `groups_per_item` groups.
        """
        slot = self._items.check_live([slot])[0]
        if faults := faults_of_fields(fields, GROUP):
            raise ValueError("; ".join(faults))
        row = filled(np.zeros((), GROUP), fields)
        row["seq"], row["slot"] = self._header.next_group_seq, slot
        is_orphan = self._groups.columns["is_orphan"]
        siblings = self._index.groups_of(slot)
        surplus = len(siblings) + 1 - self.groups_per_item
        if surplus > 0 and row["is_orphan"]:
            raise ValueError(f"slot = {slot}; expected an item with less than {self.groups_per_item} groups")
        going = sorted(siblings, key=lambda group: not is_orphan[group])[: max(surplus, 0)]
        evicted = [self.remove_group(group) for group in siblings if group in going]
        group = self._groups.free_slot()
        self._groups.write(group, row)
        self._index.add_group(group)
        self._count_groups(slot)
        self._header = self._header.after_group()
        return group, evicted

    def remove_group(self, group: int) -> int:
        """Remove one group and return its seq.

        Raises:
            ValueError: there is no group at the slot.
        """
        group = self._groups.check_live([group])[0]
        seq, slot = self._groups.columns["seq"].item(group), self._groups.columns["slot"].item(group)
        self._index.remove_group(group)
        self._groups.free(group)
        self._count_groups(slot)
        return seq

    def update_groups(self, groups: Sequence[int] | np.ndarray, **fields: Any) -> None:
        """Set fields of several groups at once; arguments and errors as in `update_many`."""
        listed, rows_N = self._updated(self._groups, groups, fields)
        self._index.move_groups(listed, rows_N)

    # Draws

    def pool(
        self, now: float, max_num: int, generator: Generator, domains: Domains = None, min_recall_interval: float = 1
    ) -> np.ndarray:
        """Return the distinct slots of candidates for a revisit.

        The earliest due items, leeches included, come first. The rest of `max_num` is a uniform sample of the other
        scheduled items with last_review + min_recall_interval <= now. If at most `max_num` items qualify, all are
        returned. Due items are not tested against `min_recall_interval`: their due date already includes it.

        Args:
            now: iteration.
            max_num: at least 0.
            generator: used once, unless due items alone fill the pool or no other item has rested.
            domains: by number; None takes all.
            min_recall_interval: iterations, at least 0.
        """
        return self._index.pool(now, max_num, generator, domains, min_recall_interval)

    def group_pool(
        self,
        now: int,
        max_num: int,
        generator: Generator,
        max_age: int,
        max_uses: int,
        domains: Domains = None,
        orphans: bool = False,
    ) -> np.ndarray:
        """Return the group slots of candidates for reuse: a uniform sample, or all if there are at most `max_num`.

        Candidates have variance > 0 (others have no learning signal), uses < max_uses, |now - born| <= max_age, and
        born < now. The last condition does not apply to orphans: `born` of an orphan may lie ahead of a restored run.

        Args:
            now: iteration.
            max_num: at least 0.
            generator: used once, or not at all if there are no candidates.
            max_age: iterations.
            max_uses: number of times a group may be trained on again.
            domains: of the items, by number; None takes all.
            orphans: only orphans if True, only other groups if False.
        """
        return self._index.group_pool(now, max_num, generator, max_age, max_uses, domains, orphans)

    def waiting(self, max_num: int, domains: Domains = None) -> np.ndarray:
        """Return the slots of at most `max_num` waiting items, oldest first."""
        return self._index.waiting.earliest(math.inf, max_num, domains)

    def oldest(self, max_num: int, domains: Domains = None) -> np.ndarray:
        """Return the slots of at most `max_num` items of any status, oldest first."""
        return self._index.by_age.earliest(math.inf, max_num, domains)

    def any_items(self, max_num: int, generator: Generator) -> np.ndarray:
        """Return a uniform sample of the slots of items of any status; all if there are at most `max_num`."""
        return self._items.live.sample(max_num, generator)

    def num_due(self, now: float, domains: Domains = None) -> int:
        """Return how many scheduled items and leeches are due."""
        return self._index.by_due.count(now, domains)

    # State

    @property
    def header(self) -> Header:
        """Return the state that is not in the rows; every commit includes it."""
        return self._header

    def changed(self) -> Changes:
        """Return the rows changed or freed since the last commit."""
        return self._index.changed()

    def item_row(self, slot: int) -> bytes | None:
        """Return an item as bytes, or None if the slot is free."""
        return pack_item(self._items.rows[slot], self._items.object_of(slot)) if slot in self._items.live else None

    def group_row(self, group: int) -> bytes | None:
        """Return a group as bytes, or None if the slot is free."""
        return self._groups.rows[group].tobytes() if group in self._groups.live else None

    def commit(self) -> None:
        """Make all changes since the last commit final; call it once they are on disk."""
        self._items.commit()
        self._groups.commit()
        self._header_before = self._header

    def rollback(self) -> None:
        """Undo all changes since the last commit."""
        self._index.undo()
        self._header = self._header_before

    @classmethod
    def load(
        cls,
        capacity: int,
        groups_per_item: int,
        header: Header,
        items: Mapping[int, bytes],
        groups: Mapping[int, bytes],
    ) -> MemoryStore:
        """Rebuild a store from its header and rows.

        Args:
            capacity, groups_per_item: at least as large as the rows need; may exceed those of the saved store.
            header: as returned by `header`.
            items: slot -> bytes from `item_row`.
            groups: slot -> bytes from `group_row`.

        Raises:
            ValueError: more rows than fit, or rows that contradict each other.
        """
        store = cls(capacity, groups_per_item)
        if len(items) > capacity:
            raise ValueError(f"num_items = {len(items)}; expected at most capacity = {capacity}")
        unpacked = {slot: unpack_item(row) for slot, row in items.items()}
        store._items.load(
            {slot: record for slot, (record, _) in unpacked.items()},
            {slot: prompt for slot, (_, prompt) in unpacked.items()},
        )
        store._groups.load(groups)
        store._index = Indexes(store._items, store._groups, groups_per_item)
        store._header = store._header_before = header
        return store

    def check_valid(self) -> None:
        """Check every invariant. Costs O(n log n).

        Raises:
            ValueError: naming every broken invariant.
        """
        slots_N, header = self.slots(), self._header
        rows_N, groups_N = self._items.rows[slots_N], self._groups.rows[self._groups.live.members()]
        faults = [f"items: {fault}" for fault in self._items.faults(header.next_seq)]
        faults += [f"groups: {fault}" for fault in self._groups.faults(header.next_group_seq)]
        if len(self) > self.capacity:
            faults.append(f"there are at most capacity = {self.capacity} items: {len(self)}")
        if not all(isinstance(self._items.object_of(slot), Prompt) for slot in slots_N.tolist()):
            faults.append("every item has a prompt")
        faults += faults_of_items(rows_N, len(header.domains))
        faults += [*faults_of_groups(groups_N), *self._index.faults()]
        if faults:
            raise ValueError("the memory is not valid: " + "; ".join(faults))

    def _updated(self, table: Table, slots: Sequence[int] | np.ndarray, fields: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the slots and changed copies of their rows."""
        if faults := faults_of_fields(fields, table.rows.dtype):
            raise ValueError("; ".join(faults))
        listed = table.check_live(slots)
        return listed, filled(rows_at(table.rows, listed), fields)

    def _count_groups(self, slot: int) -> None:
        self._items.touch(slot)
        self._items.columns["num_groups"][slot] = len(self._index.groups_of(slot))
