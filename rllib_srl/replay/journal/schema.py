"""Define the journal's tables, the content of a commit (`Commit`), and the loaded state (`Stored`).

    meta      schema version, dtypes of the rows, branches                   written at creation and by `restore`
    log       position -> effects of one commit                              folded into the other tables by log.py
    items     slot -> row, prompt                                            current as of the last fold
    vectors   slot -> float32 vector
    groups    seq -> slot in the store's table, row, position of its commit  mutable rows, stored apart from
    payloads  seq -> bytes of the group                                      immutable payloads
    orphans   seq -> prompt                                                  groups imported by `restore`
    reviews   one row per review, append-only
    requests  position -> name, answer                                       the last few thousand
    state     name -> JSON or bytes, including "position"

Blobs and texts are stored with their xxh3, because SQLite detects a torn page but not a flipped bit. A payload contains
its own; `meta` has none.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from rllib_srl.replay.journal.codec import compact_json, json_faults, prompt_fields, prompt_of
from rllib_srl.storage.disk import DiskFull
from rllib_srl.types import Prompt

if TYPE_CHECKING:
    from sqlite3 import Connection

SCHEMA_VERSION = 1
FIRST_ORPHAN = 1 << 62  # first seq of groups imported by `restore`; a run never reaches it

TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE log (position INTEGER PRIMARY KEY, effects BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE items (slot INTEGER PRIMARY KEY, row BLOB NOT NULL, checksum INTEGER NOT NULL,
                    prompt TEXT NOT NULL, prompt_checksum INTEGER NOT NULL);
CREATE TABLE vectors (slot INTEGER PRIMARY KEY, vector BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE groups (seq INTEGER PRIMARY KEY, slot INTEGER NOT NULL, row BLOB NOT NULL, position INTEGER NOT NULL,
                     checksum INTEGER NOT NULL);
CREATE TABLE payloads (seq INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE orphans (seq INTEGER PRIMARY KEY, prompt TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE reviews (position INTEGER NOT NULL, key INTEGER, now INTEGER, elapsed REAL, grade INTEGER,
                      num_success INTEGER, n INTEGER, predicted REAL, trained INTEGER, version INTEGER,
                      temperature REAL, trained_tokens INTEGER);
CREATE TABLE requests (position INTEGER PRIMARY KEY, name TEXT NOT NULL, answer TEXT NOT NULL,
                       checksum INTEGER NOT NULL);
CREATE TABLE state (name TEXT PRIMARY KEY, value, checksum INTEGER NOT NULL) WITHOUT ROWID;
"""

REVIEW = np.dtype(
    [
        ("key", "u8"),
        ("now", "i8"),
        ("elapsed", "f8"),  # iterations since the last review
        ("grade", "i8"),
        ("num_success", "i8"),
        ("n", "i8"),  # valid episodes
        ("predicted", "f8"),  # predicted recall, NaN on the first visit
        ("trained", "?"),
        ("version", "i8"),
        ("temperature", "f8"),
        ("trained_tokens", "i8"),
    ]
)


class JournalError(RuntimeError):
    """An operation on a journal failed; the message names the file, the error and a remedy."""


class JournalFull(DiskFull, JournalError):
    """There is no room for the new data; the data stored before is intact."""


class JournalInUse(JournalError):
    """Another process has the journal open, so it could not be read."""


Row = np.void | bytes  # a record, or its `tobytes`


@dataclass(frozen=True)
class Commit:
    """The changes of one transaction, stored atomically.

    Invariant: a slot may be both removed and written; the removal then comes first.
    """

    items: Mapping[int, Row] = field(default_factory=dict)  # slot -> row, of the journal's item dtype
    prompts: Mapping[int, Prompt] = field(default_factory=dict)  # of slots that are new or reused
    vectors: Mapping[int, np.ndarray] = field(default_factory=dict)
    removed_slots: Collection[int] = ()  # their vectors are removed too, their groups are not
    groups: Mapping[int, Row] = field(default_factory=dict)  # seq -> row, of the journal's group dtype
    payloads: Mapping[int, bytes] = field(default_factory=dict)  # seq -> bytes; exactly the new groups
    group_slots: Mapping[int, int] = field(default_factory=dict)  # of new groups: slot in the store's table, or -1
    removed_groups: Collection[int] = ()
    reviews: np.ndarray = field(default_factory=lambda: np.empty(0, REVIEW))
    request: str | None = None  # the name for `Journal.answer`
    answer: Any = None  # JSON types
    state: Mapping[str, Any] = field(default_factory=dict)  # name -> bytes or JSON types


