"""Keep a memory in one SQLite file that always holds the state of the last commit.

    with store.transaction(): put, write, ...    all of it is durable at the end, or nothing is stored
    read() ──> tables, state                     answer(request) makes a repeated call harmless
    snapshot(path) ──> a copy for a checkpoint   restore(path) goes back to one

    items    slot -> row, prompt, vector    groups  seq -> row, id           payloads  seq -> bytes of the group
    state    name -> JSON                   answers   position -> name, answer

    memory.db, -wal, -shm    the database and SQLite's log      memory.db.lock   locked by the process that writes it

Commits survive a crash of the process, and a power loss unless the directory is temporary. A file belongs to one run;
another run's file is renamed memory.earlier.db, until a snapshot of that run is restored. Known limit of SQLite: damage
inside the log silently drops the commits from there on.

Source: SQLite, "Write-Ahead Logging" (sqlite.org/wal.html), "Atomic Commit" (sqlite.org/atomiccommit.html) and "Online
Backup API" (sqlite.org/c3ref/backup_finish.html).
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.items import GROUP, ITEM, Tables
from rllib_srl.replay.payloads import compact_json, decode, prompt_fields, prompt_of
from rllib_srl.storage.database import TIMEOUT_S, Database, DatabaseError
from rllib_srl.storage.disk import DiskFull
from rllib_srl.types import Group

DATABASE, EARLIER, SNAPSHOT = "memory.db", "memory.earlier.db", "snapshot.db"
NUM_ANSWERS = 4096
# Larger pages cost more where a commit updates rows all over the tables, smaller ones cost large groups more calls.
PAGE_BYTES = 8192
MAX_LOG_BYTES = 32 << 20  # a commit that finds more than this in the log moves it into the file
PAGES_A_STEP = 1024  # pages per step of a copy
VERSION = json.dumps([8, np.lib.format.dtype_to_descr(ITEM), np.lib.format.dtype_to_descr(GROUP)])
TABLES = """
CREATE TABLE items (slot INTEGER PRIMARY KEY, row BLOB NOT NULL, prompt TEXT NOT NULL, vector BLOB);
CREATE TABLE groups (seq INTEGER PRIMARY KEY, row BLOB NOT NULL, id TEXT NOT NULL);
CREATE TABLE payloads (seq INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE answers (position INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, answer TEXT NOT NULL);
CREATE TABLE state (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""


class StoreError(DatabaseError):
    """An operation on a memory's database failed; the message names the file, the error and a remedy."""


class StoreFull(DiskFull, StoreError):
    """There is no room for the new data; the data stored before is intact."""


class Store(Database):
    """An open database, held by one process. Invariant: `position` grows by one with each successful commit."""

    tables, schema, content, error, full = TABLES, VERSION, "memory", StoreError, StoreFull
    mode, is_of_one_thread = 0o666, False

    def __init__(self, directory: Path | None, run: str = "") -> None:
        """Open the database of a run in `directory`, or create it; set that of another run aside, unless `run` is "".

        Without a directory it is a temporary one, which `close` deletes.
        """
        self._scratch = tempfile.TemporaryDirectory(prefix="rllib_srl_replay_") if directory is None else None
        self.pragmas = (
            f"page_size = {PAGE_BYTES}",
            f"journal_mode = {'WAL' if self._scratch is None else 'MEMORY'}",
            f"synchronous = {'FULL' if self._scratch is None else 'OFF'}",
            f"wal_autocheckpoint = {MAX_LOG_BYTES // PAGE_BYTES}",
            "cache_size = -16384",
            "temp_store = MEMORY",
        )
        path = Path(self._scratch.name if self._scratch else directory or "") / DATABASE
        self._lock: int | None = _lock(path)
        try:
            self._open(path, run)
            if run and self._meta["run"] != run:
                earlier = [self.source_id, _num_groups(self._db)] if self.position else self._earlier
                with self._explained("setting it aside"):
                    to_one_file(self._db)
                    self._db.close()
                    if self.position:
                        path.replace(path.with_name(EARLIER))
                    _remove(path)
                self._open(path, run, earlier)
        except BaseException:
            self._release()
            raise

    def _open(self, path: Path, run: str, earlier: Sequence[Any] = ("", 0)) -> None:
        super().__init__(path, position="0", run=run, earlier=json.dumps(earlier))
        self._take_meta()

    def _take_meta(self) -> None:
        with self._explained("opening"):
            self._meta = self.meta_of(self._db, self.path)
        self.position = int(self._meta["position"])
        self._earlier: list[Any] = json.loads(self._meta["earlier"])  # id and number of groups of the file set aside
        self._written: dict[str, str] = {}  # state as last written, encoded

    # --- writing ---------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Store all that is written inside, or nothing; it is durable at the end, and usable after a `StoreError`."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            with self._db:
                yield
                self.put("meta", [("position", str(self.position + 1))])
        except sqlite3.Error as error:
            raise self.error_of(error, self.path, f"commit {self.position + 1}") from error
        self.position += 1

    def put(self, table: str, rows: Collection[Sequence[Any]]) -> None:
        """Write rows, which replace those with the same key, in a transaction."""
        if rows:
            marks = ", ".join("?" * len(next(iter(rows))))
            self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)

    def delete(self, table: str, condition: str, rows: Collection[Sequence[Any]]) -> None:
        """Delete the rows that meet a condition such as "seq = ?", for each of its values, in a transaction."""
        self._db.executemany(f"DELETE FROM {table} WHERE {condition}", rows)

    def write(self, tables: Tables) -> None:
        self.delete("items", "slot = ?", [(slot,) for slot in tables.removed_slots])
        for name in ("groups", "payloads"):
            self.delete(name, "seq = ?", [(seq,) for seq in tables.removed_groups])
        changed = tables.changed_items()
        items = [(slot, row, compact_json(prompt_fields(prompt)), vector) for slot, row, prompt, vector in changed]
        self.put("items", items)
        self.put("groups", tables.changed_groups())

    def put_state(self, state: Mapping[str, Any]) -> None:
        encoded = {name: compact_json(value) for name, value in state.items()}
        self.put("state", [(name, value) for name, value in encoded.items() if self._written.get(name) != value])
        self._written |= encoded

    def put_answer(self, request: str, answer: Any) -> None:
        """Write the answer of a named call, of JSON types; the latest `NUM_ANSWERS` are kept."""
        row = (self.position + 1, request, compact_json(answer))
        self._db.execute("INSERT INTO answers VALUES (?, ?, ?)", row)
        self.delete("answers", "position <= ?", [(self.position + 1 - NUM_ANSWERS,)])

    def erase(self) -> None:
        """Forget all answers, and rewrite the file, so that no byte of anything deleted is left."""
        with self._explained("erasing what was removed"):
            self._db.execute("DELETE FROM answers")
            self._db.execute("VACUUM")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        _remove(self.path.with_name(EARLIER))

    # --- reading ---------------------------------------------------------------------------------

    def answer(self, request: str) -> Any | None:
        """Return the answer that was committed with a request, or None if there is none or it is no longer kept."""
        row = self._row("SELECT answer FROM answers WHERE name = ?", request)
        return json.loads(row[0]) if row else None

    def payload(self, seq: int) -> bytes:
        """Return the bytes of a group; raise a `StoreError` if it is not stored."""
        row = self._row("SELECT CAST(payload AS BLOB) FROM payloads WHERE seq = ?", int(seq))
        if row is None:
            raise StoreError(f"memory {self.path} has no group {seq}: it was removed, or replaced by a newer one")
        payload: bytes = row[0]
        return payload

    def group(self, seq: int, origin: str | None = None) -> Group:
        """Return a group, with another origin if one is given."""
        return decode(self.payload(seq), str(seq), origin)

    def _row(self, query: str, *values: Any) -> Any | None:
        try:
            return self._db.execute(query, values).fetchone()
        except sqlite3.Error as error:
            raise self.error_of(error, self.path, "reading") from error

    def read(self) -> tuple[Tables, dict[str, Any]]:
        """Return the tables and the state that the last commit left; raise a `StoreError` if the file is damaged."""
        items = self._read("SELECT slot, row, prompt, vector FROM items ORDER BY slot")
        groups = self._read("SELECT seq, row, id FROM groups ORDER BY seq")
        texts = dict(self._read("SELECT name, value FROM state"))
        vectors = [vector for *_, vector in items if vector is not None]
        try:
            state = {name: json.loads(value) for name, value in texts.items()}
            tables = Tables(
                np.array([slot for slot, *_ in items], np.int64),
                np.frombuffer(b"".join(row for _, row, *_ in items), ITEM),
                [prompt_of(fields) for fields in json.loads(f"[{','.join(text for _, _, text, _ in items)}]")],
                np.frombuffer(b"".join(row for _, row, _ in groups), GROUP),
                [name for _, _, name in groups],
                np.frombuffer(b"".join(vectors), np.float32).reshape(len(vectors), -1) if vectors else None,
                **state.get("items", {}),
            )
        except (ValueError, TypeError) as error:
            reason = f"loading it failed: {error}: the file is damaged; restore a checkpoint"
            raise StoreError(f"memory {self.path}: {reason}") from error
        self._written = texts
        return tables, state

    # --- copies ----------------------------------------------------------------------------------

    def snapshot(self, path: Path) -> None:
        """Write a copy of the last commit to `path` atomically, in bounded memory."""
        scratch = path.with_name(path.name + ".new")
        with self.explained(self.path, f"snapshot {path}", written=path):
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch.unlink(missing_ok=True)
            try:
                with closing(sqlite3.connect(scratch, isolation_level=None)) as target:
                    for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -4096"):
                        target.execute(f"PRAGMA {pragma}").fetchall()
                    self._db.backup(target, pages=PAGES_A_STEP)
                    to_one_file(target)  # the source's mark of a log was copied too
                flush(scratch)
                os.replace(scratch, path)
                flush(path.parent)
            finally:
                scratch.unlink(missing_ok=True)

    def restore(self, snapshot: Path) -> int:
        """Go back to a snapshot; return the number of groups stored after it, which are dropped.

        If nothing was committed here yet, they are those of the file that was set aside, which is removed if it
        continued the snapshot's run. A crash leaves either the old state or the snapshot, complete, and so does an
        error.
        """
        lineage, num_groups = (self.source_id, _num_groups(self._db)) if self.position else self._earlier
        if not snapshot.is_file():
            raise StoreError(f"snapshot {snapshot} does not exist; expected a file that a checkpoint holds")
        meta = [("run", self._meta["run"]), ("earlier", json.dumps(["", 0]))]
        try:
            with _reader(snapshot) as source, self.explained(snapshot, "restoring", written=self.path):
                is_same = self.meta_of(source, snapshot)["id"] == lineage
                num_dropped = max(0, num_groups - _num_groups(source)) if is_same else 0
                source.backup(self._db, pages=PAGES_A_STEP)  # one transaction
                self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta)
            with suppress(sqlite3.Error):  # else the next commit moves all of it into the file
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            if is_same and not self.position:
                _remove(self.path.with_name(EARLIER))
        finally:
            self._take_meta()
        return num_dropped

    def close(self) -> None:
        """Close the file, in one piece, and release its lock; a second call does nothing."""
        with suppress(sqlite3.Error):  # else the log stays for the next opening
            to_one_file(self._db)
        self._db.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._scratch is not None:
            self._scratch.cleanup()


