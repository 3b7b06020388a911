"""Slots in ascending order of a time: insert, remove, and any rank, cut into blocks of at most 512.

    |3 9 1| |7 2| |5 8 0 4|    slots, 4 bytes each; (time, seq) are read from the table
     └ first key of each block: one bisection finds the block, a second one the place in it

A binary heap would find the earliest alone. Ranks give the first n at once, how many lie between two times, and a
uniform sample of those; all depend on the rows alone. Ties are broken by `seq`; how the blocks are cut shows nowhere.

Costs: insert and remove O(log n) reads of the table and one move within a block; n slots at once O(n) numpy work.
Nothing is deleted lazily: neighbours that fit into half a block are joined, so there are at most 4 n / 512 + 1 blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from rllib_srl.replay.tables import Table

BLOCK = 512
Key = tuple[float, float]  # time, seq


class SlotOrder:
    """Slots of a table in ascending order of (time, seq).

    Invariant: `faults` yields nothing. A slot is removed *before* its row's time or seq changes and inserted *after*.
    """

    def __init__(self, table: Table, time: str, slots_N: np.ndarray | None = None, is_ordered: bool = False) -> None:
        """Order some slots, or none.

        Args:
            table: has the columns `time` and `seq`.
            time: name of a column of numbers.
            slots_N: distinct.
            is_ordered: whether they are in order already.
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
        """Return the bytes of the blocks and of what finds them."""
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
            ValueError: the slot is not where its row says.
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
        """Yield what is broken, in words."""
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
        # Two comparisons of numbers, spelled out: bisect with tuples for keys takes twice as long.
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
        """Make room in a full block; return where `key` now goes.

        A key after all others opens a block of its own, so that slots that come in order fill their blocks.
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
        """Put an empty block at a place of the order; return its number."""
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
        """Take the block at a place out of the order; the next one opened reuses it."""
        block, num = self._order.item(at), self._num_blocks
        self._order[at : num - 1] = self._order[at + 1 : num]
        self._order[num - 1] = block
        self._sizes[block] = 0
        del self._firsts[at]
        self._num_blocks -= 1
