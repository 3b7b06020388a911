"""Keep a memory in one SQLite file that always holds the state of the last commit.

    with store.transaction(): put, write, ...    all of it is durable at the end, or nothing is stored
    read() ──> Contents: rows, prompts, state    answer(request) makes a repeated call harmless
    snapshot(path) ──> a copy for a checkpoint   restore(path) replaces the file by one

    items    slot -> row, prompt            groups  seq -> row, id           payloads  seq -> bytes of the group
    vectors  slot -> float32                targets seq, episode -> bytes    state     name -> JSON
    answers  position -> name, answer: the latest `NUM_ANSWERS`

    memory.db, -wal, -shm    the database and SQLite's log      memory.db.lock   locked by the process that writes it

Commits survive a crash of the process, and a power loss unless the directory is temporary. A file belongs to one run;
another run's file is renamed memory.earlier.db, from which `restore` counts the groups stored after a checkpoint. Known
limit of SQLite: damage inside the log silently drops the commits from there on.

Source: SQLite, "Write-Ahead Logging" (sqlite.org/wal.html) and "Atomic Commit" (sqlite.org/atomiccommit.html).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.items import GROUP, ITEM, Contents, Tables
from rllib_srl.replay.payloads import compact_json, prompt_fields, prompt_of
from rllib_srl.storage.disk import DiskFull, cannot_grow, full_message, is_full

logger = logging.getLogger(__name__)
DATABASE, EARLIER, SNAPSHOT = "memory.db", "memory.earlier.db", "snapshot.db"
ENDINGS = ("", "-wal", "-shm")  # of the files of a database
NUM_ANSWERS = 4096
# Larger pages cost more where a commit updates rows all over the tables, smaller ones cost large groups more calls.
PAGE_BYTES = 8192
MAX_LOG_BYTES = 32 << 20  # a commit that finds more than this in the log moves it into the file
PAGES_A_STEP = 1024  # of a copy
TIMEOUT_S = 10.0  # longest wait for another connection: a reader, or the owner while it opens or closes the file
VERSION = json.dumps([6, np.lib.format.dtype_to_descr(ITEM), np.lib.format.dtype_to_descr(GROUP)])
TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE items (slot INTEGER PRIMARY KEY, row BLOB NOT NULL, prompt TEXT NOT NULL);
CREATE TABLE vectors (slot INTEGER PRIMARY KEY, vector BLOB NOT NULL);
CREATE TABLE groups (seq INTEGER PRIMARY KEY, row BLOB NOT NULL, id TEXT NOT NULL);
CREATE TABLE payloads (seq INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE targets (seq INTEGER, episode INTEGER, payload BLOB NOT NULL, PRIMARY KEY (seq, episode)) WITHOUT ROWID;
CREATE TABLE answers (position INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, answer TEXT NOT NULL);
CREATE TABLE state (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""


class StoreError(RuntimeError):
    """An operation on a memory's database failed; the message names the file, the error and a remedy."""


class StoreFull(DiskFull, StoreError):
    """There is no room for the new data; the data stored before is intact."""


class StoreInUse(StoreError):
    """Another process has the database open."""