# --- files of SQLite ---------------------------------------------------------------------------------


def to_one_file(db: sqlite3.Connection) -> None:
    """Move the log into the database and delete it, so that the file can be moved, or read where nobody may write."""
    db.execute("PRAGMA journal_mode = DELETE").fetchall()


def flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _remove(path: Path) -> None:
    """Delete the files of a database that nobody has open."""
    for ending in ("", "-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)


@contextmanager
def _reader(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection that reads the last commit of a database, in use or not; its owner does not wait."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with (
        Store.explained(path, "reading"),
        closing(sqlite3.connect(uri, uri=True, timeout=TIMEOUT_S, isolation_level=None)) as db,
    ):
        db.execute("BEGIN")  # one read transaction: a copy in steps would begin again with each commit
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield db


def _num_groups(db: sqlite3.Connection) -> int:
    """Return how many groups were ever stored in a database."""
    row = db.execute("SELECT value FROM state WHERE name = 'items'").fetchone()
    return int(json.loads(row[0])["next_group_seq"]) if row else 0


def _lock(path: Path) -> int:
    """Lock a database for this process; return the open file, which the operating system unlocks when it is closed."""
    with Store.explained(path, "locking"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if (owner := _owner_of(file)) is not None:
                remedy = "expected one buffer per file: stop the other one, or choose another directory"
                raise StoreError(f"memory {path} is in use by process {owner}; {remedy}")
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(file)
            raise
        return file


def holder_of(path: Path) -> int | None:
    """Return the id of the process that has the database at `path` open, or None."""
    try:
        file = os.open(f"{path}.lock", os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return int(_owner_of(file) or 0) or None
    finally:
        os.close(file)


def _owner_of(file: int) -> str | None:
    """Lock an open file and return None, or return what its owner has written into it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(file, 32, 0).decode("ascii", "replace").strip()
    return None
