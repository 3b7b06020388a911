"""Open, lock and copy SQLite files, and turn their errors into `StoreError`.

    memory.db, -wal, -shm    a database and SQLite's log      memory.db.lock   locked by the process that writes it

Known limit of SQLite: damage inside the log silently drops the commits from there on.

Source: SQLite, "Write-Ahead Logging" (sqlite.org/wal.html) and "Atomic Commit" (sqlite.org/atomiccommit.html).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rllib_srl.storage.disk import DiskFull, cannot_grow, full_message, is_full

if TYPE_CHECKING:
    from sqlite3 import Connection

# Larger pages cost more where a commit updates rows all over the tables, smaller ones cost large groups more calls.
PAGE_BYTES = 8192
MAX_LOG_BYTES = 32 << 20  # a commit that finds more than this in the log moves it into the file
PAGES_A_STEP = 1024  # of a copy
TIMEOUT_S = 10.0  # longest wait for another connection: a reader, or the owner while it opens or closes the file
ENDINGS = ("", "-wal", "-shm")  # of the files of a database


class StoreError(RuntimeError):
    """An operation on a memory's database failed; the message names the file, the error and a remedy."""


class StoreFull(DiskFull, StoreError):
    """There is no room for the new data; the data stored before is intact."""


class StoreInUse(StoreError):
    """Another process has the database open."""


def connect(path: Path, is_durable: bool) -> Connection:
    """Open a database for writing; damage beyond the first page is not detected yet."""
    import sqlite3

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
def reader(path: Path) -> Iterator[Connection]:
    """Yield a connection that reads the last commit of a database, in use or not; its owner does not wait."""
    import sqlite3

    uri = f"{path.absolute().as_uri()}?mode=ro"
    with (
        explained(path, "reading it"),
        closing(sqlite3.connect(uri, uri=True, timeout=TIMEOUT_S, isolation_level=None)) as db,
    ):
        db.execute("BEGIN")  # one read transaction: a copy in steps would begin anew with each commit
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield db


def copy(path: Path, target: Path) -> None:
    """Copy the last commit of a database, in use or not, to a new file."""
    with reader(path) as db, explained(path, "copying it", written=target):
        back_up(db, target)


def back_up(source: Connection, path: Path) -> None:
    import sqlite3

    with closing(sqlite3.connect(path, isolation_level=None)) as target:
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -4096"):  # flushed once, at the end
            target.execute(f"PRAGMA {pragma}").fetchall()
        source.backup(target, pages=PAGES_A_STEP)
        to_one_file(target)  # the source's mark of a log was copied too


def to_one_file(db: Connection) -> None:
    """Move the log into the database and delete it, so that the file can be moved, or read where nobody may write."""
    db.execute("PRAGMA journal_mode = DELETE").fetchall()


def remove(path: Path) -> None:
    """Delete the files of a database that nobody has open."""
    for ending in ENDINGS:
        Path(f"{path}{ending}").unlink(missing_ok=True)


def flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def explained(path: Path, doing: str, written: Path | None = None) -> Iterator[None]:
    """Raise errors of SQLite and of files as those of `store_error`."""
    import sqlite3

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


_held: set[Path] = set()  # POSIX locks do not prevent one process from locking twice


class Lock:
    """The exclusive lock of one process on one database; the operating system releases it when the process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        if self._path in _held:
            raise _in_use(path, os.getpid())
        with explained(path, "locking it"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.read(self._file, 32).decode("ascii", "replace").strip()
                os.close(self._file)
                raise _in_use(path, owner) from error
            _held.add(self._path)
            try:
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
            except OSError:
                self.close()
                raise

    def close(self) -> None:
        if self._path in _held:
            _held.discard(self._path)
            os.close(self._file)


def _in_use(path: Path, owner: int | str) -> StoreInUse:
    return StoreInUse(
        f"memory {path} is in use by process {owner}; expected one buffer a file: stop it or choose another directory"
    )


def holder_of(path: Path) -> int | None:
    """Return the id of the process that has the database at `path` open, or None."""
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