@dataclass(frozen=True)
class Stored:
    """The state after the last commit, from which a store is rebuilt: items in slot order, groups in seq order.

    Invariant: all arrays and lists of items have the same length, and so have those of groups.
    """

    position: int
    slots: np.ndarray  # int64
    items: np.ndarray  # rows
    prompts: list[Prompt]
    seqs: np.ndarray  # int64
    groups: np.ndarray  # rows; of orphans, seq is new, slot is -1 and is_orphan True if the dtype has these fields
    group_slots: np.ndarray  # int64, slots in the store's table; -1 for orphans
    positions: np.ndarray  # int64, of the commit that added the group
    orphans: dict[int, Prompt]  # seq -> prompt of the group
    state: dict[str, Any]


def faults_of(
    commit: Commit, item: np.dtype, group: np.dtype, known_slots: Container[int], known_seqs: Container[int]
) -> list[str]:
    """Validate a commit against the stored slots and seqs; return error messages."""
    faults = [f"item {slot} is a row of another dtype" for slot, row in commit.items.items() if not is_of(row, item)]
    faults += [f"group {seq} is a row of another dtype" for seq, row in commit.groups.items() if not is_of(row, group)]
    gone_slots, gone_seqs = set(commit.removed_slots), set(commit.removed_groups)
    for slot in commit.items:
        if (slot not in known_slots or slot in gone_slots) and slot not in commit.prompts:
            faults.append(f"item {slot} is new; expected its prompt")
    for slot in commit.vectors:
        if slot not in commit.items and (slot not in known_slots or slot in gone_slots):
            faults.append(f"vector {slot} comes without its item")
    for seq in commit.groups:
        is_known = seq in known_seqs and seq not in gone_seqs
        if is_known == (seq in commit.payloads):
            faults.append(f"group {seq} is {'stored; expected no' if is_known else 'new; expected its'} payload")
    faults += [f"prompt {slot} comes without its item" for slot in commit.prompts if slot not in commit.items]
    faults += [f"payload {seq} comes without its group" for seq in commit.payloads if seq not in commit.groups]
    return faults + _faults_of_values(commit)


def _faults_of_values(commit: Commit) -> list[str]:
    faults = []
    if commit.reviews.dtype != REVIEW:
        faults.append(f"reviews are of {commit.reviews.dtype}; expected {REVIEW}")
    if (commit.request is None) != (commit.answer is None):
        faults.append(f"request = {commit.request!r} with answer = {commit.answer!r}; expected both or neither")
    faults += json_faults(commit.answer, "answer")
    if "position" in commit.state:
        faults.append("state has the name 'position', which the journal keeps itself")
    for name, value in commit.state.items():
        faults += [] if isinstance(value, bytes) else json_faults(value, f"state {name!r}")
    return faults


def is_of(row: Row, dtype: np.dtype) -> bool:
    """Return whether a row has this dtype; for bytes, only the length is compared."""
    if isinstance(row, bytes):
        return len(row) == dtype.itemsize
    return row.dtype is dtype or row.dtype == dtype  # identity first: comparing all fields dominates the cost


def bytes_of(row: Row) -> bytes:
    """Return a row as bytes."""
    return row if isinstance(row, bytes) else row.tobytes()


def checksum(data: bytes | str) -> int:
    """Return the xxh3 of bytes, or of text in UTF-8, as the signed integer that SQLite stores."""
    return signed(xxhash.xxh3_64_intdigest(data.encode() if isinstance(data, str) else data))