class Store:
    """An open database, held by one process. Invariant: `position` grows by one with each successful commit."""

    def __init__(self, directory: Path | None, run: str = "") -> None:
        """Open the database of a run in `directory`, or create it; set that of another run aside, but with `run` = "".

        Without a directory it is a temporary one, which `close` deletes.

        Raises:
            StoreError: it is in use by another process, damaged, not a memory, or of another version.
        """
        self._scratch = tempfile.TemporaryDirectory(prefix="rllib_srl_replay_") if directory is None else None
        self.path = Path(self._scratch.name if self._scratch else directory or "") / DATABASE
        self._lock = _lock(self.path)
        self._db: sqlite3.Connection | None = None
        self._run = run
        self._written: dict[str, str] = {}  # state as last written, encoded
        try:
            self._open()
            if run and self._meta["run"] != run:
                self._shut()
                if self.position:
                    _remove(self.path.with_name(EARLIER))
                    self.path.rename(self.path.with_name(EARLIER))
                _remove(self.path)
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        with explained(self.path, "opening it"):
            self._db = _connect(self.path, is_durable=self._scratch is None)
            if not self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                meta = {"version": VERSION, "lineage": uuid.uuid4().hex, "position": "0", "run": self._run}
                with self._atomic("creating it"):
                    for statement in TABLES.split(";")[:-1]:
                        self.db.execute(statement)
                    self.db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            self._meta = _meta_of(self.db, self.path)
        self.lineage, self.position = self._meta["lineage"], int(self._meta["position"])
        self._written = {}

    @property
    def db(self) -> sqlite3.Connection:
        """Return the open database; raise a `StoreError` if it is closed."""
        if self._db is None:
            raise StoreError(f"memory {self.path} is closed")
        return self._db

    # --- writing ---------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Store all that is written inside, or nothing; it is durable at the end.

        Raises:
            StoreError: the disk is full or damaged; nothing was stored, and the store remains usable.
        """
        with self._atomic(f"commit {self.position + 1}"):
            yield
            self.put("meta", [("position", str(self.position + 1))])
        self.position += 1

    @contextmanager
    def _atomic(self, doing: str) -> Iterator[None]:
        self._do(doing, "BEGIN IMMEDIATE")
        try:
            yield
            self._do(doing, "COMMIT")
        except BaseException:
            self._written = {}
            if self._db is not None and self._db.in_transaction:  # after some errors SQLite has rolled back already
                self._db.execute("ROLLBACK")
            raise

    def _do(self, doing: str, query: str, rows: Iterable[Sequence[Any]] | None = None) -> None:
        with explained(self.path, doing):
            if rows is None:
                self.db.execute(query)
            else:
                self.db.executemany(query, rows)

    def put(self, table: str, rows: Collection[Sequence[Any]]) -> None:
        """Write rows in place of those with the same key, in a transaction."""
        if rows:
            marks = ", ".join("?" * len(next(iter(rows))))
            self._do(f"commit {self.position + 1}", f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)

    def delete(self, table: str, condition: str, rows: Collection[Sequence[Any]]) -> None:
        """Delete the rows that meet a condition such as "seq = ?", for each of its values, in a transaction."""
        if rows:
            self._do(f"commit {self.position + 1}", f"DELETE FROM {table} WHERE {condition}", rows)

    def write(self, tables: Tables, vectors: Mapping[int, np.ndarray]) -> None:
        """Write what has changed in tables since their last commit, and vectors by slot."""
        changed = tables.changed()
        for names, key, gone in (
            (("items", "vectors"), "slot", changed.removed_slots),
            (("groups", "payloads", "targets"), "seq", changed.removed_groups),
        ):
            for name in names:
                self.delete(name, f"{key} = ?", [(number,) for number in gone])
        self.put("items", [(slot, row, compact_json(prompt_fields(one))) for slot, row, one in changed.items])
        self.put("groups", changed.groups)
        self.put("vectors", [(slot, np.ascontiguousarray(one, "<f4").tobytes()) for slot, one in vectors.items()])

    def put_state(self, state: Mapping[str, Any]) -> None:
        """Write the values that have changed, of JSON types, by name."""
        encoded = {name: compact_json(value) for name, value in state.items()}
        self.put("state", [(name, value) for name, value in encoded.items() if self._written.get(name) != value])
        self._written |= encoded

    def put_answer(self, request: str, answer: Any) -> None:
        """Write the answer of a named call, of JSON types; the latest `NUM_ANSWERS` are kept."""
        position = self.position + 1
        row = (position, request, compact_json(answer))
        self._do(f"commit {position}", "INSERT INTO answers VALUES (?, ?, ?)", [row])
        self.delete("answers", "position <= ?", [(position - NUM_ANSWERS,)])

    def erase(self) -> None:
        """Forget all answers, and leave no byte of anything deleted in the files.

        The file is rewritten: a full disk is a `StoreError`.
        """
        with self._atomic("erasing what was removed"):
            self.db.execute("DELETE FROM answers")
        with explained(self.path, "erasing what was removed"):
            self.db.execute("VACUUM")
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        _remove(self.path.with_name(EARLIER))

    # --- reading ---------------------------------------------------------------------------------

    def answer(self, request: str) -> Any | None:
        """Return the answer that was committed with a request, or None if there is none or it is no longer kept."""
        found = self._all(f"reading answer {request}", "SELECT answer FROM answers WHERE name = ?", request)
        return json.loads(found[0][0]) if found else None

    def payload(self, seq: int) -> bytes:
        """Return the bytes of a group; raise a `StoreError` if it is not stored."""
        return self._blob(f"group {seq}", "SELECT CAST(payload AS BLOB) FROM payloads WHERE seq = ?", int(seq))

    def target(self, seq: int, episode: int) -> bytes:
        """Return the bytes of a target; raise a `StoreError` if it is not stored."""
        query = "SELECT payload FROM targets WHERE seq = ? AND episode = ?"
        return self._blob(f"the target of group {seq}, episode {episode}", query, int(seq), int(episode))

    def _blob(self, what: str, query: str, *numbers: int) -> bytes:
        found = self._all(f"reading {what}", query, *numbers)
        if not found:
            raise StoreError(f"memory {self.path} does not hold {what}")
        blob: bytes = found[0][0]
        return blob

    def _all(self, doing: str, query: str, *parameters: Any) -> list[Any]:
        with explained(self.path, doing):
            return self.db.execute(query, parameters).fetchall()

    def payload_seqs(self) -> set[int]:
        """Return the groups that have a payload."""
        return {seq for (seq,) in self._all("looking for payloads", "SELECT seq FROM payloads")}

    def vectors(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield slot and vector, float32, in slot order; do not commit during the iteration."""
        with explained(self.path, "reading vectors"):
            for slot, data in self.db.execute("SELECT slot, vector FROM vectors ORDER BY slot"):
                yield slot, np.frombuffer(data, "<f4")

    def read(self) -> Contents:
        """Return what the last commit left; raise a `StoreError` if the file is damaged."""
        items, groups, targets, state = (
            self._all("loading it", f"SELECT {query}")
            for query in (
                "slot, row, prompt FROM items ORDER BY slot",
                "seq, row, id FROM groups ORDER BY seq",
                "seq, episode, length(payload) FROM targets",
                "name, value FROM state",
            )
        )
        try:
            found = Contents(
                position=self.position,
                slots=np.array([slot for slot, _, _ in items], np.int64),
                items=np.frombuffer(b"".join(row for _, row, _ in items), ITEM),
                prompts=[prompt_of(fields) for fields in json.loads(f"[{','.join(text for _, _, text in items)}]")],
                groups=np.frombuffer(b"".join(row for _, row, _ in groups), GROUP),
                group_ids=[name for _, _, name in groups],
                targets=targets,
                state={name: json.loads(value) for name, value in state},
            )
            if len(found.items) != len(items) or len(found.groups) != len(groups):
                raise ValueError("rows are cut off")
        except (ValueError, TypeError) as error:
            reason = f"loading it failed: {error}: the file is damaged; restore a checkpoint"
            raise StoreError(f"memory {self.path}: {reason}") from error
        self._written = dict(state)
        return found

    # --- copies ----------------------------------------------------------------------------------

    def snapshot(self, path: Path) -> None:
        """Write a copy of the last commit to `path` atomically, in bounded memory."""
        scratch = path.with_name(path.name + ".new")
        with explained(self.path, f"snapshot {path}", written=path):
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch.unlink(missing_ok=True)
            try:
                back_up(self.db, scratch)
                flush(scratch)
                os.replace(scratch, path)
                flush(path.parent)
            finally:
                scratch.unlink(missing_ok=True)

    def restore(self, snapshot: Path) -> int:
        """Replace the database by a snapshot; return the number of groups stored after it, which are dropped.

        If nothing was committed here yet, they are those of the earlier run's file, which is removed if it continued
        the snapshot's run. A crash leaves the old file or the new one, each whole.

        Raises:
            StoreError: the snapshot cannot be read or there is no room; nothing has changed.
        """
        scratch, earlier = self.path.with_name(self.path.name + ".new"), self.path.with_name(EARLIER)
        is_resumed = self.position == 0 and earlier.exists()
        if not snapshot.is_file():
            raise StoreError(f"snapshot {snapshot} does not exist; expected a file that a checkpoint holds")
        if (log := Path(f"{snapshot}-wal")).exists() and log.stat().st_size:
            raise StoreError(f"{snapshot} is a live memory, {log.name} beside it; expected a snapshot")
        try:
            with explained(snapshot, "restoring it", written=self.path):
                _remove(scratch)
                shutil.copyfile(snapshot, scratch)
                with closing(_connect(scratch, is_durable=False)) as new:
                    lineage = _meta_of(new, snapshot)["lineage"]
                    found = new.execute("SELECT value FROM state WHERE name = 'items'").fetchone()
                    next_seq = json.loads(found[0])["next_group_seq"] if found else 0
                    new.execute("UPDATE meta SET value = ? WHERE name = 'run'", (self._run or self._meta["run"],))
                    to_one_file(new)
                flush(scratch)
                num_dropped = _groups_from(earlier if is_resumed else self.path, lineage, next_seq)
                self._shut()
                for ending in ENDINGS[1:]:  # of a reader: SQLite would apply the old log to the new file
                    Path(f"{self.path}{ending}").unlink(missing_ok=True)
                os.replace(scratch, self.path)
                flush(self.path.parent)
        finally:
            _remove(scratch)
            if self._db is None:
                self._open()
        if is_resumed and num_dropped is not None:
            _remove(earlier)
        return num_dropped or 0

    # --- ending ----------------------------------------------------------------------------------

    def _shut(self) -> None:
        if self._db is not None:
            with suppress(StoreError), explained(self.path, "closing it"):  # else the log stays for the next opening
                to_one_file(self._db)
            self._db.close()
            self._db = None

    def close(self) -> None:
        """Close the file, in one piece, and release its lock; a second call does nothing."""
        self._shut()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._scratch is not None:
            self._scratch.cleanup()


