"""Log the effects of each commit as one row, and fold many rows into the tables at once.

    commit ──of──> Effects ──to_bytes──> a row of `log`         durable, one or two pages
                      │ merge
                      v
                   net effect of all rows of `log` ──apply──> tables, and the log is empty

The rows that a commit changes are scattered over the tables: writing 16 items in place would write 16 pages.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_srl.replay.journal.codec import compact_json, prompt_fields, prompt_of
from rllib_srl.replay.journal.schema import (
    REVIEW,
    Commit,
    bytes_of,
    checked,
    checksum,
    prompt_text,
    signed,
)
from rllib_srl.types import Prompt

if TYPE_CHECKING:
    from sqlite3 import Connection

_LENGTH = struct.Struct("<I")


@dataclass
class Effects:
    """The net effect of one or more consecutive commits; None marks a removal.

    Invariant: `apply` gives the same tables as applying the commits one by one.
    """

    position: int = 0  # of the last commit
    items: dict[int, tuple[bytes, Prompt | None] | None] = field(default_factory=dict)  # row, prompt if it is new
    vectors: dict[int, bytes | None] = field(default_factory=dict)
    groups: dict[int, tuple[bytes, int | None, int] | None] = field(default_factory=dict)  # row, slot if new, position
    reviews: list[tuple[int, bytes]] = field(default_factory=list)  # position, rows of REVIEW
    requests: list[tuple[int, str, str]] = field(default_factory=list)  # position, name, answer as JSON
    state: dict[str, bytes | str] = field(default_factory=dict)  # bytes, or JSON

    @classmethod
    def of(cls, commit: Commit, position: int) -> Effects:
        """Return the effects of a commit, without its payloads, which go into their table directly."""
        effects = cls(position)
        for slot in commit.removed_slots:
            effects.items[int(slot)] = effects.vectors[int(slot)] = None
        for slot, row in commit.items.items():
            effects.items[int(slot)] = (bytes_of(row), commit.prompts.get(slot))
        for slot, vector in commit.vectors.items():
            effects.vectors[int(slot)] = np.ascontiguousarray(vector, "<f4").tobytes()
        effects.groups.update((int(seq), None) for seq in commit.removed_groups)
        for seq, row in commit.groups.items():
            place = int(commit.group_slots.get(seq, -1)) if seq in commit.payloads else None
            effects.groups[int(seq)] = (bytes_of(row), place, position)
        if len(commit.reviews):
            effects.reviews.append((position, commit.reviews.tobytes()))
        if commit.request is not None:
            effects.requests.append((position, commit.request, compact_json(commit.answer)))
        for name, value in commit.state.items():
            effects.state[name] = value if isinstance(value, bytes) else compact_json(value)
        return effects

    def merge(self, later: Effects) -> None:
        """Append later effects to these; a row without a prompt or slot keeps the earlier one."""
        self.position = later.position
        for slot, item in later.items.items():
            before = self.items.get(slot)
            self.items[slot] = (item[0], before[1]) if item and item[1] is None and before else item
        for seq, group in later.groups.items():
            known = self.groups.get(seq)
            self.groups[seq] = (group[0], *known[1:]) if group and group[1] is None and known else group
        self.vectors.update(later.vectors)
        self.reviews += later.reviews
        self.requests += later.requests
        self.state.update(later.state)

    def to_bytes(self) -> bytes:
        """Return the bytes of a log row: the header's length, the header as JSON, the binary values concatenated."""
        blobs: list[bytes] = []

        def put(blob: bytes | None) -> int:
            blobs.append(blob or b"")
            return -1 if blob is None else len(blob)

        header = {
            "items": [(slot, put(item and item[0])) for slot, item in self.items.items()],
            "prompts": [(slot, prompt_fields(item[1])) for slot, item in self.items.items() if item and item[1]],
            "vectors": [(slot, put(vector)) for slot, vector in self.vectors.items()],
            "groups": [(seq, put(group and group[0]), *(group or (0, 0, 0))[1:]) for seq, group in self.groups.items()],
            "reviews": [(position, put(rows)) for position, rows in self.reviews],
            "requests": self.requests,
            "state": [(k, put(v)) if isinstance(v, bytes) else (k, v) for k, v in self.state.items()],
        }
        text = compact_json(header).encode()
        return b"".join([_LENGTH.pack(len(text)), text, *blobs])

    @classmethod
    def from_bytes(cls, data: bytes, position: int) -> Effects:
        """Return the effects that `to_bytes` encoded."""
        at = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        header = json.loads(data[_LENGTH.size : at])

        def take(length: int) -> Any:
            nonlocal at
            at += max(length, 0)
            return None if length < 0 else data[at - length : at]

        prompts = {slot: prompt_of(fields) for slot, fields in header["prompts"]}
        return cls(
            position=position,
            items={slot: None if n < 0 else (take(n), prompts.get(slot)) for slot, n in header["items"]},
            vectors={slot: take(n) for slot, n in header["vectors"]},
            groups={seq: None if n < 0 else (take(n), slot, came) for seq, n, slot, came in header["groups"]},
            reviews=[(came, take(n)) for came, n in header["reviews"]],
            requests=[tuple(request) for request in header["requests"]],
            state={name: take(value) if isinstance(value, int) else value for name, value in header["state"]},
        )

    def apply(self, db: Connection, keep_requests: int) -> None:
        """Apply the effects to the tables and empty the log; call inside a transaction."""
        self._apply_items(db)
        self._apply_groups(db)
        marks = ", ".join("?" * (1 + len(REVIEW.names or ())))
        db.executemany(f"INSERT INTO reviews VALUES ({marks})", self._review_rows())
        rows = [(position, name, answer, checksum(answer)) for position, name, answer in self.requests]
        db.executemany("INSERT INTO requests VALUES (?, ?, ?, ?)", rows)
        db.execute("DELETE FROM requests WHERE position <= ?", (self.position - keep_requests,))
        states = {**self.state, "position": str(self.position)} if self.position else self.state
        values = [(name, value, checksum(value)) for name, value in states.items()]
        db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", values)
        db.execute("DELETE FROM log")

    def _apply_items(self, db: Connection) -> None:
        gone, new, old = [], [], []
        for slot, item in self.items.items():
            if item is None:
                gone.append((slot,))
            elif item[1] is None:
                old.append((item[0], checksum(item[0]), slot))
            else:
                text = prompt_text(item[1])
                new.append((slot, item[0], checksum(item[0]), text, checksum(text)))
        db.executemany("DELETE FROM items WHERE slot = ?", gone)
        db.executemany("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?)", new)
        db.executemany("UPDATE items SET row = ?, checksum = ? WHERE slot = ?", old)
        forgotten = [(slot,) for slot, vector in self.vectors.items() if vector is None]
        db.executemany("DELETE FROM vectors WHERE slot = ?", forgotten)
        kept = [(slot, vector, checksum(vector)) for slot, vector in self.vectors.items() if vector is not None]
        db.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", kept)

    def _apply_groups(self, db: Connection) -> None:
        gone, new, old = [], [], []
        for seq, group in self.groups.items():
            if group is None:
                gone.append((seq,))
            elif group[1] is None:
                old.append((group[0], checksum(group[0]), seq))
            else:
                row, slot, position = group
                new.append((seq, slot, row, position, checksum(row)))
        for table in ("groups", "payloads", "orphans"):
            db.executemany(f"DELETE FROM {table} WHERE seq = ?", gone)
        db.executemany("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?)", new)
        db.executemany("UPDATE groups SET row = ?, checksum = ? WHERE seq = ?", old)

    def _review_rows(self) -> Iterator[tuple]:
        for position, data in self.reviews:
            for key, *rest in np.frombuffer(data, REVIEW).tolist():
                yield position, signed(key), *rest


def read_log(db: Connection, name: str) -> tuple[Effects, int]:
    """Return the net effect of the log and its number of rows.

    Args:
        db: an open journal.
        name: the journal's name in error messages.

    Raises:
        JournalError: a row is damaged.
    """
    net, num_rows = Effects(), 0
    for position, data, stored in db.execute("SELECT position, effects, checksum FROM log ORDER BY position"):
        net.merge(Effects.from_bytes(checked(data, stored, f"{name}, commit {position}"), position))
        num_rows += 1
    return net, num_rows
