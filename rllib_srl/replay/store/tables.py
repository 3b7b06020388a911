"""A growing table of records with undo since the last commit.

    rows       NumPy records, as the journal stores them; grown by an eighth, since filters read free rows too
    columns    contiguous copies of the fields that filters read: in the rows a field of a million records is spread
               over 150 MB, and a filter takes 60 times as long
    objects    the part of each record that is not numeric

A new record takes the smallest free row, so its place depends on the rows in use and not on their history. A record
may change any number of times between two commits; the first change saves its old bytes:

    add, write, free, touch  ->  changed() lists the rows  ->  commit() drops the old bytes | restore() writes them back

Rows are selected by their place in an order, without sorting all of them:

    earliest(num, time_N, seq_N)              positions of the `num` smallest (time, seq), ascending
    sample(num, generator, *keys_N)           positions of a uniform sample, in random order
    at_ranks(rank_K, *keys_N)                 positions at some ranks of the order by several keys

A sample is drawn as ranks in the order of the keys, so it depends on the rows and the generator alone, and not on the
places of the rows in their table. The last key is `seq`, which no two rows share.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from rllib_srl.replay.store.records import bytes_at

_FIRST_ROWS = 64


class Table:
    """Records by slot (row number).

    Invariant: `is_used` marks the slots in use; every other row is zero and has no object; `columns[name]` equals
    `rows[name]`.
    """

    def __init__(self, dtype: np.dtype, filtered: Collection[str], capacity: int) -> None:
        """Create an empty table.

        Args:
            dtype: of a record, with named fields and without gaps.
            filtered: fields that also get a column.
            capacity: expected records; growth stops there, and beyond it the table grows only as needed.
        """
        self.capacity = capacity
        self.is_used = np.zeros(0, bool)
        self.columns = {name: np.zeros(0, dtype[name]) for name in filtered}
        self.objects: list[Any] = []
        self._before: dict[int, tuple[bool, bytes, Any]] = {}
        self._bind(np.zeros(0, dtype))
        self._reserve(max(1, min(capacity, _FIRST_ROWS)))

    def __len__(self) -> int:
        """Return the number of records."""
        return int(np.count_nonzero(self.is_used))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows and columns, free ones included, and of the references to the objects."""
        columns = sum(column.nbytes for column in self.columns.values())
        return self.rows.nbytes + self.is_used.nbytes + columns + 8 * len(self.objects)

    def slots(self) -> np.ndarray:
        """Return the slots in use, ascending, int64."""
        return np.flatnonzero(self.is_used)

    def check_used(self, slots: Sequence[int] | np.ndarray) -> list[int]:
        """Return slots as plain integers after checking that each holds a record.

        Raises:
            ValueError: a slot is free or given twice.
        """
        listed = [operator.index(slot) for slot in slots]
        is_row = all(0 <= slot < len(self.rows) for slot in listed)
        if len(set(listed)) < len(listed) or not is_row or not self.is_used[listed].all():
            raise ValueError(f"slots = {listed[:5]}; expected distinct ones that are in use")
        return listed

    def add(self, row: np.ndarray, beside: Any = None) -> int:
        """Write a record (of shape [1]) and its object to the smallest free slot; return the slot."""
        slot = int(self.is_used.argmin())
        if self.is_used[slot]:
            self._reserve((slot := len(self.rows)) + 1)
        self.touch([slot])
        self._put([slot], row)
        self.is_used[slot], self.objects[slot] = True, beside
        return slot

    def write(self, slots: list[int], rows_N: np.ndarray) -> None:
        """Overwrite records in use; their objects stay."""
        self.touch(slots)
        self._put(slots, rows_N)

    def free(self, slot: int) -> None:
        """Remove a record."""
        self.touch([slot])
        self._put([slot], np.zeros(1, self.rows.dtype))
        self.is_used[slot], self.objects[slot] = False, None

    def touch(self, slots: list[int]) -> None:
        """Save rows before their first change since the last commit."""
        new = [slot for slot in slots if slot not in self._before]
        for slot, record in zip(new, bytes_at(self.rows, new), strict=True):
            self._before[slot] = (bool(self.is_used[slot]), record, self.objects[slot])

    def changed(self) -> list[int]:
        """Return the slots written or freed since the last commit, ascending."""
        return sorted(self._before)

    def commit(self) -> None:
        """Make the changes since the last commit final."""
        self._before.clear()

    def restore(self) -> None:
        """Restore every row to the last commit."""
        for slot, (is_used, record, beside) in self._before.items():
            self._put([slot], np.frombuffer(record, self.rows.dtype))
            self.is_used[slot], self.objects[slot] = is_used, beside
        self._before.clear()

    def load(self, slots_N: np.ndarray, rows_N: np.ndarray, objects: Sequence[Any] | None = None) -> None:
        """Fill an empty table with records and their objects.

        Raises:
            ValueError: slots below 0 or given twice, or a table that is not empty.
        """
        if len(self) or (slots_N < 0).any() or len(np.unique(slots_N)) < len(slots_N):
            raise ValueError(f"slots = {slots_N[:5]}; expected distinct ones from 0, and an empty table: {len(self)}")
        self._reserve(int(slots_N.max(initial=-1)) + 1)
        self._put(slots_N, rows_N)
        self.is_used[slots_N] = True
        for slot, beside in zip(slots_N.tolist(), objects or ()):
            self.objects[slot] = beside

    def faults(self, next_seq: int) -> Iterator[str]:
        """Yield one message for each broken invariant; every `seq` must be below `next_seq`."""
        seq_N = self.rows["seq"][self.is_used]
        if len(np.unique(seq_N)) < len(seq_N) or (seq_N >= next_seq).any():
            yield f"every record has a seq of its own below {next_seq}"
        if self.rows.view(np.uint8).reshape(len(self.rows), -1)[~self.is_used].any():
            yield "a free row is zero"
        if any(self.objects[slot] is not None for slot in np.flatnonzero(~self.is_used).tolist()):
            yield "a free row has no object"
        if wrong := [name for name, column in self.columns.items() if not np.array_equal(column, self.rows[name])]:
            yield f"columns are copies of the rows' fields: not so for {wrong}"

    def _put(self, slots: list[int] | np.ndarray, rows_N: np.ndarray) -> None:
        self._raw[slots] = rows_N.view(self._raw.dtype)
        for name, column in self.columns.items():
            column[slots] = rows_N[name]

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= len(self.rows):
            return
        more = max(num_rows, min(len(self.rows) * 9 // 8 + _FIRST_ROWS, self.capacity)) - len(self.rows)

        def grown(array: np.ndarray) -> np.ndarray:
            return np.concatenate([array, np.zeros(more, array.dtype)])

        self.is_used = grown(self.is_used)
        self.columns = {name: grown(column) for name, column in self.columns.items()}
        self.objects += [None] * more
        self._bind(grown(self.rows))

    def _bind(self, rows: np.ndarray) -> None:
        self.rows = rows
        self._raw = rows.view(np.dtype((np.void, rows.dtype.itemsize)))  # NumPy copies records field by field
        self.view = rows.view()  # read-only, so that no reader bypasses the columns
        self.view.flags.writeable = False


def earliest(num: int, time_N: np.ndarray, seq_N: np.ndarray) -> np.ndarray:
    """Return the positions of the `num` smallest (time, seq) in ascending order; all positions if there are fewer.

    Args:
        num: at least 0.
        time_N: numbers without NaN; exact below 2 ** 53, like `seq_N`.
        seq_N: integers >= 0 that break ties.
    """
    if not num:
        return np.empty(0, np.int64)
    key_N = np.empty(len(time_N), np.complex128)  # NumPy orders complex numbers by real and then imaginary part
    key_N.real, key_N.imag = time_N, seq_N
    if num >= len(key_N):
        return np.argsort(key_N)
    first_N = np.argpartition(key_N, num - 1)[:num]
    return first_N[np.argsort(key_N[first_N])]


def sample(num: int, generator: np.random.Generator, *keys_N: np.ndarray) -> np.ndarray:
    """Draw the positions of distinct rows uniformly, in random order.

    Args:
        num: at least 0; if there are fewer rows, all are returned.
        generator: used once, or not at all if there is nothing to draw.
        keys_N: of the order in which rows are ranked, as in `at_ranks`.
    """
    if not (num := min(num, len(keys_N[0]))):
        return np.empty(0, np.int64)
    return at_ranks(generator.choice(len(keys_N[0]), num, replace=False), *keys_N)


def at_ranks(rank_K: np.ndarray, *keys_N: np.ndarray) -> np.ndarray:
    """Return `np.lexsort(keys_N[::-1])[rank_K]`: the positions at some ranks of the order by the first key, then ...

    The keys become one integer a row. Counting these in about N equal bins gives the bin of each rank, and only rows
    in such bins are sorted: for 4,096 of a million rows, a sixth of the time of sorting all.

    Args:
        rank_K: each in [0, N).
        keys_N: integers; no two rows agree in all of them.
    """
    lows = [int(key_N.min()) for key_N in keys_N]
    spans = [int(key_N.max()) - low + 1 for key_N, low in zip(keys_N, lows)]
    if math.prod(spans) >= 1 << 63:  # no integer of 64 bits holds all keys
        sorted_K: np.ndarray = np.lexsort(keys_N[::-1])[rank_K]
        return sorted_K
    code_N = np.zeros(len(keys_N[0]), np.int64)
    for key_N, low, span in zip(keys_N, lows, spans):
        if span > 1:
            code_N *= span
            code_N += (key_N - low).astype(np.int64, copy=False)
    bin_N = code_N >> max(0, math.prod(spans).bit_length() - len(code_N).bit_length())
    size_B = np.bincount(bin_N)
    bin_K = np.searchsorted(np.cumsum(size_B), rank_K, side="right")
    is_hit_B = np.zeros(len(size_B), bool)
    is_hit_B[bin_K] = True
    near_M = np.flatnonzero(is_hit_B[bin_N])
    skipped_B = np.cumsum(size_B * ~is_hit_B)  # rows in bins up to here that are not sorted
    found_K: np.ndarray = near_M[np.argsort(code_N[near_M])][rank_K - skipped_B[bin_K]]
    return found_K