# --- files of SQLite ---------------------------------------------------------------------------------


def copy(path: Path, target: Path) -> None:
    """Copy the last commit of a database, in use or not, to a new file."""
    with _reader(path) as db, explained(path, "copying it", written=target):
        back_up(db, target)


def back_up(source: sqlite3.Connection, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as target:
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -4096"):  # flushed once, at the end
            target.execute(f"PRAGMA {pragma}").fetchall()
        source.backup(target, pages=PAGES_A_STEP)
        to_one_file(target)  # the source's mark of a log was copied too


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
    for ending in ENDINGS:
        Path(f"{path}{ending}").unlink(missing_ok=True)


def _connect(path: Path, is_durable: bool) -> sqlite3.Connection:
    """Open a database for writing; damage beyond the first page is not detected yet."""
    db = sqlite3.connect(path, timeout=TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        for pragma in (
            f"page_size = {PAGE_BYTES}",
            "journal_mode = WAL",
            f"synchronous = {'FULL' if is_durable else 'OFF'}",
            f"wal_autocheckpoint = {MAX_LOG_BYTES // PAGE_BYTES}",
            "cache_size = -16384",
            "temp_store = MEMORY",
        ):
            db.execute(f"PRAGMA {pragma}").fetchall()
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def _reader(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection that reads the last commit of a database, in use or not; its owner does not wait."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with (
        explained(path, "reading it"),
        closing(sqlite3.connect(uri, uri=True, timeout=TIMEOUT_S, isolation_level=None)) as db,
    ):
        db.execute("BEGIN")  # one read transaction: a copy in steps would begin anew with each commit
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield db


def _meta_of(db: sqlite3.Connection, path: Path) -> dict[str, str]:
    """Return the lineage of a database, which its snapshots share, the number of its commits and its run."""
    if not db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]:
        raise StoreError(f"{path} is an SQLite database but not a memory; expected one that a run has written")
    meta = dict(db.execute("SELECT name, value FROM meta").fetchall())
    if meta.get("version") != VERSION:
        raise StoreError(
            f"memory {path} was written by another version of this program, which is not supported: remove it and "
            "begin a new run"
        )
    return meta


def _groups_from(path: Path, lineage: str, next_seq: int) -> int | None:
    """Return how many groups a database holds that are not older than `next_seq`; None if it is of another lineage."""
    try:
        with _reader(path) as db:
            if _meta_of(db, path)["lineage"] != lineage:
                return None
            num: int = db.execute("SELECT count(*) FROM groups WHERE seq >= ?", (next_seq,)).fetchone()[0]
            return num
    except StoreError as error:
        logger.warning("groups stored after the checkpoint are not counted: %s", error)
        return None


# --- errors and locks --------------------------------------------------------------------------------


@contextmanager
def explained(path: Path, doing: str, written: Path | None = None) -> Iterator[None]:
    """Raise errors of SQLite and of files as those of `store_error`."""
    try:
        yield
    except StoreError:
        raise
    except (sqlite3.Error, OSError) as error:
        raise store_error(error, path, doing, written) from error


def store_error(error: BaseException, path: Path, doing: str, written: Path | None = None) -> StoreError:
    """Return a `StoreError` with the path, the operation and a remedy.

    `written` is the file being written, if it is not the database at `path`.
    """
    text, place = str(error), written or path
    # SQLite reports "full" for a full disk only; quotas and file size limits appear as I/O errors.
    is_blocked = ("I/O" in text or "unable to open" in text) and cannot_grow(place)
    if is_full(error) or "full" in text or is_blocked:
        whole = "nothing of it was stored and what was stored before is whole"
        return StoreFull(full_message(place, f"{doing} failed: {text}; {whole}"))
    if "malformed" in text or "not a database" in text:
        text += ": the file is damaged; restore a checkpoint"
    elif "locked" in text:
        return StoreInUse(f"memory {path}: {doing} failed: {text}: another process has it open")
    return StoreError(f"memory {path}: {doing} failed: {text}")


def _lock(path: Path) -> int | None:
    """Lock a database for this process; return the open file, which the operating system unlocks when it is closed."""
    with explained(path, "locking it"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if (owner := _owner_of(file)) is not None:
                remedy = "expected one buffer a file: stop it or choose another directory"
                raise StoreInUse(f"memory {path} is in use by process {owner}; {remedy}")
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
