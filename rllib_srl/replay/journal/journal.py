"""Store a buffer durably in one SQLite file that always holds the state of the last commit.

    commit(changes) ──> position 1, 2, 3, ...      one transaction, durable on return; if it fails, nothing changes
    load() ──> Stored                              a read, not a replay: rows, prompts, generators, counters
    answer(request) ──> answer of that commit      makes a repeated call idempotent
    tidy()                                         call when idle; does work that would stall a later commit
    snapshot(path)                                 a copy for a checkpoint; `snapshots.restore` restores it

Commits survive a crash of the process; with `is_durable` they also survive a power loss. Known limit of SQLite: damage
inside `<path>-wal` silently drops the commits from there on.

Source: SQLite, "Write-Ahead Logging" (sqlite.org/wal.html) and "Atomic Commit" (sqlite.org/atomiccommit.html).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_srl.replay.journal.file import JournalError, JournalLock, connect, explained, to_one_file, transaction
from rllib_srl.replay.journal.schema import (
    Commit,
    Stored,
    create_tables,
    is_empty,
    read_meta,
    stored_in,
    write_commit,
)
from rllib_srl.replay.journal.snapshots import write_snapshot

if TYPE_CHECKING:
    from sqlite3 import Connection

__all__ = ["Commit", "Journal", "JournalError", "Stored"]


class Journal:
    """An open journal, held by one process at a time; its threads may share it.

    Invariant: `position` is that of the last successful commit and grows by one with each.
    """

    def __init__(
        self,
        path: str | Path,
        item: np.dtype | None = None,
        group: np.dtype | None = None,
        is_durable: bool = True,
        keep_requests: int = 4096,
    ) -> None:
        """Open a journal, or create it.

        Args:
            path: of the file; its directory is created.
            item: dtype of the item rows; None takes the file's.
            group: dtype of the group rows; None takes the file's.
            is_durable: whether a commit waits for the disk; if False, commits survive the process but not a power
                loss.
            keep_requests: number of latest answers to keep.

        Raises:
            JournalError: another process has the file open, it is damaged or no journal, or its row dtypes differ.
        """
        self.path = Path(path)
        self._mutex = RLock()
        self._keep_requests = keep_requests
        self._file_lock = JournalLock(self.path)
        self._db: Connection | None = None
        try:
            with explained(self.path, "opening it"):
                self._db = connect(self.path, is_durable)
                self._open(item, group)
        except BaseException:
            self.close(is_clean=False)
            raise

    def _open(self, item: np.dtype | None, group: np.dtype | None) -> None:
        if is_empty(self.db):
            if item is None or group is None:
                raise JournalError(f"journal {self.path} is empty; expected dtypes of items and groups to create it")
            create_tables(self.db, item, group)
        meta = read_meta(self.db, self.path, item, group)
        # The dtypes are equal, but rows carry the caller's object, and commits compare identities because it is fast.
        self.item = meta.item if item is None else item
        self.group = meta.group if group is None else group
        self.lineage, self.position = meta.lineage, meta.position

    @property
    def db(self) -> Connection:
        """Return the open database.

        Raises:
            JournalError: the journal is closed.
        """
        if self._db is None:
            raise JournalError(f"journal {self.path} is closed")
        return self._db

    @property
    def is_open(self) -> bool:
        """Return whether the journal is open."""
        return self._db is not None

    # ------------------------------------------------------------------ writing

    def commit(self, commit: Commit) -> int:
        """Store changes atomically and return their position once they are durable.

        Raises:
            JournalError: the disk is full or damaged, or the changes contradict themselves or the stored state (the
                message then lists all errors). Nothing was stored, and the journal remains usable.
        """
        with self._mutex, self._explained(f"commit {self.position + 1}"):
            position = self.position + 1
            if commit.request is not None and self.answer(commit.request) is not None:
                raise JournalError(f"journal {self.path}: request {commit.request!r} has been answered already")
            try:
                with transaction(self.db):
                    write_commit(self.db, commit, position, self.item, self.group)
            except ValueError as error:
                raise JournalError(f"journal {self.path}: commit {position} is not valid: {error}") from error
            self.position = position
            return position

    def tidy(self) -> None:
        """Forget old answers and move the WAL into the file; call when idle.

        Raises:
            JournalError: the disk is full; all commits are still stored.
        """
        with self._mutex, self._explained("tidying up"):
            self.db.execute("DELETE FROM requests WHERE position <= ?", (self._oldest_answer,))
            self.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def snapshot(self, path: str | Path) -> int:
        """Write a copy of the last commit's state to `path` atomically; return its position.

        Commits of other threads wait. Memory use does not depend on the size.

        Raises:
            JournalError: there is no room, or `path` cannot be written.
        """
        with self._mutex, self._explained(f"snapshot {path}"):
            write_snapshot(self.db, Path(path))
            return self.position

    # ------------------------------------------------------------------ reading

    @property
    def _oldest_answer(self) -> int:
        return self.position - self._keep_requests

    def answer(self, request: str) -> Any | None:
        """Return the answer stored with a request, or None if there is none or it is no longer kept."""
        query = "SELECT answer FROM requests WHERE name = ? AND position > ?"
        with self._mutex, self._explained(f"reading answer {request}"):
            found = self.db.execute(query, (request, self._oldest_answer)).fetchone()
            return None if found is None else json.loads(found[0])

    def answers(self) -> list[tuple[str, Any]]:
        """Return the names and answers of the latest requests, oldest first."""
        query = "SELECT name, answer FROM requests WHERE position > ? ORDER BY position"
        with self._mutex, self._explained("reading answers"):
            return [(name, json.loads(answer)) for name, answer in self.db.execute(query, (self._oldest_answer,))]

    def read_group(self, seq: int) -> bytes:
        """Return the payload of a group.

        Raises:
            JournalError: there is no such group, or its payload is missing.
        """
        with self._mutex, self._explained(f"reading group {seq}"):
            found = self.db.execute("SELECT CAST(payload AS BLOB) FROM payloads WHERE seq = ?", (int(seq),)).fetchone()
            if found is None and self.has_group(seq):
                raise JournalError(f"journal {self.path}: group {seq} has lost its payload; restore a checkpoint")
            if found is None:
                raise JournalError(f"journal {self.path} has no group {seq}")
            payload: bytes = found[0]
            return payload

    def has_group(self, seq: int) -> bool:
        """Return whether a group is stored."""
        with self._mutex, self._explained(f"looking for group {seq}"):
            return self.db.execute("SELECT 1 FROM groups WHERE seq = ?", (int(seq),)).fetchone() is not None

    def load(self) -> Stored:
        """Return the stored state without vectors and payloads.

        Raises:
            JournalError: the file is damaged.
        """
        with self._mutex, self._explained("loading it"):
            try:
                return stored_in(self.db, self.position, self.item, self.group)
            except ValueError as error:
                message = f"loading it failed: {error}: the file is damaged; restore a checkpoint"
                raise JournalError(f"journal {self.path}: {message}") from error

    def vectors(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield slot and vector, float32, in slot order; do not commit during the iteration."""
        with self._mutex, self._explained("reading vectors"):
            for slot, data in self.db.execute("SELECT slot, vector FROM vectors ORDER BY slot"):
                yield slot, np.frombuffer(data, "<f4")

    # ------------------------------------------------------------------ ending

    def close(self, is_clean: bool = True) -> None:
        """Close the file and release its lock; a second call does nothing.

        Args:
            is_clean: whether to call `tidy` first and leave one file without a WAL.
        """
        with self._mutex:
            if self._db is not None:
                if is_clean:
                    # On a full disk, or while somebody reads the file, the WAL stays for the next opening.
                    with suppress(JournalError), self._explained("closing it"):
                        self.tidy()
                        to_one_file(self.db)
                self._db.close()
                self._db = None
            self._file_lock.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        with explained(self.path, doing):
            yield
