"""Store all items and their groups in two tables, with transactions and with draws of candidates.

    add_item, remove_item, update       ┐ rows and            pool, group_pool         ┐ slots of candidates
    add_group, remove_group, ...        ┘ columns             any_items                ┘ for a selection rule

    key -> slot ──> ITEM row ──> slots of its groups, oldest first ──> GROUP rows

    ... ─> changed() ─> items, groups ─> the journal's commit ─┬─ done:   commit()
                                                               └─ failed: rollback()
    header + rows ─> ItemStore.load                   a store that continues exactly like one never stopped

*The rows and the header are the whole state.* Draws filter whole columns and are functions of the rows, not of the
order in which rows were added and removed or of when the store was loaded. Spacing, grading and selection decide how
rows change; this module only stores the result. `items` and `groups` are read-only views: rows change only through
`update` and the other methods, because filters read copies of their fields.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from rllib_srl.replay.store.records import (
    GROUP,
    ITEM,
    Header,
    faults_of_fields,
    faults_of_groups,
    faults_of_items,
    filled,
    rows_at,
)
from rllib_srl.replay.store.tables import Table, earliest, sample
from rllib_srl.types import Prompt

_ITEM_FILTERS = ("seq", "domain", "due", "last_review")
_GROUP_FILTERS = ("seq", "slot", "born", "uses", "variance", "num_bytes")

Domains = Collection[int] | None  # by number; None: all


@dataclass(frozen=True)
class Changes:
    """Slots of rows changed or freed since the last commit, ascending."""

    items: list[int]
    groups: list[int]


class ItemStore:
    """The rows of all items and of their groups.

    Invariant: `check_valid` passes; it and `records.py` state the conditions.
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
        self._items = Table(ITEM, _ITEM_FILTERS, capacity)
        self._groups = Table(GROUP, _GROUP_FILTERS, capacity * groups_per_item)
        self._header = self._header_before = Header()
        self._slots: dict[int, int] = {}  # by key
        self._links_NG = np.full((len(self._items.rows), groups_per_item), -1, np.int32)  # groups by item, oldest first

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
        return int(self._groups.columns["num_bytes"].sum())

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tables and of the map of keys, without the prompts."""
        of_keys = sys.getsizeof(self._slots) + len(self._slots) * (sys.getsizeof(1 << 63) + sys.getsizeof(1 << 20))
        return self._items.nbytes + self._groups.nbytes + self._links_NG.nbytes + of_keys

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._slots)

    def num_by_domain(self) -> dict[str, tuple[int, int]]:
        """Return domain -> number of its items and of their groups, 0 of domains whose items are gone."""
        rows_N, num = self.items[self.slots()], len(self.domains)
        items_D = np.bincount(rows_N["domain"], minlength=num)
        groups_D = np.bincount(rows_N["domain"], rows_N["num_groups"], minlength=num).astype(np.int64)
        return dict(zip(self.domains, zip(items_D.tolist(), groups_D.tolist(), strict=True), strict=True))

    def domain_id(self, name: str) -> int | None:
        """Return the number of a domain, or None if no item of it was ever added."""
        return self.domains.index(name) if name in self.domains else None

    def slot_of(self, key: int) -> int | None:
        """Return the slot of the item with a key (`records.key_of(prompt)`), or None."""
        return self._slots.get(key)

    def prompt_of(self, slot: int) -> Prompt:
        """Return the prompt of an item.

        Raises:
            ValueError: there is no item at the slot.
        """
        prompt: Prompt = self._items.objects[self._items.check_used([slot])[0]]
        return prompt

    def slots(self) -> np.ndarray:
        """Return the slots of all items, ascending."""
        return self._items.slots()

    def holds(self, slots_N: np.ndarray) -> np.ndarray:
        """Return which slots have an item."""
        is_held_N: np.ndarray = self._items.is_used[slots_N]
        return is_held_N

    def groups_of(self, slot: int) -> list[int]:
        """Return the group slots of an item, oldest first.

        Raises:
            ValueError: there is no item at the slot.
        """
        return self._linked_to(self._items.check_used([slot])[0])

    # Items

    def add_item(self, key: int, prompt: Prompt, domain: str, now: int, **fields: Any) -> int:
        """Add an item at the smallest free slot and return the slot.

        Defaults, which `fields` override: creation, last review and due date are `now`; the posterior of its recall is
        uniform (alpha = beta = 1); all other fields are 0.

        Raises:
            ValueError: the store is full, the key is taken, or a field is unknown, not settable or of a wrong type.
        """
        faults = faults_of_fields(fields, ITEM)
        if len(self) >= self.capacity:
            faults.append(f"num_items = {len(self)}; expected less than capacity = {self.capacity}")
        if not 0 <= key < 1 << 64 or key in self._slots:
            faults.append(f"key = {key:#x}; expected one in [0, 2**64) that no item has")
        if "domain" in fields:
            faults.append(f"domain = {fields['domain']!r}; expected its name as an argument of its own")
        if faults:
            raise ValueError("; ".join(faults))
        given = {"created": now, "last_review": now, "due": now, "alpha": 1, "beta": 1} | fields
        row = filled(np.zeros(1, ITEM), given | {"key": key, "seq": self._header.next_seq})
        self._header = self._header.after_item(domain)
        row["domain"] = self.domains.index(domain)
        slot = self._items.add(row, prompt)
        if more := len(self._items.rows) - len(self._links_NG):
            self._links_NG = np.pad(self._links_NG, ((0, more), (0, 0)), constant_values=-1)
        self._slots[key] = slot
        return slot

    def remove_item(self, slot: int) -> list[int]:
        """Remove an item and its groups; return the seqs of those groups, oldest first.

        Raises:
            ValueError: there is no item at the slot.
        """
        removed = [self.remove_group(group) for group in self.groups_of(slot)]
        del self._slots[int(self._items.rows["key"][slot])]
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
        self._items.write(listed, rows_N)

    # Groups

    def add_group(self, slot: int, **fields: Any) -> tuple[int, list[int]]:
        """Add a group to an item; return its slot and the seqs of the groups evicted for it, oldest first.

        Raises:
            ValueError: there is no item, or a field is unknown, not settable or of a wrong type.
        """
        siblings = self.groups_of(slot)
        if faults := faults_of_fields(fields, GROUP):
            raise ValueError("; ".join(faults))
        row = filled(np.zeros(1, GROUP), fields)
        row["seq"], row["slot"] = self._header.next_group_seq, slot
        evicted = [self.remove_group(group) for group in siblings[: max(0, len(siblings) + 1 - self.groups_per_item)]]
        group = self._groups.add(row)
        self._link(slot, [*self._linked_to(slot), group])
        self._header = self._header.after_group()
        return group, evicted

    def remove_group(self, group: int) -> int:
        """Remove one group and return its seq.

        Raises:
            ValueError: there is no group at the slot.
        """
        group = self._groups.check_used([group])[0]
        seq: int
        seq, slot = self._groups.rows[["seq", "slot"]][group].tolist()
        self._groups.free(group)
        self._link(slot, [other for other in self._linked_to(slot) if other != group])
        return seq

    def update_groups(self, groups: Sequence[int] | np.ndarray, **fields: Any) -> None:
        """Set fields of several groups at once; arguments and errors as in `update_many`."""
        self._groups.write(*self._updated(self._groups, groups, fields))

    # Draws

    def pool(
        self,
        now: float,
        max_num: int,
        generator: Generator,
        domains: Domains = None,
        min_recall_interval: float = 1,
        is_by_due: bool = True,
    ) -> np.ndarray:
        """Return the distinct slots of candidates for a revisit: due items, and items that rested.

        The earliest due items come first. The rest of `max_num` is a uniform sample of the other items with
        last_review + min_recall_interval <= now. If at most `max_num` items qualify, all are returned. Due items are
        not tested against `min_recall_interval`: their due date already includes it.

        Args:
            now: iteration.
            max_num: at least 0.
            generator: used once, unless due items alone fill the pool or no other item has rested.
            domains: by number; None takes all.
            min_recall_interval: iterations, at least 0.
            is_by_due: whether due items come first; else, if more than `max_num` items qualify, all of the pool is a
                uniform sample.
        """
        columns = self._items.columns
        is_due_N = self._is_due(now, domains)
        is_rested_N = columns["last_review"] <= now - min_recall_interval
        is_rested_N &= self._items.is_used & self._is_in(domains)
        if not is_by_due and np.count_nonzero(is_able_N := is_due_N | is_rested_N) > max_num:
            return self._sampled(is_able_N, max_num, generator)
        due_N = self._earliest(max_num, "due", is_due_N)
        if len(due_N) == max_num:
            return due_N
        sampled_N = self._sampled(is_rested_N, max_num, generator)
        # Dropping the due slots from a uniform random sequence leaves a uniform random sequence of the others.
        others_N = sampled_N[columns["due"][sampled_N] > now]
        return np.concatenate([due_N, others_N[: max_num - len(due_N)]])

    def group_pool(
        self,
        now: int,
        max_num: int,
        generator: Generator,
        max_age: int,
        max_uses: int,
        domains: Domains = None,
        must_vary: bool = True,
    ) -> np.ndarray:
        """Return the group slots of candidates for reuse: a uniform sample, or all if there are at most `max_num`.

        Candidates have uses < max_uses and 0 < now - born <= max_age.

        Args:
            now: iteration.
            max_num: at least 0.
            generator: used once, or not at all if there are no candidates.
            max_age: iterations.
            max_uses: number of times a group may be trained on again.
            domains: of the items, by number; None takes all.
            must_vary: leave out groups whose rewards are all equal.
        """
        columns = self._groups.columns
        is_able_N = (columns["born"] < now) & (columns["born"] >= now - max_age) & (columns["uses"] < max_uses)
        if domains is not None:
            is_able_N &= self._is_in(domains)[columns["slot"]]
        is_able_N &= columns["variance"] > 0 if must_vary else self._groups.is_used
        domain_N = self._items.columns["domain"][columns["slot"][is_able_N]]
        keys_N = [columns[name][is_able_N] for name in ("uses", "born", "seq")]
        groups_K: np.ndarray = np.flatnonzero(is_able_N)[sample(max_num, generator, domain_N, *keys_N)]
        return groups_K

    def any_items(self, max_num: int, generator: Generator) -> np.ndarray:
        """Return a uniform sample of the slots of items; all if there are at most `max_num`."""
        slots_N = self.slots()
        if not len(slots_N):
            return slots_N
        return slots_N[generator.choice(len(slots_N), min(max_num, len(slots_N)), replace=False)]

    def num_due(self, now: float, domains: Domains = None) -> int:
        """Return how many items are due."""
        return int(np.count_nonzero(self._is_due(now, domains)))

    def _sampled(self, is_wanted_N: np.ndarray, max_num: int, generator: Generator) -> np.ndarray:
        """Return a uniform sample of wanted items, at most `max_num`, in random order."""
        keys_N = [self._items.columns[name][is_wanted_N] for name in ("domain", "last_review", "seq")]
        slots_K: np.ndarray = np.flatnonzero(is_wanted_N)[sample(max_num, generator, *keys_N)]
        return slots_K

    def _is_due(self, now: float, domains: Domains) -> np.ndarray:
        is_due_N: np.ndarray = (self._items.columns["due"] <= now) & self._items.is_used & self._is_in(domains)
        return is_due_N

    def _is_in(self, domains: Domains) -> np.ndarray:
        """Return whether each item row is of one of the domains; free rows may be of any."""
        if domains is None:
            return np.ones(len(self._items.rows), bool)
        return np.isin(np.arange(len(self.domains) + 1), list(domains))[self._items.columns["domain"]]

    def _earliest(self, max_num: int, time: str, is_wanted_N: np.ndarray) -> np.ndarray:
        """Return the first wanted item slots, at most `max_num`, in order of (time, seq)."""
        time_N, seq_N = self._items.columns[time], self._items.columns["seq"]
        wanted_N = time_N[is_wanted_N]
        if 0 < max_num < len(wanted_N):
            is_wanted_N = is_wanted_N & (time_N <= np.partition(wanted_N, max_num - 1)[max_num - 1])
        slots_N = np.flatnonzero(is_wanted_N)  # few more than `max_num`
        earliest_K: np.ndarray = slots_N[earliest(max_num, time_N[slots_N], seq_N[slots_N])]
        return earliest_K

    # State

    @property
    def header(self) -> Header:
        """Return the state that is not in the rows; every commit includes it."""
        return self._header

    def changed(self) -> Changes:
        """Return the rows changed or freed since the last commit."""
        return Changes(self._items.changed(), self._groups.changed())

    def commit(self) -> None:
        """Make all changes since the last commit final; call it once they are on disk."""
        self._items.commit()
        self._groups.commit()
        self._header_before = self._header

    def rollback(self) -> None:
        """Undo all changes since the last commit. Costs O(n log n)."""
        self._items.restore()
        self._groups.restore()
        self._header = self._header_before
        self._slots, self._links_NG = self._keyed(), self._linked()

    @classmethod
    def load(
        cls,
        capacity: int,
        groups_per_item: int,
        header: Header,
        items: tuple[np.ndarray, np.ndarray, Sequence[Prompt]],
        groups: np.ndarray,
    ) -> ItemStore:
        """Rebuild a store from its header and rows.

        Args:
            capacity, groups_per_item: at least as large as the rows need; may exceed those of the saved store.
            header: as returned by `header`.
            items: slots, rows and prompts.
            groups: rows; they may take other slots than in the saved store.

        Raises:
            ValueError: more rows than fit, or rows that contradict each other.
        """
        store = cls(capacity, groups_per_item)
        if len(items[0]) > capacity:
            raise ValueError(f"num_items = {len(items[0])}; expected at most capacity = {capacity}")
        store._items.load(*items)
        store._groups.load(np.arange(len(groups)), groups)
        store._slots, store._links_NG = store._keyed(), store._linked()
        store._header = store._header_before = header
        return store

    def check_valid(self) -> None:
        """Check every invariant. Costs O(n log n).

        Raises:
            ValueError: naming every broken invariant.
        """
        header, rows_N = self._header, self._items.rows[self._items.is_used]
        faults = [f"items: {fault}" for fault in self._items.faults(header.next_seq)]
        faults += [f"groups: {fault}" for fault in self._groups.faults(header.next_group_seq)]
        if len(rows_N) > self.capacity:
            faults.append(f"there are at most capacity = {self.capacity} items: {len(rows_N)}")
        if not all(isinstance(self._items.objects[slot], Prompt) for slot in self.slots().tolist()):
            faults.append("every item has a prompt")
        if len(rows_N) > len(self._slots) or self._slots != self._keyed():
            faults.append("every key leads to its item, and no other key to any")
        faults += faults_of_items(rows_N, len(header.domains))
        faults += faults_of_groups(self._groups.rows[self._groups.is_used])
        try:
            if not np.array_equal(self._links_NG, links_NG := self._linked()):
                faults.append("every item leads to its groups, oldest first")
            if not np.array_equal(self._items.rows["num_groups"], (links_NG >= 0).sum(axis=1)):
                faults.append("num_groups is the number of an item's groups")
        except ValueError as error:
            faults.append(str(error))
        if faults:
            raise ValueError("the memory is not valid: " + "; ".join(faults))

    def _updated(self, table: Table, slots: Sequence[int] | np.ndarray, fields: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the slots and changed copies of their rows."""
        if faults := faults_of_fields(fields, table.rows.dtype):
            raise ValueError("; ".join(faults))
        listed = table.check_used(slots)
        return listed, filled(rows_at(table.rows, listed), fields)

    # Keys, and the groups of each item

    def _keyed(self) -> dict[int, int]:
        slots_N = self.slots()
        return dict(zip(self._items.rows["key"][slots_N].tolist(), slots_N.tolist(), strict=True))

    def _linked(self) -> np.ndarray:
        """Return the slots of every item's groups from the groups' rows.

        Raises:
            ValueError: an item has more groups than `groups_per_item`, or a group belongs to no item.
        """
        groups_N, columns = self._groups.slots(), self._groups.columns
        groups_N = groups_N[np.lexsort((columns["seq"][groups_N], columns["slot"][groups_N]))]
        slot_N = columns["slot"][groups_N]
        is_row_N = (slot_N >= 0) & (slot_N < len(self._items.rows))
        if homeless := slot_N[~(is_row_N & self._items.is_used[slot_N * is_row_N])][:5].tolist():
            raise ValueError(f"every group belongs to an item: there is none at slots {homeless}")
        nth_N = np.arange(len(groups_N)) - np.searchsorted(slot_N, slot_N)
        links_NG = np.full((len(self._items.rows), self._links_NG.shape[1]), -1, np.int32)
        if (most := nth_N.max(initial=-1) + 1) > links_NG.shape[1]:
            raise ValueError(f"an item has at most groups_per_item = {links_NG.shape[1]} groups: one has {most}")
        links_NG[slot_N, nth_N] = groups_N
        return links_NG

    def _linked_to(self, slot: int) -> list[int]:
        return [group for group in self._links_NG[slot].tolist() if group >= 0]

    def _link(self, slot: int, groups: list[int]) -> None:
        """Set the groups of an item, oldest first."""
        self._links_NG[slot] = groups + [-1] * (self._links_NG.shape[1] - len(groups))
        self._items.touch([slot])
        self._items.rows["num_groups"][slot] = len(groups)
