"""Open and lock a journal's SQLite file, run transactions in it, and turn its errors into `JournalError`.

<path>        the database      <path>-wal   commits since the last SQLite checkpoint
<path>.lock   locked by the one process that has the journal open; contains its process id
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rllib_srl.replay.journal.schema import (
    SCHEMA_VERSION,
    TABLES,
    JournalError,
    JournalFull,
    JournalInUse,
    checksum,
    dtype_difference,
    dtype_from,
    dtype_text,
)
from rllib_srl.storage.disk import cannot_grow, full_message, is_full

if TYPE_CHECKING:
    from sqlite3 import Connection

# Measured with scripts/bench/journal.py: smaller pages cost large groups more system calls; 8 KiB reach a third of the
# throughput of 32 KiB. Values smaller than a page go to the log table, which fills each page before it is rewritten.
PAGE_BYTES = 32768
# A commit that finds more than this in the WAL copies it into the file and stalls; `Journal.tidy` does so when idle.
MAX_WAL_BYTES = 128 << 20
CACHE_BYTES = 16 << 20

_held: set[Path] = set()  # POSIX locks do not prevent one process from locking twice


class JournalLock:
    """The exclusive lock of one process on one journal; the operating system releases it when the process ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock of the journal at `path`.

        Raises:
            JournalError: another buffer holds it, the disk is full, or the directory cannot be written.
        """
        self._path = path.resolve()
        if self._path in _held:
            raise JournalInUse(_in_use(path, os.getpid()))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise fault_of(path, error, f"journal {path} cannot be opened") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(self._file, 32).decode("ascii", "replace").strip()
            os.close(self._file)
            raise JournalInUse(_in_use(path, owner)) from error
        _held.add(self._path)
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            self.release()
            raise fault_of(Path(f"{path}.lock"), error, f"journal {path} cannot be locked") from error

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._path in _held:
            _held.discard(self._path)
            os.close(self._file)


def holder_of(path: Path) -> int | None:
    """Return the id of the process that has the journal at `path` open, or None."""
    if path.resolve() in _held:  # closing the file below would release this process's own lock
        return os.getpid()
    try:
        file = os.open(f"{path}.lock", os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(file, 32).strip()
        return int(owner) if owner else None
    finally:
        os.close(file)
    return None


def _in_use(path: Path, owner: int | str) -> str:
    return f"journal {path} is in use by process {owner}; expected one buffer a journal: stop it or choose another path"


def fault_of(path: Path, error: OSError, text: str) -> JournalError:
    """Return the `JournalError` for a file system error: `JournalFull` if the disk is full.

    Args:
        path: the path that was written.
        error: the error; a `JournalError` is returned unchanged.
        text: the failed operation, including the journal's name.
    """
    if isinstance(error, JournalError):
        return error
    return JournalFull(full_message(path)) if is_full(error) else JournalError(f"{text}: {error}")


@contextmanager
def explained(path: Path, doing: str, written: Path | None = None) -> Iterator[None]:
    """Turn SQLite errors into a `JournalError` with the path, the operation and a remedy.

    Args:
        path: of the journal.
        doing: the operation, such as "commit 7".
        written: the file being written, if it is not the journal.

    Raises:
        JournalFull: there is no room.
        JournalInUse: another process has the database open.
        JournalError: any other SQLite error.
    """
    import sqlite3

    try:
        yield
    except sqlite3.Error as error:
        text, place = str(error), written or path
        # SQLite reports "full" for a full disk only; quotas and file size limits appear as I/O errors.
        if "full" in text or (("I/O" in text or "unable to open" in text) and cannot_grow(place)):
            whole = "nothing of it was stored and what was stored before is whole"
            raise JournalFull(full_message(place, f"{doing} failed: {text}; {whole}")) from error
        if "I/O" in text:
            text += "; nothing of it was stored and what was stored before is whole: make room and try again"
        elif "malformed" in text or "not a database" in text:
            text += ": the file is damaged; restore a checkpoint"
        elif "locked" in text:
            raise JournalInUse(f"journal {path}: {doing} failed: {text}: another process has it open") from error
        raise JournalError(f"journal {path}: {doing} failed: {text}") from error


@contextmanager
def transaction(db: Connection) -> Iterator[None]:
    """Run the statements inside atomically: commit them, or roll them back on any exception."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # after some errors SQLite has rolled back already
            db.execute("ROLLBACK")
        raise


def connect(path: Path, is_durable: bool) -> Connection:
    """Open a database for one process; damage beyond the first page is not detected yet."""
    import sqlite3

    # check_same_thread=False is safe: the journal's own lock serialises its threads.
    db = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    try:
        for pragma in (
            f"page_size = {PAGE_BYTES}",
            "locking_mode = EXCLUSIVE",  # also avoids a shared memory file beside the journal
            "journal_mode = WAL",
            f"synchronous = {'FULL' if is_durable else 'OFF'}",
            f"wal_autocheckpoint = {MAX_WAL_BYTES // PAGE_BYTES}",
            f"cache_size = -{CACHE_BYTES >> 10}",
            "secure_delete = OFF",  # zeroing deleted content would write every freed page
            "temp_store = MEMORY",
        ):
            db.execute(f"PRAGMA {pragma}").fetchall()
    except BaseException:
        db.close()
        raise
    return db


def create_tables(db: Connection, item: np.dtype, group: np.dtype) -> None:
    """Create the tables of a journal in an empty database and start a new lineage."""
    with transaction(db):
        for statement in TABLES.split(";")[:-1]:
            db.execute(statement)
        meta = {"schema": str(SCHEMA_VERSION), "item": dtype_text(item), "group": dtype_text(group)}
        meta["branches"] = f'[["{uuid.uuid4().hex}", 0]]'
        db.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
        db.execute("INSERT INTO state VALUES ('position', '0', ?)", (checksum("0"),))


def is_empty(db: Connection) -> bool:
    """Return whether the database has no tables."""
    return db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0


def read_meta(db: Connection, path: Path) -> dict[str, str]:
    """Return the journal's `meta` table by name.

    Raises:
        JournalError: the database is no journal, or of another schema version.
    """
    if not db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]:
        raise JournalError(f"{path} is an SQLite database but no journal; expected a table 'meta'")
    meta = dict(db.execute("SELECT name, value FROM meta").fetchall())
    if meta["schema"] != str(SCHEMA_VERSION):
        raise JournalError(f"journal {path} is of schema {meta['schema']}; expected {SCHEMA_VERSION}")
    return meta


def stored_dtypes(
    meta: dict[str, str], path: Path, item: np.dtype | None, group: np.dtype | None
) -> tuple[np.dtype, np.dtype]:
    """Return the dtypes of the item and group rows in the file.

    Raises:
        JournalError: they differ from `item` or `group`; None accepts any.
    """
    item_stored, group_stored = dtype_from(meta["item"]), dtype_from(meta["group"])
    faults = []
    for name, stored, wanted in (("item", item_stored, item), ("group", group_stored, group)):
        if wanted is not None and (difference := dtype_difference(stored, wanted)):
            faults.append(f"{name} rows differ: {difference}")
    if faults:
        raise JournalError(f"journal {path} was written by another version of this program: {'; '.join(faults)}")
    return item_stored, group_stored


def flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
