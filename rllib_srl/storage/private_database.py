"""An SQLite file that several processes write at the same time, and that only its owner can read (mode 0600).

    class Ratings(PrivateDatabase):                 tables, schema version, and how its errors are called
    with self._explained("rating"), self._transaction(): ...

What a transaction wrote is on disk when it returns. Writers wait for each other for up to `TIMEOUT_S`.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rllib_srl.storage.disk import DiskFull, cannot_grow, full_message

TIMEOUT_S = 10.0


class PrivateDatabase:
    """One SQLite file. Invariant: it has the tables of `schema`, and a meta table with the schema's number and an id.

    A connection belongs to the thread that opened it.
    """

    tables = ""  # of the class: CREATE statements, separated by semicolons
    schema = 1
    content = "data"  # what it holds, in the plural, for messages
    error: type[RuntimeError] = RuntimeError

    def __init__(self, path: Path) -> None:
        """Open the file, or create it.

        Raises:
            RuntimeError: of the class's kind: it is damaged, of another version, locked, or cannot be created.
        """
        self.path = path
        with self._explained("opening them"):
            try:
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite gives the -wal file the same mode
            except OSError as error:
                raise self.error(f"{self.content} {path} cannot be opened: {error.strerror}") from error
            self._db = sqlite3.connect(path, timeout=TIMEOUT_S, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _prepare(self) -> None:
        self._use_wal()
        self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                self._db.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
                for statement in self.tables.split(";")[:-1]:
                    self._db.execute(statement)
                meta = [("schema", str(self.schema)), ("id", uuid.uuid4().hex)]
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", meta)
        meta_of = dict(self._db.execute("SELECT name, value FROM meta").fetchall())
        if meta_of.get("schema") != str(self.schema):
            found = f"have schema {meta_of.get('schema')}; expected {self.schema}"
            raise self.error(f"{self.content} {self.path} {found}")
        self.source_id: str = meta_of["id"]

    def _use_wal(self) -> None:
        """Switch to the write-ahead log; SQLite does not wait for another process that does the same."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL").fetchall()
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _read(self, query: str, *values: Any) -> list[Any]:
        with self._explained("reading them"):
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            text = str(error)
            if "full" in text or ("I/O" in text and cannot_grow(self.path)):
                raise DiskFull(full_message(self.path, f"{doing} failed; what was acknowledged is stored")) from error
            if "locked" in text:
                text += f": another process has written for {TIMEOUT_S:g} s; try again"
            elif "malformed" in text or "not a database" in text or "no such table" in text:
                text += f": the file is damaged, or no file of {self.content}; move it away, or restore a copy"
            raise self.error(f"{self.content} {self.path}: {doing} failed: {text}") from error
