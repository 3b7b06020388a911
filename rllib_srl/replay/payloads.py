"""Groups by their sequence number: the ones used last in memory, all of them in the journal.

    put ─> memory (bytes, at most max_bytes) ──used longest ago──> forgotten here, still in the journal
    get <─ memory <──────────────────────────── read back ─────────────────────┘

Bytes and not Groups are kept: their number is exact, and a decoded group is views of them (and a mask of a byte a
token), so one that was drawn stays open for its next use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from rllib_srl.replay.journal import Journal
from rllib_srl.replay.parcels import Opened
from rllib_srl.types import Group


class Payloads:
    """The groups of a journal, as many of them in memory as fit.

    Invariant: `num_bytes <= max_bytes`; whatever is in memory is in the journal too.
    """

    def __init__(self, journal: Journal, max_bytes: int) -> None:
        """Start with nothing in memory.

        Args:
            journal: where the groups are committed.
            max_bytes: of encoded groups in memory; 0 keeps none.

        Raises:
            ValueError: `max_bytes` is negative.
        """
        if max_bytes < 0:
            raise ValueError(f"max_bytes = {max_bytes}; expected at least 0")
        self._journal = journal
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, bytes] = OrderedDict()  # used longest ago first
        self._opened: dict[int, Opened] = {}  # of those in memory, the ones that were asked for
        self.num_bytes = 0  # in memory
        self.num_spilled = 0  # times that a group left memory for want of room
        self.num_read_back = 0  # times that a group came back from the journal

    @property
    def num_in_memory(self) -> int:
        """Return how many groups are in memory."""
        return len(self._kept)

    def put(self, seq: int, payload: bytes) -> None:
        """Keep the bytes of a group whose commit has returned: an earlier one might be spilled to nowhere."""
        self.forget([seq])
        self._kept[seq] = payload
        self.num_bytes += len(payload)
        self._spill()

    def get(self, seq: int) -> Group:
        """Return a group as `open` does."""
        return self.open(seq).group

    def open(self, seq: int) -> Opened:
        """Return a group, from memory or else from the journal, as a reuse whatever its origin was.

        Raises:
            JournalError: the journal has no such group or cannot be read.
            ValueError: the stored bytes are damaged.
        """
        payload = self.read(seq)
        found = self._opened.get(seq)
        if found is None:
            found = Opened.of(payload, str(seq), "reuse")
            if seq in self._kept:
                self._opened[seq] = found
        return found

    def read(self, seq: int) -> bytes:
        """Return the bytes of a group, as `get` does."""
        payload = self._kept.get(seq)
        if payload is None:
            payload = self._journal.read_group(seq)
            self.num_read_back += 1
            self.put(seq, payload)
        else:
            self._kept.move_to_end(seq)
        return payload

    def forget(self, seqs: Iterable[int]) -> None:
        """Drop groups from memory that are gone; those not in memory are none of its business."""
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