def signed(value: int) -> int:
    """Return the signed integer with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def checked(data: Any, stored: int, what: str) -> Any:
    """Return `data` after verifying its checksum.

    Args:
        data: bytes or text.
        stored: the expected checksum.
        what: the name of the data in error messages.

    Raises:
        JournalError: the checksum differs.
    """
    if checksum(data) != stored:
        raise JournalError(f"{what} is damaged: its checksum does not agree; restore a checkpoint")
    return data


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as a line of JSON."""
    return compact_json(prompt_fields(prompt))


def prompt_from(text: str) -> Prompt:
    """Return the prompt that `prompt_text` encoded."""
    return prompt_of(json.loads(text))


def dtype_text(dtype: np.dtype) -> str:
    """Return a structured dtype as JSON, comparable between processes."""
    return json.dumps(np.lib.format.dtype_to_descr(dtype))


def dtype_from(text: str) -> np.dtype:
    """Return the dtype that `dtype_text` encoded."""
    return np.lib.format.descr_to_dtype([tuple(part) for part in json.loads(text)])


def dtype_difference(stored: np.dtype, wanted: np.dtype) -> str:
    """Return the differences of two row dtypes, field by field; "" if they are equal."""
    if dtype_text(stored) == dtype_text(wanted):
        return ""
    ours, theirs = ({name: str(part[0]) for name, part in (dtype.fields or {}).items()} for dtype in (wanted, stored))
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    parts = [f"{name} is {theirs.get(name, 'absent')} in the file, {ours.get(name, 'absent')} here" for name in names]
    return "; ".join(parts) or "the same fields lie elsewhere"


def stored_in(db: Connection, name: str, item: np.dtype, group: np.dtype) -> Stored:
    """Read the result of `Journal.load` from tables without unfolded log rows.

    Args:
        db: an open journal.
        name: the journal's name in error messages.
        item: dtype of the item rows.
        group: dtype of the group rows.

    Raises:
        JournalError: a row is damaged.
    """
    slots, items, prompts = [], [], []
    for slot, row, stored, text, text_stored in db.execute("SELECT * FROM items ORDER BY slot"):
        slots.append(slot)
        items.append(checked(row, stored, f"{name}, item {slot}"))
        prompts.append(prompt_from(checked(text, text_stored, f"{name}, item {slot}, prompt")))
    seqs, group_slots, groups, positions = [], [], [], []
    for seq, slot, row, position, stored in db.execute("SELECT * FROM groups ORDER BY seq"):
        seqs.append(seq)
        group_slots.append(slot)
        groups.append(checked(row, stored, f"{name}, group {seq}"))
        positions.append(position)
    texts = db.execute("SELECT * FROM orphans ORDER BY seq")
    state = state_in(db, name)
    return Stored(
        position=state.pop("position"),
        slots=np.array(slots, np.int64),
        items=np.frombuffer(b"".join(items), item),
        prompts=prompts,
        seqs=np.array(seqs, np.int64),
        groups=np.frombuffer(b"".join(groups), group),
        group_slots=np.array(group_slots, np.int64),
        positions=np.array(positions, np.int64),
        orphans={seq: prompt_from(checked(text, stored, f"{name}, orphan {seq}")) for seq, text, stored in texts},
        state=state,
    )


def state_in(db: Connection, name: str) -> dict[str, Any]:
    """Return the state, including "position"; `name` is the journal's name in error messages."""
    values = {key: checked(v, c, f"{name}, state {key!r}") for key, v, c in db.execute("SELECT * FROM state")}
    return {key: value if isinstance(value, bytes) else json.loads(value) for key, value in values.items()}


def reviews_in(db: Connection, after: int, last: int | None) -> np.ndarray:
    """Return the `last` newest reviews of commits after a position, oldest first; None returns all."""
    query = f"SELECT {', '.join(REVIEW.names or ())} FROM reviews WHERE position > ? ORDER BY rowid DESC LIMIT ?"
    rows = db.execute(query, (after, -1 if last is None else last)).fetchall()[::-1]
    # SQLite keeps NaN as NULL.
    whole = [tuple(np.nan if value is None else value for value in (key % (1 << 64), *rest)) for key, *rest in rows]
    return np.array(whole, REVIEW)
