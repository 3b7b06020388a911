"""One SQLite file of one process: opened with its lock, changed in transactions, every fault one `JournalError`.

<path>        the database      <path>-wal   what was committed since the last checkpoint of SQLite's
<path>.lock   locked by the one process that has the journal open; its process id is written in it
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

from rllib_srl.replay.journal_schema import (
    SCHEMA_VERSION,
    TABLES,
    JournalError,
    JournalInUse,
    checksum,
    dtype_difference,
    dtype_from,
    dtype_text,
)

if TYPE_CHECKING:
    from sqlite3 import Connection

# Measured with scripts/bench_journal.py: smaller pages cost a large group system calls, one of 8 KiB a third of the
# throughput of 32; what is smaller than a page lies in the log, where pages are filled before they are written again.
PAGE_BYTES = 32768
# A commit that finds more than this in the WAL copies it into the file, which stalls it: `Journal.tidy` comes before.
MAX_WAL_BYTES = 128 << 20
CACHE_BYTES = 16 << 20

_held: set[Path] = set()  # POSIX locks do not keep a process from locking twice


class JournalLock:
    """The right of one process to one journal, released when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock of the journal at `path`.

        Raises:
            JournalError: another buffer has it, or the directory cannot be written.
        """
        self._path = path.resolve()
        if self._path in _held:
            raise JournalInUse(_in_use(path, os.getpid()))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise JournalError(f"journal {path} cannot be opened: {error}") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(self._file, 32).decode("ascii", "replace").strip()
            os.close(self._file)
            raise JournalInUse(_in_use(path, owner)) from error
        _held.add(self._path)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others have the journal; a second call does nothing."""
        if self._path in _held:
            _held.discard(self._path)
            os.close(self._file)


def holder_of(path: Path) -> int | None:
    """Return the id of the process that has the journal at `path`, None if none has."""
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


@contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turn what SQLite says into a `JournalError` with the path, what was being done, and what to do.

    Args:
        path: of the journal.
        doing: what was tried, such as "commit 7".
    """
    import sqlite3

    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        if "full" in text or "I/O" in text:
            text += "; nothing of it was stored and what was stored before is whole: make room and try again"
        elif "malformed" in text or "not a database" in text:
            text += ": the file is damaged; restore a checkpoint"
        elif "locked" in text:
            raise JournalInUse(f"journal {path}: {doing} failed: {text}: another process has it open") from error
        raise JournalError(f"journal {path}: {doing} failed: {text}") from error


@contextmanager
def transaction(db: Connection) -> Iterator[None]:
    """Do all of what is done inside, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite has ended it already after some faults
            db.execute("ROLLBACK")
        raise


def connect(path: Path, is_durable: bool) -> Connection:
    """Open a database for one process; nothing of it is read yet that would show damage beyond the first page."""
    import sqlite3

    # Statements of a journal are few; a lock of the journal's own orders threads.
    db = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    try:
        for pragma in (
            f"page_size = {PAGE_BYTES}",
            "locking_mode = EXCLUSIVE",  # also: no shared memory file beside the journal
            "journal_mode = WAL",
            f"synchronous = {'FULL' if is_durable else 'OFF'}",
            f"wal_autocheckpoint = {MAX_WAL_BYTES // PAGE_BYTES}",
            f"cache_size = -{CACHE_BYTES >> 10}",
            "secure_delete = OFF",  # zeroing what is deleted would write every freed page
            "temp_store = MEMORY",
        ):
            db.execute(f"PRAGMA {pragma}").fetchall()
    except BaseException:
        db.close()
        raise
    return db


def create_tables(db: Connection, item: np.dtype, group: np.dtype) -> None:
    """Make a journal of an empty database: a new lineage."""
    with transaction(db):
        for statement in TABLES.split(";")[:-1]:
            db.execute(statement)
        meta = {"schema": str(SCHEMA_VERSION), "item": dtype_text(item), "group": dtype_text(group)}
        meta["branches"] = f'[["{uuid.uuid4().hex}", 0]]'
        db.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
        db.execute("INSERT INTO state VALUES ('position', '0', ?)", (checksum("0"),))


def is_empty(db: Connection) -> bool:
    """Say whether nothing was ever created here."""
    return db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0


def read_meta(db: Connection, path: Path) -> dict[str, str]:
    """Return the journal's description of itself.

    Raises:
        JournalError: it is no journal, or of another schema version.
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
    """Return the dtypes of the rows in the file.

    Raises:
        JournalError: they are not those asked for.
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
    """Make a file or the names in a directory durable."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
