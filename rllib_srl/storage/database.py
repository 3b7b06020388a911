"""An SQLite file with a schema: opened, checked, refused and written in one way, with errors of one line.

    class Ratings(Database):                        tables, schema, and how its errors are called
    with self._explained("rating"), self._transaction(): ...

What a transaction wrote is on disk when it returns. Writers wait for each other for up to `TIMEOUT_S`. Only the owner
of a file can read it (mode 0600), unless the class says otherwise.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from rllib_srl.storage.disk import DiskFull, cannot_grow, full_message, is_full

TIMEOUT_S = 10.0


class DatabaseError(RuntimeError):
    """What was asked of a file cannot be done; the message says why, and how to mend it."""


class Database:
    """One SQLite file. Invariant: it has the tables of `tables`, and a meta table with `schema` and the file's id."""

    tables = ""  # of the class: CREATE statements, separated by semicolons
    schema: int | str = 1
    content = "data"  # what it holds, for messages
    error: type[DatabaseError] = DatabaseError
    full: type[DiskFull] = DiskFull
    pragmas: tuple[str, ...] = ("journal_mode = WAL", "synchronous = FULL")
    mode = 0o600
    is_of_one_thread = True  # the connection belongs to the thread that opened it

    def __init__(self, path: Path, **meta: str) -> None:
        """Open the file, or create it with further values of its meta table.

        Raises:
            RuntimeError: of the class's kind: it is damaged, of another version, locked, or cannot be created.
        """
        self.path = path
        with self._explained("opening"):
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, self.mode))  # SQLite gives the -wal file the same mode
            self._db = sqlite3.connect(
                path, timeout=TIMEOUT_S, isolation_level=None, check_same_thread=self.is_of_one_thread
            )
            try:
                self._prepare({"schema": str(self.schema), "id": uuid.uuid4().hex, **meta})
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _prepare(self, meta: dict[str, str]) -> None:
        for pragma in self.pragmas:
            self._set(pragma)
        with self._transaction():
            if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                self._db.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
                for statement in self.tables.split(";")[:-1]:
                    self._db.execute(statement)
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        self._meta = self.meta_of(self._db, self.path)

    def _set(self, pragma: str) -> None:
        """Set a pragma; SQLite does not wait for another process that switches to the write-ahead log."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self._db.execute(f"PRAGMA {pragma}").fetchall()
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @classmethod
    def meta_of(cls, db: sqlite3.Connection, path: Path) -> dict[str, str]:
        """Return the meta table of a database; an error of the class says that another version wrote it."""
        meta = dict(db.execute("SELECT name, value FROM meta").fetchall())
        if meta.get("schema") != str(cls.schema):
            reason = "was written by another version of this program, which is not supported"
            raise cls.error(f"{cls.content} {path} {reason}: move it away and begin a new run")
        return meta

    @property
    def source_id(self) -> str:
        """Return the id of the file, which its copies share."""
        return self._meta["id"]

    def _read(self, query: str, *values: Any) -> list[Any]:
        with self._explained("reading"):
            return self._db.execute(query, values).fetchall()

    def _insert(self, table: str, row: Mapping[str, Any]) -> int:
        """Insert a row, column -> value, in a transaction; return its number."""
        text = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
        return int(self._db.execute(text, tuple(row.values())).lastrowid or 0)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:  # commits, or rolls back what SQLite has not rolled back itself
            yield

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        with self.explained(self.path, doing):
            yield

    @classmethod
    @contextmanager
    def explained(cls, path: Path, doing: str, written: Path | None = None) -> Iterator[None]:
        """Raise errors of SQLite and of files as those of the class, with the file, what was done and a remedy.

        `written` is the file being written, if it is not `path`.
        """
        try:
            yield
        except (cls.error, DiskFull):
            raise
        except (sqlite3.Error, OSError) as error:
            raise cls.error_of(error, path, doing, written) from error

    @classmethod
    def error_of(cls, error: Exception, path: Path, doing: str, written: Path | None = None) -> Exception:
        """Return the error of the class for one of SQLite or of a file."""
        text, place = str(error), written or path
        # SQLite reports "full" for a full disk only; quotas and file size limits appear as I/O errors.
        is_blocked = ("I/O" in text or "unable to open" in text) and cannot_grow(place)
        if is_full(error) or "full" in text or is_blocked:
            whole = "nothing of it was stored; all that was acknowledged before is stored"
            return cls.full(full_message(place, f"{doing} failed: {text}; {whole}"))
        if "locked" in text:
            text += f": another process has written for {TIMEOUT_S:g} s; try again"
        elif any(words in text for words in ("malformed", "not a database", "no such table")):
            text += f": the file is damaged, or is not a file of {cls.content}; move it away, or restore a copy"
        return cls.error(f"{cls.content} {path}: {doing} failed: {text}")
