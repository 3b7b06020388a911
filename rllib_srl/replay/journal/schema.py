"""Define the journal's tables, the content of a commit (`Commit`), and the loaded state (`Stored`).

    meta      schema version, dtypes of the rows, lineage, position of the last commit
    items     slot -> row, prompt
    vectors   slot -> float32 vector
    groups    seq -> row                   mutable rows, stored apart from
    payloads  seq -> bytes of the group    immutable payloads
    requests  position -> name, answer                                          the last few thousand
    state     name -> JSON, or bytes

SQLite detects damaged pages; there are no other checksums.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_srl.replay.journal.codec import compact_json, json_faults, prompt_fields, prompt_of
from rllib_srl.replay.journal.file import JournalError, transaction
from rllib_srl.types import Prompt

if TYPE_CHECKING:
    from sqlite3 import Connection

SCHEMA_VERSION = 3

TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS items (slot INTEGER PRIMARY KEY, row BLOB NOT NULL, prompt TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS vectors (slot INTEGER PRIMARY KEY, vector BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS groups (seq INTEGER PRIMARY KEY, row BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS payloads (seq INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS requests (position INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, answer TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""

Row = np.void | bytes  # a record, or its `tobytes`


@dataclass(frozen=True)
class Commit:
    """The changes of one transaction, stored atomically.

    Invariant: a slot may be both removed and written; the removal then comes first.
    """

    items: Mapping[int, Row] = field(default_factory=dict)  # slot -> row, of the journal's item dtype
    prompts: Mapping[int, Prompt] = field(default_factory=dict)  # of slots that are new or reused
    vectors: Mapping[int, np.ndarray] = field(default_factory=dict)  # of slots in `items`
    removed_slots: Collection[int] = ()  # their vectors are removed too, their groups are not
    groups: Mapping[int, Row] = field(default_factory=dict)  # seq -> row, of the journal's group dtype
    payloads: Mapping[int, bytes] = field(default_factory=dict)  # seq -> bytes; exactly the new groups
    removed_groups: Collection[int] = ()
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
    groups: np.ndarray  # rows
    state: dict[str, Any]


@dataclass(frozen=True)
class Meta:
    """The entries of `meta`."""

    item: np.dtype  # of the item rows
    group: np.dtype  # of the group rows
    lineage: str  # id made at creation, shared with all snapshots
    position: int  # of the last commit


# --- writing a commit ---------------------------------------------------------------------------------------------


def write_commit(db: Connection, commit: Commit, position: int, item: np.dtype, group: np.dtype) -> None:
    """Write a commit to the tables; call inside a transaction, which an error rolls back.

    Args:
        db: an open journal.
        commit: the changes.
        position: of this commit.
        item: dtype of the item rows.
        group: dtype of the group rows.

    Raises:
        ValueError: the changes contradict themselves or the stored state; the message lists the errors.
    """
    faults = [f"item {slot} is a row of another dtype" for slot, row in commit.items.items() if not is_of(row, item)]
    faults += [f"group {seq} is a row of another dtype" for seq, row in commit.groups.items() if not is_of(row, group)]
    if faults := faults + list(_faults_of_values(commit)):
        raise ValueError("; ".join(faults))
    for table, column, gone in (
        ("items", "slot", commit.removed_slots),
        ("vectors", "slot", commit.removed_slots),
        ("groups", "seq", commit.removed_groups),
        ("payloads", "seq", commit.removed_groups),
    ):
        db.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(int(number),) for number in gone])
    texts = [(int(slot), bytes(commit.items[slot]), prompt_text(prompt)) for slot, prompt in commit.prompts.items()]
    db.executemany("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", texts)
    vectors = [(int(slot), np.ascontiguousarray(vector, "<f4").tobytes()) for slot, vector in commit.vectors.items()]
    db.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", vectors)
    new = [(int(seq), bytes(commit.groups[seq])) for seq in commit.payloads]
    db.executemany("INSERT INTO groups VALUES (?, ?)", new)
    payloads = [(int(seq), payload) for seq, payload in commit.payloads.items()]
    db.executemany("INSERT INTO payloads VALUES (?, ?)", payloads)
    _update_rows(db, "items", "slot", commit.items, commit.prompts)
    _update_rows(db, "groups", "seq", commit.groups, commit.payloads)
    if commit.request is not None:
        answer = (position, commit.request, compact_json(commit.answer))
        db.execute("INSERT OR REPLACE INTO requests VALUES (?, ?, ?)", answer)
    state = [(name, value if isinstance(value, bytes) else compact_json(value)) for name, value in commit.state.items()]
    db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", state)
    set_meta(db, "position", str(position))


def _update_rows(db: Connection, table: str, column: str, rows: Mapping[int, Row], new: Collection[int]) -> None:
    """Update the rows that are not new; each must be stored."""
    old = [(bytes(row), int(number)) for number, row in rows.items() if number not in new]
    num_stored = db.executemany(f"UPDATE {table} SET row = ? WHERE {column} = ?", old).rowcount if old else 0
    if num_stored < len(old):
        missing = {"items": "prompt", "groups": "payload"}[table]
        numbers = [number for _, number in old]
        raise ValueError(f"{len(old) - num_stored} of {table} {numbers} are new; expected their {missing}s")


def _faults_of_values(commit: Commit) -> Iterator[str]:
    for name, part, whole in (
        ("prompt", commit.prompts, commit.items),
        ("vector", commit.vectors, commit.items),
        ("payload", commit.payloads, commit.groups),
    ):
        yield from (f"{name} {number} comes without its row" for number in part if number not in whole)
    if (commit.request is None) != (commit.answer is None):
        yield f"request = {commit.request!r} with answer = {commit.answer!r}; expected both or neither"
    yield from json_faults(commit.answer, "answer")
    for name, value in commit.state.items():
        yield from [] if isinstance(value, bytes) else json_faults(value, f"state {name!r}")


def is_of(row: Row, dtype: np.dtype) -> bool:
    """Return whether a row has this dtype; for bytes, only the length is compared."""
    if isinstance(row, bytes):
        return len(row) == dtype.itemsize
    return row.dtype is dtype or row.dtype == dtype  # identity first: comparing all fields dominates the cost


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as a line of JSON."""
    return compact_json(prompt_fields(prompt))


