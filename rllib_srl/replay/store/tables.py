"""Provide growing tables of records with undo since the last commit, a set of row numbers, and a map from key to row.

    Table        rows (numpy records), grown by doubling; a new record takes the smallest free row, so its place
                 depends on the rows in use and not on their history
    IndexedSet   row numbers; finds the k-th member and the smallest non-member in O(log n)
    KeyMap       open addressing over the `key` column: 8 to 16 bytes per entry, where a dict takes about 100

A record may change any number of times between two commits; the first change saves its old bytes:

    touch(slot), write ...  ->  changed() lists the rows  ->  commit() drops the old bytes | restore() writes them back

An `IndexedSet` consists of two arrays:

    words_W   64 numbers per word, one bit each: 1 = member
    tree_W    Fenwick tree over the members per word: gives the number of members below word w

A draw depends on the members and the generator alone, not on the order of additions and removals. So a set rebuilt
from the rows of a journal draws the same as one that was never stopped; a list with swap-and-pop would not. A member
costs between one bit and a few; a word costs 12 bytes.

Source: Fenwick 1994, "A new data structure for cumulative frequency tables", Software: Practice and Experience 24(3).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_WORD = 64
_HALVES = (32, 16, 8, 4, 2, 1)
_MANY = 32  # from this many numbers, a vectorised lookup is faster


class IndexedSet:
    """A set of integers >= 0, compact if they are dense from 0 upwards.

    Invariant: `tree_W` counts the ones of `words_W`; the number of words is a power of two.
    """

    def __init__(self, members: np.ndarray | None = None) -> None:
        """Create a set of some members, or an empty one."""
        self._words_W = np.zeros(1, np.uint64)
        self._tree_W = np.zeros(2, np.int32)
        if members is not None and len(members):
            self._grow(int(members.max()))
            bits_N = np.uint64(1) << (members % _WORD).astype(np.uint64)
            np.bitwise_or.at(self._words_W, members // _WORD, bits_N)
            self._count()

    def __len__(self) -> int:
        """Return the number of members."""
        return self._tree_W.item(-1)

    def __contains__(self, member: int) -> bool:
        """Return whether `member` is in the set."""
        word = member // _WORD
        return 0 <= word < len(self._words_W) and bool(self._words_W.item(word) >> member % _WORD & 1)

    def has_all(self, numbers: Sequence[int]) -> bool:
        """Return whether all of some numbers are in the set."""
        if len(numbers) < _MANY:
            return all(number in self for number in numbers)
        numbers_N = np.array(numbers, np.int64)
        if numbers_N.min() < 0 or numbers_N.max() >= _WORD * len(self._words_W):
            return False
        bit_N = (numbers_N % _WORD).astype(np.uint64)
        return bool((self._words_W[numbers_N // _WORD] >> bit_N & np.uint64(1)).all())

    @property
    def nbytes(self) -> int:
        """Return the bytes the set takes."""
        return self._words_W.nbytes + self._tree_W.nbytes

    def add(self, member: int) -> None:
        """Add a number that is not in the set.

        Raises:
            ValueError: it is in the set already, or below 0.
        """
        if member < 0 or member in self:
            raise ValueError(f"member = {member}; expected a number >= 0 that is not in the set")
        if member >= _WORD * len(self._words_W):
            self._grow(member)
        self._flip(member, 1)

    def remove(self, member: int) -> None:
        """Remove a member.

        Raises:
            ValueError: it is not in the set.
        """
        if member not in self:
            raise ValueError(f"member = {member}; expected a member of the set")
        self._flip(member, -1)

    def members(self) -> np.ndarray:
        """Return all members, ascending, int64. Costs O(n)."""
        return np.flatnonzero(np.unpackbits(self._words_W.view(np.uint8), bitorder="little"))

    def first_absent(self) -> int:
        """Return the smallest number >= 0 that is not a member."""
        tree_W, word, step = self._tree_W, 0, len(self._words_W)
        if tree_W.item(-1) == _WORD * step:
            return _WORD * step
        while step := step // 2:
            if tree_W.item(word + step) == _WORD * step:
                word += step
        ones = self._words_W.item(word)
        return _WORD * word + (~ones & (ones + 1)).bit_length() - 1

    def select(self, ranks_N: np.ndarray) -> np.ndarray:
        """Return the members at some ranks; rank 0 is the smallest.

        Args:
            ranks_N: each in [0, len(self)).

        Raises:
            ValueError: a rank outside that range.
        """
        if len(ranks_N) and not (ranks_N.min() >= 0 and ranks_N.max() < len(self)):
            raise ValueError(f"ranks = {ranks_N}; expected numbers in [0, {len(self)})")
        left_N = ranks_N.astype(np.int64)
        word_N = np.zeros(len(left_N), np.int64)
        step = len(self._words_W)
        while step := step // 2:
            below_N = self._tree_W[word_N + step]
            is_right_N = below_N <= left_N
            left_N -= below_N * is_right_N
            word_N += step * is_right_N
        return _WORD * word_N + _select_bits(self._words_W[word_N], left_N)

    def sample(self, num: int, generator: np.random.Generator) -> np.ndarray:
        """Draw `num` distinct members uniformly, in random order; all of them if there are fewer."""
        if not len(self):
            return np.empty(0, np.int64)
        return self.select(generator.choice(len(self), min(num, len(self)), replace=False))

    def check_valid(self) -> None:
        """Check the invariant.

        Raises:
            ValueError: the counts do not match the members.
        """
        counts_W = self._tree_W.copy()
        self._count()
        if not np.array_equal(counts_W, self._tree_W):
            raise ValueError(f"the set counts its members as {counts_W[1:]}; expected {self._tree_W[1:]}")

    def _flip(self, member: int, change: int) -> None:
        word, tree_W, size = member // _WORD, self._tree_W, len(self._words_W)
        self._words_W[word] = self._words_W.item(word) ^ 1 << member % _WORD
        node = word + 1
        while node <= size:
            tree_W[node] += change
            node += node & -node

    def _grow(self, member: int) -> None:
        size = len(self._words_W)
        while _WORD * size <= member:
            size *= 2
        words_W = np.zeros(size, np.uint64)
        words_W[: len(self._words_W)] = self._words_W
        self._words_W = words_W
        self._count()

    def _count(self) -> None:
        """Build the tree: node w + 1 first counts word w, then each node adds to its parent."""
        size = len(self._words_W)
        self._tree_W = np.zeros(size + 1, np.int32)
        self._tree_W[1:] = np.bitwise_count(self._words_W)
        step = 1
        while step < size:
            self._tree_W[2 * step :: 2 * step] += self._tree_W[step : size - step + 1 : 2 * step]
            step *= 2


def _select_bits(word_N: np.ndarray, rank_N: np.ndarray) -> np.ndarray:
    """Return the bit position of the one of each rank in each word, by bisecting the word six times."""
    left_N, bit_N = rank_N.copy(), np.zeros(len(rank_N), np.int64)
    for half in _HALVES:
        low_N = word_N & np.uint64((1 << half) - 1)
        below_N = np.bitwise_count(low_N).astype(np.int64)
        is_high_N = below_N <= left_N
        left_N -= below_N * is_high_N
        bit_N += half * is_high_N
        word_N = np.where(is_high_N, word_N >> np.uint64(half), low_N)
    return bit_N


_FIRST_ROWS = 64
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads keys that are not random over the map
_MASK = (1 << 64) - 1


class Table:
    """Records by slot (row number).

    Invariant: `live` holds the slots in use; every other row is zero and has no object; `columns[name]` is the column
    of `rows`.
    """

    def __init__(self, dtype: np.dtype, capacity: int) -> None:
        """Create an empty table.

        Args:
            dtype: of a record, with named fields and without gaps.
            capacity: expected records; doubling stops there, and beyond it the table grows only as needed.
        """
        self.capacity = capacity
        self.live = IndexedSet()
        self._objects: list[Any] = []  # the non-numeric part of each record; only as long as needed
        self._before: dict[int, tuple[bytes | None, Any]] = {}
        self._bind(np.zeros(max(1, min(capacity, _FIRST_ROWS)), dtype))

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.live)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows, free ones included, without the objects."""
        return self.rows.nbytes + self.live.nbytes + 8 * len(self._objects)

    def free_slot(self) -> int:
        """Return the smallest free slot and reserve room for it; it stays free until it is written."""
        slot = self.live.first_absent()
        self._reserve(slot + 1)
        return slot

    def touch(self, slot: int) -> None:
        """Save a row before its first change since the last commit."""
        if slot in self._before:
            return
        self._before[slot] = (self.rows[slot].tobytes() if slot in self.live else None, self.object_of(slot))

    def object_of(self, slot: int) -> Any:
        """Return the object that was written with the record, or None."""
        return self._objects[slot] if slot < len(self._objects) else None

    def check_live(self, slots: Sequence[int] | np.ndarray) -> list[int]:
        """Return slots as plain integers after checking that each holds a record.

        Raises:
            ValueError: a slot is free or given twice.
        """
        listed = [operator.index(slot) for slot in slots]
        if len(set(listed)) < len(listed) or not self.live.has_all(listed):
            raise ValueError(f"slots = {listed[:5]}; expected distinct ones that are in use")
        return listed

    def write(self, slot: int, record: np.void, beside: Any = None) -> None:
        """Write a record into a row; `beside` replaces its object unless it is None."""
        self.touch(slot)
        self._write(slot, record, self.object_of(slot) if beside is None else beside)

    def write_many(self, slots: list[int], rows_N: np.ndarray) -> None:
        """Overwrite the records of rows in use; their objects stay."""
        size = self.rows.dtype.itemsize
        whole = np.dtype((np.void, size))  # NumPy copies records field by field
        before = self.rows.view(whole)[slots].tobytes()
        for at, slot in enumerate(slots):
            if slot not in self._before:
                self._before[slot] = (before[at * size : (at + 1) * size], self.object_of(slot))
        self.rows.view(whole)[slots] = rows_N.view(whole)

    def free(self, slot: int) -> None:
        """Free a row."""
        self.touch(slot)
        self._write(slot, None, None)

    def changed(self) -> list[int]:
        """Return the slots written or freed since the last commit, ascending."""
        return sorted(self._before)

    def commit(self) -> None:
        """Make the changes since the last commit final."""
        self._before.clear()

    def restore(self) -> None:
        """Restore every row to the last commit."""
        for slot, (record, beside) in self._before.items():
            self._write(slot, None if record is None else np.frombuffer(record, self.rows.dtype)[0], beside)
        self._before.clear()

    def load(self, records: Mapping[int, bytes], objects: Mapping[int, Any] | None = None) -> None:
        """Fill an empty table from slot -> record bytes and slot -> object.

        Raises:
            ValueError: records of another size, slots below 0, or a table that is not empty.
        """
        faults = [f"{len(self)} records; expected an empty table"] if len(self) else []
        if min(records, default=0) < 0:
            faults.append(f"slot = {min(records)}; expected at least 0")
        if sizes := {len(record) for record in records.values()} - {self.rows.dtype.itemsize}:
            faults.append(f"records of {sorted(sizes)} bytes; expected {self.rows.dtype.itemsize}")
        if faults:
            raise ValueError("rows cannot be loaded: " + "; ".join(faults))
        if records:
            self._reserve(max(records) + 1)
            slots_N = np.fromiter(records, np.int64, len(records))
            self.rows[slots_N] = np.frombuffer(b"".join(records.values()), self.rows.dtype)
            self.live = IndexedSet(slots_N)
        self._objects = [(objects or {}).get(slot) for slot in range(max(objects or {}, default=-1) + 1)]

    def faults(self, next_seq: int) -> Iterator[str]:
        """Yield one message for each broken invariant; every `seq` must be below `next_seq`."""
        slots_N = self.live.members()
        seq_N = self.columns["seq"][slots_N]
        if len(np.unique(seq_N)) < len(seq_N) or (seq_N >= next_seq).any():
            yield f"every record has a seq of its own below {next_seq}"
        is_free_N = np.ones(len(self.rows), bool)
        is_free_N[slots_N] = False
        if self.rows.view(np.uint8).reshape(len(self.rows), -1)[is_free_N].any():
            yield "a free row is zero"
        if any(beside is not None and slot not in self.live for slot, beside in enumerate(self._objects)):
            yield "a free row has no object"
        try:
            self.live.check_valid()
        except ValueError as error:
            yield str(error)

    def _write(self, slot: int, record: np.void | None, beside: Any) -> None:
        if beside is not None or slot < len(self._objects):
            self._objects += [None] * (slot + 1 - len(self._objects))
            self._objects[slot] = beside
        if record is None:
            self.rows[slot] = np.zeros((), self.rows.dtype)
            if slot in self.live:
                self.live.remove(slot)
        else:
            self.rows[slot] = record
            if slot not in self.live:
                self.live.add(slot)

    def _reserve(self, num_rows: int) -> None:
        if num_rows > len(self.rows):
            rows = np.zeros(max(num_rows, min(2 * len(self.rows), self.capacity)), self.rows.dtype)
            rows[: len(self.rows)] = self.rows
            self._bind(rows)

    def _bind(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.columns = {name: rows[name] for name in rows.dtype.names or ()}
        self.view = rows.view()  # read-only, so that no reader bypasses the indexes
        self.view.flags.writeable = False


class KeyMap:
    """A map from key to slot for the records of a table with a `key` column (uint64).

    Invariant: each slot lies at or after its key's home, with no gap between; at most half of the map is taken.
    """

    def __init__(self, table: Table) -> None:
        """Build the map of every record of `table`."""
        self._table = table
        self.build(table.live.members())

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._num

    @property
    def nbytes(self) -> int:
        """Return the bytes of the map."""
        return self._slots_M.nbytes

    def find(self, key: int) -> int | None:
        """Return the slot of a key, or None."""
        slot = self._slots_M.item(self._seek(key))
        return None if slot < 0 else slot

    def add(self, slot: int) -> None:
        """Add a slot under its row's key, which must not be in the map."""
        if 2 * (self._num + 1) > len(self._slots_M):
            taken_M = self._slots_M[self._slots_M >= 0].astype(np.int64)
            self.build(np.append(taken_M, slot))
        else:
            self._slots_M[self._seek(self._key(slot))] = slot
            self._num += 1

    def remove(self, slot: int) -> None:
        """Remove a slot while its row still has its key; later entries move up, so that no gap opens.

        Raises:
            ValueError: the key is not in the map, or belongs to another slot.
        """
        hole = self._seek(self._key(slot))
        if self._slots_M.item(hole) != slot:
            raise ValueError(f"slot = {slot}; expected one whose key {self._key(slot):016x} leads to it")
        mask = len(self._slots_M) - 1
        place = hole
        while (other := self._slots_M.item(place := place + 1 & mask)) >= 0:
            if (place - self._home(self._key(other))) & mask >= (place - hole) & mask:
                self._slots_M[hole] = other
                hole = place
        self._slots_M[hole] = -1
        self._num -= 1

    def build(self, slots_N: np.ndarray) -> None:
        """Rebuild the map with exactly these slots.

        In order of their homes, entry i goes to max(home_i, place_(i - 1) + 1). Entries past the end of the map wrap
        around to its front and are inserted one by one.
        """
        size = 16
        while size < 2 * len(slots_N):
            size *= 2
        self._shift = 64 - size.bit_length() + 1
        self._slots_M = np.full(size, -1, np.int32)
        self._num = len(slots_N)
        hash_N = self._table.columns["key"][slots_N] * np.uint64(_GOLDEN)
        home_N = (hash_N >> np.uint64(self._shift)).astype(np.int64)
        order_N = np.argsort(home_N, kind="stable")
        count_N = np.arange(len(slots_N))
        place_N = np.maximum.accumulate(home_N[order_N] - count_N) + count_N
        fits_N = place_N < size
        self._slots_M[place_N[fits_N]] = slots_N[order_N[fits_N]]
        for slot in slots_N[order_N[~fits_N]].tolist():
            self._slots_M[self._seek(self._key(slot))] = slot

    def _key(self, slot: int) -> int:
        return self._table.columns["key"].item(slot)

    def _home(self, key: int) -> int:
        return (key * _GOLDEN & _MASK) >> self._shift

    def _seek(self, key: int) -> int:
        """Return the place of a key, or the empty place where it belongs."""
        slots_M, key_N, place = self._slots_M, self._table.columns["key"], self._home(key)
        mask = len(slots_M) - 1
        while (slot := slots_M.item(place)) >= 0 and key_N.item(slot) != key:
            place = place + 1 & mask
        return place
