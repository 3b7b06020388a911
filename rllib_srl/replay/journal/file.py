"""Open and lock a journal's SQLite file, run transactions in it, and turn its errors into `JournalError`.

<path>        the database      <path>-wal, <path>-shm   commits since the last SQLite checkpoint, and their index
<path>.lock   locked by the one process that writes the journal; contains its process id
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

# Measured with scripts/bench/journal.py: larger pages cost more where a commit updates rows all over the tables,
# smaller ones cost large groups more system calls.
PAGE_BYTES = 8192
# A commit that finds more than this in the WAL copies it into the file and stalls; `Journal.tidy` does so when idle.
MAX_WAL_BYTES = 128 << 20
CACHE_BYTES = 16 << 20
PAGES_A_STEP = 1024  # of a copy
TIMEOUT_S = 10.0  # longest wait for another connection: a reader, or the owner while it opens or closes the file
ENDINGS = ("", "-wal", "-shm")  # of the files of a journal


class JournalError(RuntimeError):
    """An operation on a journal failed; the message names the file, the error and a remedy."""


class JournalFull(DiskFull, JournalError):
    """There is no room for the new data; the data stored before is intact."""


class JournalInUse(JournalError):
    """Another process has the journal open, so it could not be read or written."""


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
            self.close()
            raise fault_of(Path(f"{path}.lock"), error, f"journal {path} cannot be locked") from error

    def close(self) -> None:
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
    """Open a database for writing; damage beyond the first page is not detected yet."""
    import sqlite3

    # check_same_thread=False is safe: the journal's own lock serialises its threads.
    db = sqlite3.connect(path, timeout=TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        for pragma in (
            f"page_size = {PAGE_BYTES}",
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


def to_one_file(db: Connection) -> None:
    """Move the WAL into the database and delete it, so that the file can be moved, or read where nobody may write.

    Raises:
        sqlite3.OperationalError: the database is open elsewhere.
    """
    db.execute("PRAGMA journal_mode = DELETE").fetchall()


def back_up(source: Connection, path: Path) -> None:
    """Copy an open database to a new file, `PAGES_A_STEP` pages at a time; a failed copy may leave part of the file."""
    import sqlite3

    with closing(sqlite3.connect(path, isolation_level=None)) as copy:
        # No journal: the copy is flushed once at the end by whoever keeps it, and useless if that is not reached.
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -4096"):
            copy.execute(f"PRAGMA {pragma}").fetchall()
        source.backup(copy, pages=PAGES_A_STEP)
        to_one_file(copy)  # the source's mark of a WAL was copied too


def back_up_live(path: Path, copy: Path) -> None:
    """Copy the last commit of a journal, in use or not, to a new file, without waiting for or delaying its owner.

    Raises:
        JournalError: the journal cannot be read, or there is no room for the copy.
    """
    import sqlite3

    uri = f"{path.absolute().as_uri()}?mode=ro"
    with (
        explained(path, "copying it", written=copy),
        closing(sqlite3.connect(uri, uri=True, timeout=TIMEOUT_S, isolation_level=None)) as source,
    ):
        source.execute("BEGIN")  # one read transaction, or a commit between two steps would begin the copy anew
        source.execute("SELECT count(*) FROM sqlite_master").fetchone()
        back_up(source, copy)


def remove(path: Path) -> None:
    """Delete the files of a journal that nobody has open."""
    for ending in ENDINGS:
        Path(f"{path}{ending}").unlink(missing_ok=True)


def move(path: Path, target: Path) -> None:
    """Rename the files of a journal that nobody has open, replacing the target's."""
    remove(target)
    for ending in ENDINGS:
        if Path(f"{path}{ending}").exists():
            os.replace(f"{path}{ending}", f"{target}{ending}")


def flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
