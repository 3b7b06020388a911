"""Maintain the indexes of the item and group tables, so that draws do not scan the rows.

    key ──KeyMap──> slot ──> ITEM row ──group_slots──> GROUP rows ── by born       in parts (domain, uses, is_orphan)
                             ├─ by due            scheduled items and leeches     ┐
                             ├─ by last review    scheduled items                 │ a part for each domain
                             ├─ by created        waiting items                   ┘
                             └─ by created        all items

A row is removed from its queues before it changes and is inserted again afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from rllib_srl.replay.store.due_queue import DueQueue
from rllib_srl.replay.store.records import FREE, LEECH, SCHEDULED, WAITING
from rllib_srl.replay.store.tables import KeyMap, Table

Place = tuple[DueQueue, Any, float]  # queue, part, time
Domains = Collection[int] | None  # by number; None: all


@dataclass(frozen=True)
class Changes:
    """Slots of rows changed or freed since the last commit, ascending."""

    items: list[int]
    groups: list[int]


class Indexes:
    """The indexes of an item table and a group table.

    Invariant: the public state equals that of `Indexes` built anew from the same tables; `faults` checks it.
    """

    def __init__(self, items: Table, groups: Table, groups_per_item: int) -> None:
        """Index all rows of both tables.

        Raises:
            ValueError: an item has more than `groups_per_item` groups, or a group belongs to no item.
        """
        self._items, self._groups, self._groups_per_item = items, groups, groups_per_item
        self.keys = KeyMap(items)
        self.by_due, self.by_review = DueQueue(items, "due"), DueQueue(items, "last_review")
        self.waiting, self.by_age = DueQueue(items, "created"), DueQueue(items, "created")
        self.by_born = DueQueue(groups, "born")
        self.num_bytes = 0
        self._counts: list[list[int]] = []  # by domain, then status
        self._group_slots = np.full((len(items.rows), groups_per_item), -1, np.int32)  # oldest first, then -1
        self._build_items(items.live.members())
        self._build_groups(groups.live.members())

    @property
    def nbytes(self) -> int:
        """Return the bytes of all indexes."""
        return sum(queue.nbytes for queue in self._queues()) + self.keys.nbytes + self._group_slots.nbytes

    def num_items(self, status: int | None = None, domain: int | None = None) -> int:
        """Return the number of items, or of those with a status, in a domain, or both."""
        counts = self._counts if domain is None else self._counts[domain : domain + 1]
        return sum(sum(of_domain) if status is None else of_domain[status] for of_domain in counts)

    def groups_of(self, slot: int) -> list[int]:
        """Return the group slots of an item, oldest first."""
        return [group for group in self._group_slots[slot].tolist() if group >= 0]

    def add_item(self, slot: int) -> None:
        """Index an item row after it was written."""
        if slot >= len(self._group_slots):
            more = len(self._items.rows) - len(self._group_slots)
            none = np.full((more, self._groups_per_item), -1, np.int32)
            self._group_slots = np.concatenate([self._group_slots, none])
        row = self._items.rows[slot]
        self.keys.add(slot)
        self._enter(slot, self._places(row))
        self._count(row, 1)

    def remove_item(self, slot: int) -> None:
        """Remove an item row from the indexes before it is freed; its groups must have been removed."""
        row = self._items.rows[slot]
        self._count(row, -1)
        self._leave(slot, self._places(row))
        self.keys.remove(slot)

    def move_item(self, slot: int, row: np.void) -> None:
        """Overwrite the row of an item and update the indexes."""
        old, new = self._places(self._items.rows[slot]), self._places(row)
        changes_domain = row["domain"] != self._items.rows[slot]["domain"]
        groups = self.groups_of(slot) if changes_domain else []
        for group in groups:
            self._leave(group, self._places_of_group(group, self._groups.rows[group]))
        self._leave(slot, [place for place in old if place not in new])
        self._count(self._items.rows[slot], -1)
        self._items.write(slot, row)
        self._count(row, 1)
        self._enter(slot, [place for place in new if place not in old])
        for group in groups:
            self._groups.touch(group)
            self._enter(group, self._places_of_group(group, self._groups.rows[group]))

    def add_group(self, group: int) -> None:
        """Index a group row after it was written; its item must have less than `groups_per_item` groups."""
        row = self._groups.rows[group]
        siblings = [*self.groups_of(row["slot"]), group]
        self._link(row["slot"].item(), sorted(siblings, key=self._groups.columns["seq"].item))
        self._enter(group, self._places_of_group(group, row))
        self.num_bytes += row["num_bytes"].item()

    def remove_group(self, group: int) -> None:
        """Remove a group row from the indexes before it is freed."""
        row = self._groups.rows[group]
        self.num_bytes -= row["num_bytes"].item()
        self._leave(group, self._places_of_group(group, row))
        self._link(row["slot"].item(), [other for other in self.groups_of(row["slot"]) if other != group])

    def move_groups(self, groups: list[int], rows_N: np.ndarray) -> None:
        """Overwrite the rows of several groups and update the indexes."""
        for part, slots in self._parts_of_groups(groups).items():
            self.by_born.remove_many(slots, part)
        self.num_bytes += int(rows_N["num_bytes"].sum() - self._groups.columns["num_bytes"][groups].sum())
        self._groups.write_many(groups, rows_N)
        for part, slots in self._parts_of_groups(groups).items():
            self.by_born.insert_many(slots, part)

    def changed(self) -> Changes:
        """Return the rows changed or freed since the last commit."""
        return Changes(self._items.changed(), self._groups.changed())

    def undo(self) -> None:
        """Restore both tables and the indexes to the last commit."""
        changed = self.changed()
        for group in [group for group in changed.groups if group in self._groups.live]:
            self.remove_group(group)
        for slot in [slot for slot in changed.items if slot in self._items.live]:
            self.remove_item(slot)
        self._items.restore()
        self._groups.restore()
        for slot in [slot for slot in changed.items if slot in self._items.live]:
            self.add_item(slot)
        for group in [group for group in changed.groups if group in self._groups.live]:
            self.add_group(group)

    def pool(
        self, now: float, max_num: int, generator: Generator, domains: Domains, min_recall_interval: float
    ) -> np.ndarray:
        """Return candidates for a revisit; see `MemoryStore.pool`."""
        due_N = self.by_due.earliest(now, max_num, domains)
        if len(due_N) == max_num:
            return due_N
        # Dropping the due slots from a uniform random sequence leaves a uniform random sequence of the others.
        rested_N = self.by_review.sample(max_num, generator, now - min_recall_interval, parts=domains)
        others_N = rested_N[self._items.columns["due"][rested_N] > now]
        return np.concatenate([due_N, others_N[: max_num - len(due_N)]])

    def group_pool(
        self,
        now: int,
        max_num: int,
        generator: Generator,
        max_age: int,
        max_uses: int,
        domains: Domains,
        orphans: bool,
    ) -> np.ndarray:
        """Return candidates for reuse; see `MemoryStore.group_pool`."""
        parts = [
            (domain, uses, is_orphan)
            for domain, uses, is_orphan in self.by_born.parts
            if uses < max_uses and is_orphan == orphans and (domains is None or domain in domains)
        ]
        until = now + max_age if orphans else now - 1
        return self.by_born.sample(max_num, generator, until, now - max_age - 1, parts)

    def faults(self) -> Iterator[str]:
        """Yield one message for each index that does not agree with the rows."""
        items, groups = self._items, self._groups
        slots_N = items.live.members()
        if lost := [slot for slot in slots_N.tolist() if self.keys.find(items.columns["key"].item(slot)) != slot]:
            yield f"every key leads to its item: not so for slots {lost[:5]}"
        if len(self.keys) != len(items):
            yield f"there is one key an item: {len(self.keys)} keys, {len(items)} items"
        try:
            anew = Indexes(items, groups, self._groups_per_item)
        except ValueError as error:
            yield str(error)
            return
        names = ("by due", "by last review", "waiting", "by age", "by born")
        for name, mine, theirs in zip(names, self._queues(), anew._queues(), strict=True):
            parts = set(mine.parts) | set(theirs.parts)
            wrong = [part for part in parts if not np.array_equal(mine.slots_of(part), theirs.slots_of(part))]
            if wrong:
                yield f"the queue {name} holds the right slots in order: not so for parts {wrong[:5]}"
            yield from mine.faults()
        num = max(len(self._counts), len(anew._counts))
        if _padded(self._counts, num) != _padded(anew._counts, num):
            yield f"items are counted by domain and status: {self._counts}; expected {anew._counts}"
        if self.num_bytes != anew.num_bytes:
            yield f"num_bytes sums over the groups: {self.num_bytes}; expected {anew.num_bytes}"
        if not np.array_equal(self._group_slots, anew._group_slots[: len(self._group_slots)]):
            yield "every item knows its groups, oldest first"
        num_groups_N = (anew._group_slots[slots_N] >= 0).sum(axis=1)
        if not np.array_equal(items.columns["num_groups"][slots_N], num_groups_N):
            yield "num_groups is the number of an item's groups"

    def _queues(self) -> tuple[DueQueue, ...]:
        return self.by_due, self.by_review, self.waiting, self.by_age, self.by_born

    def _places(self, row: np.void) -> list[Place]:
        domain, status, created = row["domain"].item(), row["status"], row["created"].item()
        places: list[Place] = [(self.by_age, domain, created)]
        if status == WAITING:
            places.append((self.waiting, domain, created))
        if status in (SCHEDULED, LEECH):
            places.append((self.by_due, domain, row["due"].item()))
        if status == SCHEDULED:
            places.append((self.by_review, domain, row["last_review"].item()))
        return places

    def _places_of_group(self, group: int, row: np.void) -> list[Place]:
        """Return the queue entries of a group; none if all rewards are equal, as it then has no learning signal."""
        if not row["variance"] > 0:
            return []
        domain = self._items.columns["domain"].item(row["slot"])
        return [(self.by_born, (domain, row["uses"].item(), row["is_orphan"].item()), row["born"].item())]

    def _parts_of_groups(self, groups: list[int]) -> dict[Any, list[int]]:
        """Return the groups of each part of `by_born`."""
        columns: dict[str, np.ndarray] = self._groups.columns
        parts: dict[Any, list[int]] = {}
        groups_N = np.array(groups, np.int64)
        groups_N = groups_N[columns["variance"][groups_N] > 0]  # as in `_places_of_group`
        domain_N = self._items.columns["domain"][columns["slot"][groups_N]]
        of = (domain_N, columns["uses"][groups_N], columns["is_orphan"][groups_N])
        for group, part in zip(groups_N.tolist(), zip(*(column.tolist() for column in of))):
            parts.setdefault(part, []).append(group)
        return parts

    def _enter(self, slot: int, places: list[Place]) -> None:
        for queue, part, _ in places:
            queue.insert(slot, part)

    def _leave(self, slot: int, places: list[Place]) -> None:
        for queue, part, _ in places:
            queue.remove(slot, part)

    def _count(self, row: np.void, change: int) -> None:
        domain = row["domain"].item()
        while len(self._counts) <= domain:
            self._counts.append([0, 0, 0, 0])
        self._counts[domain][row["status"].item()] += change

    def _link(self, slot: int, groups: list[int]) -> None:
        self._group_slots[slot] = groups + [-1] * (self._groups_per_item - len(groups))

    def _build_items(self, slots_N: np.ndarray) -> None:
        domain_N, status_N = self._items.columns["domain"][slots_N], self._items.columns["status"][slots_N]
        for domain in np.unique(domain_N).tolist():
            in_domain_N = domain_N == domain
            of = [slots_N[in_domain_N & (status_N == status)] for status in (FREE, WAITING, SCHEDULED, LEECH)]
            self.by_age.build(domain, slots_N[in_domain_N])
            self.waiting.build(domain, of[WAITING])
            self.by_due.build(domain, np.concatenate([of[SCHEDULED], of[LEECH]]))
            self.by_review.build(domain, of[SCHEDULED])
            self._counts += [[0, 0, 0, 0] for _ in range(domain + 1 - len(self._counts))]
            self._counts[domain] = [len(slots) for slots in of]

    def _build_groups(self, groups_N: np.ndarray) -> None:
        columns = self._groups.columns
        if homeless := [s for s in np.unique(columns["slot"][groups_N]).tolist() if s not in self._items.live]:
            raise ValueError(f"every group belongs to an item: there is none at slots {homeless[:5]}")
        groups_N = groups_N[np.lexsort((columns["seq"][groups_N], columns["slot"][groups_N]))]
        slot_N = columns["slot"][groups_N]
        nth_N = np.arange(len(groups_N)) - np.searchsorted(slot_N, slot_N)
        if (most := nth_N.max(initial=-1) + 1) > self._groups_per_item:
            raise ValueError(f"an item has at most groups_per_item = {self._groups_per_item} groups: one has {most}")
        self._group_slots[slot_N, nth_N] = groups_N
        self.num_bytes = int(columns["num_bytes"][groups_N].sum())
        has_signal_N = columns["variance"][groups_N] > 0
        groups_N, slot_N = groups_N[has_signal_N], slot_N[has_signal_N]
        part_N3 = np.stack(
            [self._items.columns["domain"][slot_N], columns["uses"][groups_N], columns["is_orphan"][groups_N]], axis=1
        )
        parts, which_N = np.unique(part_N3, axis=0, return_inverse=True)
        for index, (domain, uses, is_orphan) in enumerate(parts.tolist()):
            self.by_born.build((domain, uses, bool(is_orphan)), groups_N[which_N.ravel() == index])


def _padded(counts: list[list[int]], num: int) -> list[list[int]]:
    return counts + [[0, 0, 0, 0]] * (num - len(counts))
