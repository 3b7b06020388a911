"""Cache the journal's groups by sequence number, with least-recently-used eviction from memory.

    put ─> memory (bytes, at most max_bytes) ──least recently used──> evicted here, still in the journal
    get <─ memory <──────────────────────────── read back ─────────────────────┘

The cache holds encoded bytes, because their size is exact. A decoded group consists of views of these bytes,
so a group in memory stays decoded after its first use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from rllib_srl.replay.journal.codec import StoredGroup
from rllib_srl.replay.journal.journal import Journal
from rllib_srl.types import Group


class Payloads:
    """The groups of a journal, cached in memory up to `max_bytes`.

    Invariant: `num_bytes <= max_bytes`; every group in memory is also in the journal.
    """

    def __init__(self, journal: Journal, max_bytes: int) -> None:
        """Create an empty cache.

        Args:
            journal: the journal that holds the groups.
            max_bytes: of encoded groups in memory; 0 keeps none.

        Raises:
            ValueError: `max_bytes` is negative.
        """
        if max_bytes < 0:
            raise ValueError(f"max_bytes = {max_bytes}; expected at least 0")
        self._journal = journal
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, bytes] = OrderedDict()  # least recently used first
        self._opened: dict[int, StoredGroup] = {}  # decoded groups among those in memory
        self.num_bytes = 0  # in memory
        self.num_spilled = 0  # evictions from memory for lack of room
        self.num_read_back = 0  # reads from the journal

    @property
    def num_in_memory(self) -> int:
        """Return the number of groups in memory."""
        return len(self._kept)

    def put(self, seq: int, payload: bytes) -> None:
        """Cache the bytes of a group; call it after the commit, as an uncommitted group could be evicted and lost."""
        self.forget([seq])
        self._kept[seq] = payload
        self.num_bytes += len(payload)
        self._spill()

    def get(self, seq: int) -> Group:
        """Return a group; errors as in `open`."""
        return self.open(seq).group

    def open(self, seq: int) -> StoredGroup:
        """Return a group from memory or else from the journal, with `origin` set to "reuse".

        Raises:
            JournalError: the journal has no such group or cannot be read.
            ValueError: the stored bytes are damaged.
        """
        payload = self.read(seq)
        found = self._opened.get(seq)
        if found is None:
            found = StoredGroup.of(payload, str(seq), "reuse")
            if seq in self._kept:
                self._opened[seq] = found
        return found

    def read(self, seq: int) -> bytes:
        """Return the bytes of a group from memory or else from the journal.

        Raises:
            JournalError: the journal has no such group or cannot be read.
        """
        payload = self._kept.get(seq)
        if payload is None:
            payload = self._journal.read_group(seq)
            self.num_read_back += 1
            self.put(seq, payload)
        else:
            self._kept.move_to_end(seq)
        return payload

    def forget(self, seqs: Iterable[int]) -> None:
        """Drop groups from memory; ignore those that are not in memory."""
        for seq in seqs:
            payload = self._kept.pop(seq, None)
            self._opened.pop(seq, None)
            self.num_bytes -= len(payload) if payload is not None else 0

    def _spill(self) -> None:
        while self.num_bytes > self._max_bytes:
            seq, payload = self._kept.popitem(last=False)
            self._opened.pop(seq, None)
            self.num_bytes -= len(payload)
            self.num_spilled += 1