# --- reading ------------------------------------------------------------------------------------------------------


def stored_in(db: Connection, position: int, item: np.dtype, group: np.dtype) -> Stored:
    """Read the state of an open journal at its last position; `item` and `group` are the dtypes of its rows."""
    items = db.execute("SELECT slot, row, prompt FROM items ORDER BY slot").fetchall()
    groups = db.execute("SELECT seq, row FROM groups ORDER BY seq").fetchall()
    state = db.execute("SELECT name, value FROM state").fetchall()
    return Stored(
        position=position,
        slots=np.array([slot for slot, _, _ in items], np.int64),
        items=np.frombuffer(b"".join(row for _, row, _ in items), item),
        prompts=[prompt_of(json.loads(prompt)) for _, _, prompt in items],
        seqs=np.array([seq for seq, _ in groups], np.int64),
        groups=np.frombuffer(b"".join(row for _, row in groups), group),
        state={name: value if isinstance(value, bytes) else json.loads(value) for name, value in state},
    )


# --- meta ---------------------------------------------------------------------------------------------------------


def create_tables(db: Connection, item: np.dtype, group: np.dtype) -> None:
    """Create the tables of a journal in an empty database and start a new lineage."""
    meta = {"schema": str(SCHEMA_VERSION), "item": dtype_text(item), "group": dtype_text(group), "position": "0"}
    meta["lineage"] = uuid.uuid4().hex
    with transaction(db):
        for statement in TABLES.split(";")[:-1]:
            db.execute(statement)
        for name, value in meta.items():
            set_meta(db, name, value)


def set_meta(db: Connection, name: str, value: str) -> None:
    """Write an entry of `meta`."""
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


def is_empty(db: Connection) -> bool:
    """Return whether the database has no tables."""
    has_no_tables: bool = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    return has_no_tables


def read_meta(db: Connection, path: Path, item: np.dtype | None = None, group: np.dtype | None = None) -> Meta:
    """Return the journal's `meta`.

    Args:
        db: an open journal.
        path: of the journal, for error messages.
        item: the expected dtype of item rows; None accepts any.
        group: the expected dtype of group rows; None accepts any.

    Raises:
        JournalError: the database is no journal, or was written by another version.
    """
    if not db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]:
        raise JournalError(f"{path} is an SQLite database but no journal; expected a table 'meta'")
    query = "SELECT name, value FROM meta"
    meta = dict(db.execute(query).fetchall())
    if meta["schema"] != str(SCHEMA_VERSION):
        raise JournalError(
            f"journal {path} was written by another version of this program (schema {meta['schema']}), which is not "
            f"supported; expected schema {SCHEMA_VERSION}: remove it and begin a new run"
        )
    stored = dtype_from(meta["item"]), dtype_from(meta["group"])
    faults = []
    for name, found, wanted in zip(("item", "group"), stored, (item, group), strict=True):
        if wanted is not None and (difference := dtype_difference(found, wanted)):
            faults.append(f"{name} rows differ: {difference}")
    if faults:
        raise JournalError(f"journal {path} was written by another version of this program: {'; '.join(faults)}")
    return Meta(*stored, meta["lineage"], int(meta["position"]))


def dtype_text(dtype: np.dtype) -> str:
    """Return a structured dtype as JSON, comparable between processes."""
    return json.dumps(np.lib.format.dtype_to_descr(dtype))


def dtype_from(text: str) -> np.dtype:
    """Return the dtype that `dtype_text` encoded."""
    dtype: np.dtype = np.lib.format.descr_to_dtype([tuple(part) for part in json.loads(text)])
    return dtype


def dtype_difference(stored: np.dtype, wanted: np.dtype) -> str:
    """Return the differences of two row dtypes, field by field; "" if they are equal."""
    if dtype_text(stored) == dtype_text(wanted):
        return ""
    ours, theirs = ({name: str(part[0]) for name, part in (dtype.fields or {}).items()} for dtype in (wanted, stored))
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    parts = [f"{name} is {theirs.get(name, 'absent')} in the file, {ours.get(name, 'absent')} here" for name in names]
    return "; ".join(parts) or "the same fields lie elsewhere"
