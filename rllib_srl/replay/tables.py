"""Growing tables of records, with an undo of all changes since the last commit, and a map from key to row.

    Table    rows (numpy records), grown by doubling; a new record takes the smallest free row, so that the
             rows taken, and nothing of their history, decide where the next one goes
    KeyMap   open addressing over the `key` column: 8 to 16 bytes an entry where a dict takes about 100

A record is changed between two commits as often as one likes; the first change keeps what was there before:

    touch(slot), write ...  ->  changed() lists the rows  ->  commit() forgets what was | restore() puts it back
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rllib_srl.replay.indexed_set import IndexedSet

_FIRST_ROWS = 64
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads keys that are not random over the map
_MASK = (1 << 64) - 1


class Table:
    """Records by slot (row number).

    Invariant: `live` holds the slots in use; every other row is zero and has no object; `columns[name]` is the column
    of `rows`.
    """

    def __init__(self, dtype: np.dtype, capacity: int) -> None:
        """Start empty.

        Args:
            dtype: of a record, with named fields and without gaps.
            capacity: records there are room for without another doubling beyond it.
        """
        self.capacity = capacity
        self.live = IndexedSet()
        self._objects: list[Any] = []  # what goes with a record and is no number; as long as it has to be
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
        """Return the smallest free slot, with room for it; it stays free until it is written."""
        slot = self.live.first_absent()
        self._reserve(slot + 1)
        return slot

    def touch(self, slot: int) -> None:
        """Keep what is in a row before it changes, unless it has changed since the last commit."""
        if slot in self._before:
            return
        self._before[slot] = (self.rows[slot].tobytes() if slot in self.live else None, self.object_of(slot))

    def object_of(self, slot: int) -> Any:
        """Return what was written with the record, or None."""
        return self._objects[slot] if slot < len(self._objects) else None

    def check_live(self, slots: Sequence[int] | np.ndarray) -> list[int]:
        """Return slots as plain integers, each of which holds a record.

        Raises:
            ValueError: some do not, or are given twice.
        """
        listed = [operator.index(slot) for slot in slots]
        if len(set(listed)) < len(listed) or not self.live.has_all(listed):
            raise ValueError(f"slots = {listed[:5]}; expected distinct ones that are in use")
        return listed

    def write(self, slot: int, record: np.void, beside: Any = None) -> None:
        """Put a record into a row, and `beside` with it unless that is None."""
        self.touch(slot)
        self._write(slot, record, self.object_of(slot) if beside is None else beside)

    def write_many(self, slots: list[int], rows_N: np.ndarray) -> None:
        """Put records over those of rows in use; what goes with them stays."""
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
        """Put every row back to what it was at the last commit."""
        for slot, (record, beside) in self._before.items():
            self._write(slot, None if record is None else np.frombuffer(record, self.rows.dtype)[0], beside)
        self._before.clear()

    def load(self, records: Mapping[int, bytes], objects: Mapping[int, Any] | None = None) -> None:
        """Fill an empty table: slot -> record as `tobytes` gave it, and slot -> what goes with it.

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
        """Yield what is broken, in words; every record has a `seq` below `next_seq`."""
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
        self.view = rows.view()  # for readers: a write past the indexes fails
        self.view.flags.writeable = False


class KeyMap:
    """Key -> slot for the records of a table that has a `key` column (uint64).

    Invariant: each slot lies at or after its key's home, with no gap between; at most half of the map is taken.
    """

    def __init__(self, table: Table) -> None:
        """Map every record of `table`."""
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
        """Enter a slot under its row's key, which must not be in the map."""
        if 2 * (self._num + 1) > len(self._slots_M):
            taken_M = self._slots_M[self._slots_M >= 0].astype(np.int64)
            self.build(np.append(taken_M, slot))
        else:
            self._slots_M[self._seek(self._key(slot))] = slot
            self._num += 1

    def remove(self, slot: int) -> None:
        """Take a slot out while its row still has its key; what lies behind moves up, so that no gap opens.

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
        """Map exactly these slots.

        In order of their homes, entry i goes to max(home_i, place_(i - 1) + 1); what would go past the end of the map
        starts again at its front, one by one.
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
        """Return the place of a key, or the empty place where it would go."""
        slots_M, key_N, place = self._slots_M, self._table.columns["key"], self._home(key)
        mask = len(slots_M) - 1
        while (slot := slots_M.item(place)) >= 0 and key_N.item(slot) != key:
            place = place + 1 & mask
        return place
