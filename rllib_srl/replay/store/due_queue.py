"""Keep the slots of a table ordered by time within each part (a domain), to find due, rested or waiting items.

    insert(slot, part) ─┐
    remove(slot, part) ─┴─> part -> SlotOrder ─┬─> earliest(now, n)         the first n in order, not removed
                                               └─> sample(n, after, until)  n of those between two times, uniformly

A `SlotOrder` holds the slots of one part in ascending order of (time, seq), in blocks of at most 512:

    |3 9 1| |7 2| |5 8 0 4|    slots, 4 bytes each; (time, seq) are read from the table
     └ first key of each block: one bisection finds the block, a second one the place in it

A binary heap finds only the earliest slot. Ranks also give the first n slots, the number of slots between two times,
and a uniform sample of those.

Results depend on the rows and the generator alone, not on the order of insertions and removals or on how the blocks
are cut. `seq` breaks ties.

Costs: insert and remove take O(log n) reads of the table and one move within a block; n slots at once take O(n) numpy
work. Deletion is not lazy: adjacent blocks that together fill at most half a block are joined, so there are at most
4 n / 512 + 1 blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from rllib_srl.replay.store.tables import Table

BLOCK = 512
Key = tuple[float, float]  # time, seq


class SlotOrder:
    """Slots of a table in ascending order of (time, seq).

    Invariant: `faults` yields nothing. Remove a slot *before* its row's time or seq changes; insert it again *after*.
    """

    def __init__(self, table: Table, time: str, slots_N: np.ndarray | None = None, is_ordered: bool = False) -> None:
        """Order some slots, or none.

        Args:
            table: a table with the columns `time` and `seq`.
            time: name of a numeric column.
            slots_N: distinct slots.
            is_ordered: whether `slots_N` is already in order.
        """
        self._table, self._time = table, time
        ordered_N = np.empty(0, np.int64) if slots_N is None else slots_N
        if not is_ordered:
            columns = table.columns
            ordered_N = ordered_N[np.lexsort((columns["seq"][ordered_N], columns[time][ordered_N]))]
        num = -(-len(ordered_N) // BLOCK)
        self._blocks = np.zeros((max(1, num), BLOCK), np.int32)
        self._blocks.ravel()[: len(ordered_N)] = ordered_N
        self._sizes = np.zeros(max(1, num), np.int32)  # by block
        self._sizes[:num] = BLOCK
        if num:
            self._sizes[num - 1] = len(ordered_N) - BLOCK * (num - 1)
        self._order = np.arange(max(1, num), dtype=np.int32)  # blocks in use, then free ones
        self._num_blocks, self._num = num, len(ordered_N)
        self._firsts: list[Key] = [self._key(slot) for slot in ordered_N[::BLOCK].tolist()]

    def __len__(self) -> int:
        """Return the number of slots."""
        return self._num

    @property
    def nbytes(self) -> int:
        """Return the bytes of the blocks and of their directory."""
        return self._blocks.nbytes + self._sizes.nbytes + self._order.nbytes + 120 * len(self._firsts)

    def insert(self, slot: int) -> None:
        """Insert a slot at its row's (time, seq)."""
        key = self._key(slot)
        at = max(bisect_right(self._firsts, key) - 1, 0)
        if not self._num_blocks:
            self._open(0, key)
        place = self._place(at, key)
        if self._sizes.item(self._order.item(at)) == BLOCK:
            at, place = self._split(at, place, key)
        block = self._order.item(at)
        size, slots = self._sizes.item(block), self._blocks[block]
        slots[place + 1 : size + 1] = slots[place:size]
        slots[place] = slot
        self._sizes[block] = size + 1
        self._num += 1
        if place == 0:
            self._firsts[at] = key

    def remove(self, slot: int) -> None:
        """Remove a slot, whose row still has the (time, seq) it was inserted at.

        Raises:
            ValueError: the slot is not at the position of its row's (time, seq).
        """
        key = self._key(slot)
        at = max(bisect_right(self._firsts, key) - 1, 0)
        block = self._order.item(at)
        size, slots = self._sizes.item(block), self._blocks[block]
        place = self._place(at, key)
        if not self._num_blocks or place == size or slots.item(place) != slot:
            raise ValueError(f"slot = {slot}; expected one that is queued at its row's {self._time}, {key[0]}")
        slots[place : size - 1] = slots[place + 1 : size]
        self._sizes[block] = size - 1
        self._num -= 1
        if size == 1:
            self._close(at)
            return
        if place == 0:
            self._firsts[at] = self._key(slots.item(0))
        if size <= BLOCK // 2:
            self._join(at)

    def rank(self, time: float) -> int:
        """Return how many slots have a time <= `time`."""
        key = (time, math.inf)
        at = bisect_right(self._firsts, key) - 1
        if at < 0:
            return 0
        return (int(self._sizes[self._order[:at]].sum()) if at else 0) + self._place(at, key)

    def slots(self) -> np.ndarray:
        """Return all slots in order, int64."""
        blocks = self._order[: self._num_blocks].tolist()
        parts = [self._blocks[block, : self._sizes.item(block)] for block in blocks]
        return np.concatenate(parts or [np.empty(0, np.int32)]).astype(np.int64)

    def at(self, ranks_N: np.ndarray) -> np.ndarray:
        """Return the slots at some ranks, each in [0, len(self)), int64."""
        order = self._order[: self._num_blocks]
        ends = np.cumsum(self._sizes[order], dtype=np.int64)
        block_N = np.searchsorted(ends, ranks_N, side="right")
        starts = ends - self._sizes[order]
        return self._blocks[order[block_N], ranks_N - starts[block_N]].astype(np.int64)

    def key_at(self, rank: int) -> Key:
        """Return the (time, seq) at a rank."""
        return self._key(self.at(np.array([rank])).item())

    def faults(self) -> Iterator[str]:
        """Yield one message for each broken invariant."""
        sizes = self._sizes[self._order[: self._num_blocks]]
        slots = self.slots().tolist()
        keys = [self._key(slot) for slot in slots]
        if sizes.sum() != self._num or (sizes < 1).any() or (sizes > BLOCK).any():
            yield f"blocks of 1 to {BLOCK} slots hold {self._num} slots: their sizes are {sizes.tolist()}"
        elif any(keys[i] >= keys[i + 1] for i in range(len(keys) - 1)):
            yield f"slots are in ascending order of ({self._time}, seq)"
        elif self._firsts != [keys[start] for start in (np.cumsum(sizes) - sizes).tolist()]:
            yield "the first key of every block is known"
        if self._num_blocks > 4 * self._num / BLOCK + 1:
            yield f"{self._num} slots take at most {4 * self._num // BLOCK + 1} blocks: there are {self._num_blocks}"

    def _key(self, slot: int) -> Key:
        columns = self._table.columns
        return columns[self._time].item(slot), columns["seq"].item(slot)

    def _place(self, at: int, key: Key) -> int:
        """Return where `key` is, or would be, in the block at a place of the order."""
        block, columns = self._order.item(at), self._table.columns
        time, seq = key
        slots, time_of, seq_of = self._blocks[block].item, columns[self._time].item, columns["seq"].item
        low, high = 0, self._sizes.item(block)
        if high and at == self._num_blocks - 1 and self._key(slots(high - 1)) < key:
            return high  # times mostly grow, so most slots come last
        # Two numeric comparisons, written out: bisect with tuples as keys takes twice as long.
        while low < high:
            middle = (low + high) // 2
            slot = slots(middle)
            other = time_of(slot)
            if other < time or (other == time and seq_of(slot) < seq):
                low = middle + 1
            else:
                high = middle
        return low

    def _split(self, at: int, place: int, key: Key) -> tuple[int, int]:
        """Split a full block; return the block and the place where `key` now belongs.

        A key after all others opens a new block, so that slots inserted in order fill their blocks.
        """
        if place == BLOCK and at == self._num_blocks - 1:
            self._open(at + 1, key)
            return at + 1, 0
        half, old = BLOCK // 2, self._order.item(at)
        new = self._open(at + 1, self._key(self._blocks.item(old, half)))
        self._blocks[new, : BLOCK - half] = self._blocks[old, half:]
        self._sizes[old], self._sizes[new] = half, BLOCK - half
        return (at, place) if place < half else (at + 1, place - half)

    def _join(self, at: int) -> None:
        """Move a block into its left or right neighbour if both together fill at most half a block."""
        for left in (at - 1, at):
            if 0 <= left < self._num_blocks - 1:
                into, out = self._order.item(left), self._order.item(left + 1)
                size, more = self._sizes.item(into), self._sizes.item(out)
                if size + more <= BLOCK // 2:
                    self._blocks[into, size : size + more] = self._blocks[out, :more]
                    self._sizes[into] = size + more
                    self._close(left + 1)
                    return

    def _open(self, at: int, first: Key) -> int:
        """Insert an empty block at a place of the order; return its number."""
        num = self._num_blocks
        if num == len(self._order):
            more = max(1, num // 2)
            self._blocks = np.concatenate([self._blocks, np.zeros((more, BLOCK), np.int32)])
            self._sizes = np.concatenate([self._sizes, np.zeros(more, np.int32)])
            self._order = np.concatenate([self._order, np.arange(num, num + more, dtype=np.int32)])
        block = self._order.item(num)
        self._order[at + 1 : num + 1] = self._order[at:num]
        self._order[at] = block
        self._sizes[block] = 0
        self._firsts.insert(at, first)
        self._num_blocks += 1
        return block

    def _close(self, at: int) -> None:
        """Remove the block at a place from the order; the next `_open` reuses it."""
        block, num = self._order.item(at), self._num_blocks
        self._order[at : num - 1] = self._order[at + 1 : num]
        self._order[num - 1] = block
        self._sizes[block] = 0
        del self._firsts[at]
        self._num_blocks -= 1


_MANY = 128  # from 1 / _MANY of a part, rebuilding the part is faster than slot by slot


class DueQueue:
    """Slots of a table by part and, within each part, in ascending order of (time, seq).

    Invariant: no part is empty. Where the order of parts matters, it is ascending.
    """

    def __init__(self, table: Table, time: str = "due") -> None:
        """Create an empty queue.

        Args:
            table: a table with the columns `time` and `seq`.
            time: name of a numeric column without NaN.
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
            ValueError: some slots are not in that part. If the slots are at least 1 / _MANY of the part, none is
                removed; otherwise those before the first unknown one are.
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
        """Replace a part by these slots; do nothing if there are none."""
        if len(slots_N):
            self._parts[part] = SlotOrder(self._table, self._time, slots_N, is_ordered)

    def slots_of(self, part: Hashable) -> np.ndarray:
        """Return all slots of a part in order. Costs O(n)."""
        order = self._parts.get(part)
        return np.empty(0, np.int64) if order is None else order.slots()

    def faults(self) -> Iterator[str]:
        """Yield one message for each broken invariant."""
        for part, order in self._parts.items():
            if not len(order):
                yield f"no part is empty: {part} is"
            yield from (f"{fault} (part {part} by {self._time})" for fault in order.faults())

    def earliest(self, now: float, max_num: int, parts: Collection[Hashable] | None = None) -> np.ndarray:
        """Return the slots with a time <= now, at most `max_num`, in order of (time, seq), without removing them.

        Args:
            now: in the unit of the times.
            max_num: at least 0.
            parts: parts to search; None searches all.

        The parts are read in runs, in order of the runs' first keys. All runs of a part except the last one read lie
        before the first key of every unread run. The search ends when those certain runs hold `max_num` slots.
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
            # NumPy sorts complex numbers by real and then imaginary part, and its stable sort merges ordered runs.
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
        """Draw distinct slots with after < time <= until uniformly, in random order.

        Args:
            max_num: at least 0; if fewer slots qualify, all are returned.
            generator: used once, or not at all if there is nothing to draw.
            until, after: in the unit of the times.
            parts: parts to search; None searches all.
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
        """Yield the order of each part and the range of ranks whose times are in (after, until]."""
        for part in self.parts if parts is None else sorted(self._parts.keys() & set(parts)):
            order = self._parts[part]
            start, stop = order.rank(after), order.rank(until)
            if start < stop:
                yield order, start, stop
