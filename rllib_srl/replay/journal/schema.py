"""Define the journal's tables, the content of a commit (`Commit`), and the loaded state (`Stored`).

    meta      schema version, dtypes of the rows, branches, position of the last commit
    items     slot -> row, prompt
    vectors   slot -> float32 vector
    groups    seq -> row, position of its commit, and of orphans the prompt     mutable rows, stored apart from
    payloads  seq -> bytes of the group                                         immutable payloads
    reviews   one row per review, append-only
    requests  position -> name, answer                                          the last few thousand
    state     name -> JSON, or bytes

SQLite detects damaged pages. A payload contains its own checksum; rows have none.
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
from rllib_srl.replay.store.records import with_fields
from rllib_srl.types import Prompt

if TYPE_CHECKING:
    from sqlite3 import Connection

SCHEMA_VERSION = 2
FIRST_ORPHAN = 1 << 62  # first seq of groups imported by `restore`; a run never reaches it

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
REVIEW_COLUMNS = ", ".join(REVIEW.names or ())

TABLES = f"""
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS items (slot INTEGER PRIMARY KEY, row BLOB NOT NULL, prompt TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS vectors (slot INTEGER PRIMARY KEY, vector BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS groups (seq INTEGER PRIMARY KEY, row BLOB NOT NULL, position INTEGER NOT NULL, prompt TEXT);
CREATE TABLE IF NOT EXISTS payloads (seq INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS reviews (position INTEGER NOT NULL, {REVIEW_COLUMNS});
CREATE TABLE IF NOT EXISTS requests (position INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, answer TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""

PADDING = "spare"  # name of the field without a meaning that fills a row
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
    orphans: dict[int, Prompt]  # seq -> prompt of the group
    state: dict[str, Any]


Branches = list[tuple[str, int]]  # id and start position of each branch, from the root to the last; see snapshots.py


@dataclass(frozen=True)
class Meta:
    """The entries of `meta`."""

    item: np.dtype  # of the item rows
    group: np.dtype  # of the group rows
    branches: Branches
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
    new = [(int(seq), bytes(commit.groups[seq]), position) for seq in commit.payloads]
    db.executemany("INSERT INTO groups (seq, row, position) VALUES (?, ?, ?)", new)
    payloads = [(int(seq), payload) for seq, payload in commit.payloads.items()]
    db.executemany("INSERT INTO payloads VALUES (?, ?)", payloads)
    _update_rows(db, "items", "slot", commit.items, commit.prompts)
    _update_rows(db, "groups", "seq", commit.groups, commit.payloads)
    marks = ", ".join("?" * (1 + len(REVIEW.names or ())))
    db.executemany(f"INSERT INTO reviews VALUES ({marks})", _review_rows(commit.reviews, position))
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
    if commit.reviews.dtype != REVIEW:
        yield f"reviews are of {commit.reviews.dtype}; expected {REVIEW}"
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


def _review_rows(reviews: np.ndarray, position: int) -> Iterator[tuple[Any, ...]]:
    for key, *rest in reviews.tolist():
        yield position, key - (key >> 63 << 64), *rest  # SQLite's integers are signed


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as a line of JSON."""
    return compact_json(prompt_fields(prompt))


# --- reading ------------------------------------------------------------------------------------------------------


def stored_in(db: Connection, position: int, item: np.dtype, group: np.dtype) -> Stored:
    """Read the state of an open journal at its last position; `item` and `group` are the dtypes of its rows."""
    items = db.execute("SELECT slot, row, prompt FROM items ORDER BY slot").fetchall()
    groups = db.execute("SELECT seq, row, prompt FROM groups ORDER BY seq").fetchall()
    state = db.execute("SELECT name, value FROM state").fetchall()
    return Stored(
        position=position,
        slots=np.array([slot for slot, _, _ in items], np.int64),
        items=np.frombuffer(b"".join(row for _, row, _ in items), item),
        prompts=[prompt_of(json.loads(prompt)) for _, _, prompt in items],
        seqs=np.array([seq for seq, _, _ in groups], np.int64),
        groups=np.frombuffer(b"".join(row for _, row, _ in groups), group),
        orphans={seq: prompt_of(json.loads(prompt)) for seq, _, prompt in groups if prompt is not None},
        state={name: value if isinstance(value, bytes) else json.loads(value) for name, value in state},
    )


def reviews_in(db: Connection, last: int | None) -> np.ndarray:
    """Return the `last` newest reviews, oldest first; None returns all."""
    query = f"SELECT {REVIEW_COLUMNS} FROM reviews ORDER BY rowid DESC LIMIT ?"
    rows = db.execute(query, (-1 if last is None else last,)).fetchall()[::-1]
    # SQLite keeps NaN as NULL.
    whole = [tuple(np.nan if value is None else value for value in (key % (1 << 64), *rest)) for key, *rest in rows]
    return np.array(whole, REVIEW)


# --- meta ---------------------------------------------------------------------------------------------------------


def create_tables(db: Connection, item: np.dtype, group: np.dtype) -> None:
    """Create the tables of a journal in an empty database and start a new lineage."""
    meta = {"schema": str(SCHEMA_VERSION), "item": dtype_text(item), "group": dtype_text(group), "position": "0"}
    meta["branches"] = json.dumps([(uuid.uuid4().hex, 0)])
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
    """Return the journal's `meta`; rewrite a journal of an earlier version first.

    A journal of schema version 1 is rewritten. Rows that lack fields of `item` or `group` get them with the value 0.

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
    if meta["schema"] == "1":
        _rewrite_version_1(db, path)
        meta = dict(db.execute(query).fetchall())
    if meta["schema"] != str(SCHEMA_VERSION):
        raise JournalError(f"journal {path} is of schema {meta['schema']}; expected {SCHEMA_VERSION}")
    if item is not None and (renamed := _with_new_names(meta["item"])) != meta["item"]:
        with transaction(db):
            set_meta(db, "item", renamed)
        meta["item"] = renamed
    for kind, dtype in (("item", item), ("group", group)):
        if dtype is not None and _lacks_fields(dtype_from(meta[kind]), dtype):
            _add_fields(db, kind, dtype_from(meta[kind]), dtype)
            meta[kind] = dtype_text(dtype)
    stored = dtype_from(meta["item"]), dtype_from(meta["group"])
    faults = []
    for name, found, wanted in zip(("item", "group"), stored, (item, group), strict=True):
        if wanted is not None and (difference := dtype_difference(found, wanted)):
            faults.append(f"{name} rows differ: {difference}")
    if faults:
        raise JournalError(f"journal {path} was written by another version of this program: {'; '.join(faults)}")
    branches = [(branch, start) for branch, start in json.loads(meta["branches"])]
    return Meta(*stored, branches, int(meta["position"]))


# Version 1 had a checksum in every row, orphans in their own table, the position in `state`, and commits in `log`
# until they were folded into the other tables, at the latest when the journal was closed.
_FROM_VERSION_1 = """
INSERT INTO items SELECT slot, row, prompt FROM old_items;
INSERT INTO vectors SELECT slot, vector FROM old_vectors;
INSERT INTO groups SELECT g.seq, g.row, g.position, o.prompt FROM old_groups g LEFT JOIN orphans o USING (seq);
INSERT OR REPLACE INTO requests SELECT position, name, answer FROM old_requests ORDER BY position;
INSERT INTO state SELECT name, value FROM old_state WHERE name <> 'position';
INSERT INTO meta SELECT name, value FROM old_state WHERE name = 'position';
"""
_REWRITTEN = ("items", "vectors", "groups", "requests", "state")


def _rewrite_version_1(db: Connection, path: Path) -> None:
    """Rewrite a journal of schema version 1 in one transaction; the payloads stay where they are.

    Raises:
        JournalError: the process that wrote it was killed and its last commits are still in the log.
    """
    if db.execute("SELECT count(*) FROM log").fetchone()[0]:
        raise JournalError(
            f"journal {path} was written by an earlier version of this program (schema 1), which did not close it; "
            "expected a closed one: resume the run once with that version, or remove the file and use a checkpoint"
        )
    rename = [f"ALTER TABLE {table} RENAME TO old_{table}" for table in _REWRITTEN]
    drop = [f"DROP TABLE {table}" for table in ("log", "orphans", *(f"old_{table}" for table in _REWRITTEN))]
    with transaction(db):
        for statement in [*rename, *TABLES.split(";")[:-1], *_FROM_VERSION_1.split(";")[:-1], *drop]:
            db.execute(statement)
        set_meta(db, "schema", str(SCHEMA_VERSION))


def _shared(stored: np.dtype, wanted: np.dtype) -> list[str]:
    """Return the fields that rows of both dtypes have, padding left out."""
    ours, theirs = ({name: part[0] for name, part in (dtype.fields or {}).items()} for dtype in (wanted, stored))
    return [name for name in theirs if name != PADDING and theirs[name] == ours.get(name)]


def _lacks_fields(stored: np.dtype, wanted: np.dtype) -> bool:
    """Return whether `wanted` has all fields of `stored`, with the same types, and more."""
    num_kept = len(_shared(stored, wanted))
    names = [[name for name in dtype.names or () if name != PADDING] for dtype in (stored, wanted)]
    return num_kept == len(names[0]) < len(names[1])


_RENAMED = {"history_kl": "history_clock"}  # former name of a field -> name; the rows stay as they are


def _with_new_names(dtype: str) -> str:
    """Return the text of a dtype (`dtype_text`) with the names that its fields have now."""
    return json.dumps([[_RENAMED.get(name, name), *rest] for name, *rest in json.loads(dtype)])


_COLUMN = {"item": "slot", "group": "seq"}  # that names a row, in the tables "items" and "groups"


def _add_fields(db: Connection, kind: str, stored: np.dtype, wanted: np.dtype) -> None:
    """Rewrite the rows of a table with the fields that they lack, in one transaction; the new fields are 0."""
    column = _COLUMN[kind]
    with transaction(db):
        found = db.execute(f"SELECT {column}, row FROM {kind}s").fetchall()
        rows_N = with_fields(np.frombuffer(b"".join(row for _, row in found), stored), wanted)
        new = [(row.tobytes(), number) for row, (number, _) in zip(rows_N, found, strict=True)]
        db.executemany(f"UPDATE {kind}s SET row = ? WHERE {column} = ?", new)
        set_meta(db, kind, dtype_text(wanted))


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
