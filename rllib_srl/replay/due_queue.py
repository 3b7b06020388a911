"""Slots by part (a domain) and, within a part, in the order of a time: what is due, rested, waiting or recent.

    insert(slot, part) ─┐
    remove(slot, part) ─┴─> part -> SlotOrder ─┬─> earliest(now, n)         the first n in order, not removed
                                               └─> sample(n, after, until)  n of those between two times, uniformly

What is drawn depends on the rows and the generator alone, never on the order in which rows came and went.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from rllib_srl.replay.slot_order import BLOCK, SlotOrder
from rllib_srl.replay.tables import Table

_MANY = 128  # a share of a part, 1 / _MANY, from which building it anew is faster than slot by slot


class DueQueue:
    """Slots of a table by part and, within each part, in ascending order of (time, seq).

    Invariant: no part is empty. Parts are taken in ascending order wherever an order of parts matters.
    """

    def __init__(self, table: Table, time: str = "due") -> None:
        """Start empty.

        Args:
            table: has the columns `time` and `seq`.
            time: name of a column of numbers, none of them NaN.
        """
        self._table, self._time = table, time
        self._parts: dict[Any, SlotOrder] = {}

    def __len__(self) -> int:
        """Return the number of slots in all parts."""
        return sum(map(len, self._parts.values()))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(order.nbytes for order in self._parts.values())

    @property
    def parts(self) -> list[Any]:
        """Return the parts that have slots, ascending."""
        return sorted(self._parts)

    def insert(self, slot: int, part: Hashable) -> None:
        """Insert a slot into a part, at its row's time."""
        if part not in self._parts:
            self._parts[part] = SlotOrder(self._table, self._time)
        self._parts[part].insert(slot)

    def remove(self, slot: int, part: Hashable) -> None:
        """Remove a slot from its part, before its row's time changes.

        Raises:
            ValueError: the slot is not in that part, or not at its row's time.
        """
        if part not in self._parts:
            raise ValueError(f"part = {part!r}; expected one of {self.parts}")
        self._parts[part].remove(slot)
        if not len(self._parts[part]):
            del self._parts[part]

    def insert_many(self, slots: list[int], part: Hashable) -> None:
        """Insert slots into a part, at their rows' times."""
        if _MANY * len(slots) < len(self._parts.get(part, ())):
            for slot in slots:
                self.insert(slot, part)
        else:
            self.build(part, np.concatenate([self.slots_of(part), np.array(slots, np.int64)]))

    def remove_many(self, slots: list[int], part: Hashable) -> None:
        """Remove slots from their part, before their rows' times change.

        Raises:
            ValueError: some are not in that part; then, of many, none is removed.
        """
        if _MANY * len(slots) < len(self._parts.get(part, ())):
            for slot in slots:
                self.remove(slot, part)
            return
        before_N = self.slots_of(part)
        gone_M = np.sort(slots)
        place_N = np.minimum(np.searchsorted(gone_M, before_N), len(gone_M) - 1)  # `np.isin`, in a third of its time
        left_N = before_N[gone_M[place_N] != before_N]
        if len(before_N) - len(left_N) < len(slots):
            raise ValueError(f"slots = {slots[:5]}; expected slots of part {part!r}")
        self._parts.pop(part, None)
        self.build(part, left_N, is_ordered=True)

    def build(self, part: Hashable, slots_N: np.ndarray, is_ordered: bool = False) -> None:
        """Make these slots a whole part, at once."""
        if len(slots_N):
            self._parts[part] = SlotOrder(self._table, self._time, slots_N, is_ordered)

    def slots_of(self, part: Hashable) -> np.ndarray:
        """Return all slots of a part in order. Costs O(n)."""
        order = self._parts.get(part)
        return np.empty(0, np.int64) if order is None else order.slots()

    def faults(self) -> Iterator[str]:
        """Yield what is broken, in words."""
        for part, order in self._parts.items():
            if not len(order):
                yield f"no part is empty: {part} is"
            yield from (f"{fault} (part {part} by {self._time})" for fault in order.faults())

    def earliest(self, now: float, max_num: int, parts: Collection[Hashable] | None = None) -> np.ndarray:
        """Return the slots with a time <= now, at most `max_num`, in order of (time, seq), without removing them.

        Args:
            now: in the unit of the times.
            max_num: at least 0.
            parts: where to look; None looks everywhere.

        Runs of each part are taken in order of their first keys. All of a part but its last run lies before the
        first key of whatever is left, so the search ends when those make up `max_num`.
        """
        orders = [(order, stop) for order, _, stop in self._windows(-math.inf, now, parts)]
        run = max(BLOCK, max_num // (4 * len(orders))) if len(orders) > 1 else max_num
        heads = [(order.key_at(0), index, 0) for index, (order, _) in enumerate(orders)]
        heapify(heads)
        taken, num_certain = [np.empty(0, np.int64)], 0
        while heads:
            _, index, start = heappop(heads)
            num_certain += run if start else 0
            if num_certain >= max_num:
                break
            order, stop = orders[index]
            end = min(start + run, stop)
            taken.append(order.at(np.arange(start, end)))
            if end < stop:
                heappush(heads, (order.key_at(end), index, end))
        slots_N = np.concatenate(taken)
        if len(orders) > 1:
            # NumPy orders complex numbers by their real and then their imaginary part, and merges what is in order.
            key_N = np.empty(len(slots_N), np.complex128)
            key_N.real, key_N.imag = self._table.columns[self._time][slots_N], self._table.columns["seq"][slots_N]
            slots_N = slots_N[np.argsort(key_N, kind="stable")]
        return slots_N[:max_num]

    def count(self, until: float, parts: Collection[Hashable] | None = None) -> int:
        """Return how many slots have a time <= until."""
        return sum(stop - start for _, start, stop in self._windows(-math.inf, until, parts))

    def sample(
        self,
        max_num: int,
        generator: np.random.Generator,
        until: float,
        after: float = -math.inf,
        parts: Collection[Hashable] | None = None,
    ) -> np.ndarray:
        """Draw distinct slots with after < time <= until, all equally likely, in random order; all if they are fewer.

        Args:
            max_num: at least 0.
            generator: drawn from once, or not at all when there is nothing to draw.
            until, after: in the unit of the times.
            parts: where to look; None looks everywhere.
        """
        windows = list(self._windows(after, until, parts))
        ends = np.cumsum([stop - start for _, start, stop in windows], dtype=np.int64)
        num = min(max_num, int(ends[-1])) if windows else 0
        slots_N = np.empty(num, np.int64)
        if num == 0:
            return slots_N
        rank_N = generator.choice(int(ends[-1]), num, replace=False)
        index_N = np.searchsorted(ends, rank_N, side="right")
        for index in np.unique(index_N).tolist():
            order, _, stop = windows[index]
            of_part_N = index_N == index
            slots_N[of_part_N] = order.at(rank_N[of_part_N] - ends.item(index) + stop)
        return slots_N

    def _windows(
        self, after: float, until: float, parts: Collection[Hashable] | None
    ) -> Iterator[tuple[SlotOrder, int, int]]:
        """Yield the order of each part, and between which ranks its times are in (after, until]."""
        for part in self.parts if parts is None else sorted(self._parts.keys() & set(parts)):
            order = self._parts[part]
            start, stop = order.rank(after), order.rank(until)
            if start < stop:
                yield order, start, stop
