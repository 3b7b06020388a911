"""Store a buffer durably in one SQLite file that always holds the state of the last commit.

    commit(changes) ──> position 1, 2, 3, ...      durable on return; a commit that fails changes nothing
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
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_srl.replay.journal.file import (
    JournalLock,
    connect,
    create_tables,
    explained,
    is_empty,
    read_meta,
    stored_dtypes,
    transaction,
)
from rllib_srl.replay.journal.log import Effects, read_log
from rllib_srl.replay.journal.schema import (
    REVIEW,
    Commit,
    JournalError,
    Stored,
    checked,
    checksum,
    faults_of,
    reviews_in,
    state_in,
    stored_in,
)
from rllib_srl.replay.journal.snapshots import branches_of, write_snapshot

if TYPE_CHECKING:
    from sqlite3 import Connection

__all__ = ["REVIEW", "Commit", "Journal", "JournalError", "Stored"]

MOST_UNFOLDED = 256  # commits in the log; the next commit first folds them into the tables


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
        self._scratch: tempfile.TemporaryDirectory | None = None
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

    @classmethod
    def temporary(cls, item: np.dtype, group: np.dtype) -> Journal:
        """Return a journal in a temporary directory, for a buffer without one; `close` deletes it."""
        scratch = tempfile.TemporaryDirectory(prefix="rllib_srl_journal_")
        journal = cls(Path(scratch.name) / "journal.db", item, group, is_durable=False)
        journal._scratch = scratch
        return journal

    def _open(self, item: np.dtype | None, group: np.dtype | None) -> None:
        if is_empty(self.db):
            if item is None or group is None:
                raise JournalError(f"journal {self.path} is empty; expected dtypes of items and groups to create it")
            create_tables(self.db, item, group)
        meta = read_meta(self.db, self.path)
        stored_item, stored_group = stored_dtypes(meta, self.path, item, group)
        # The dtypes are equal, but rows carry the caller's object, and commits compare identities because it is fast.
        self.item = stored_item if item is None else item
        self.group = stored_group if group is None else group
        self.branches = branches_of(meta)
        self._unfolded, self._num_unfolded = read_log(self.db, f"journal {self.path}")
        self._fold()
        self.position = state_in(self.db, f"journal {self.path}")["position"]
        self._slots = {slot for (slot,) in self.db.execute("SELECT slot FROM items")}
        self._seqs = {seq for (seq,) in self.db.execute("SELECT seq FROM groups")}
        self._answers = {
            name: checked(answer, stored, f"journal {self.path}, answer {name!r}")
            for name, answer, stored in self.db.execute("SELECT name, answer, checksum FROM requests ORDER BY position")
        }

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
    def lineage(self) -> str:
        """Return the id made at creation, shared by all snapshots and journals restored from them."""
        return self.branches[0][0]

    # ------------------------------------------------------------------ writing

    def commit(self, commit: Commit) -> int:
        """Store changes atomically and return their position once they are durable.

        Raises:
            JournalError: the disk is full or damaged, or the changes contradict themselves or the stored state (the
                message then lists all errors). Nothing was stored, and the journal remains usable.
        """
        with self._mutex, self._explained(f"commit {self.position + 1}"):
            position = self.position + 1
            faults = faults_of(commit, self.item, self.group, self._slots, self._seqs)
            if commit.request in self._answers:
                faults.append(f"request {commit.request!r} has been answered; expected a look at `answer` first")
            if faults:
                raise JournalError(f"journal {self.path}: commit {position} is not valid: {'; '.join(faults)}")
            effects = Effects.of(commit, position)
            with transaction(self.db):
                if self._num_unfolded >= MOST_UNFOLDED:
                    self._unfolded.apply(self.db, self._keep_requests)
                data = effects.to_bytes()
                self.db.execute("INSERT INTO log VALUES (?, ?, ?)", (position, data, checksum(data)))
                payloads = [(int(seq), payload) for seq, payload in commit.payloads.items()]
                self.db.executemany("INSERT OR REPLACE INTO payloads VALUES (?, ?)", payloads)
            self._take_in(commit, effects)
            return position

    def _take_in(self, commit: Commit, effects: Effects) -> None:
        """Update the in-memory state after a commit; nothing here can fail."""
        if self._num_unfolded >= MOST_UNFOLDED:
            self._unfolded, self._num_unfolded = Effects(), 0
        self._unfolded.merge(effects)
        self._num_unfolded += 1
        self.position = effects.position
        self._slots.difference_update(commit.removed_slots)
        self._slots.update(commit.items)
        self._seqs.difference_update(commit.removed_groups)
        self._seqs.update(commit.payloads)
        for _, name, answer in effects.requests:
            self._answers[name] = answer
        while len(self._answers) > self._keep_requests:
            del self._answers[next(iter(self._answers))]

    def _fold(self) -> None:
        if self._num_unfolded:
            with transaction(self.db):
                self._unfolded.apply(self.db, self._keep_requests)
            self._unfolded, self._num_unfolded = Effects(), 0

    def tidy(self) -> None:
        """Fold the log into the tables and move the WAL into the file; call when idle.

        Raises:
            JournalError: the disk is full; all commits are still stored.
        """
        with self._mutex, self._explained("tidying up"):
            self._fold()
            self.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def snapshot(self, path: str | Path) -> int:
        """Write a copy of the last commit's state to `path` atomically; return its position.

        Commits of other threads wait. Memory use does not depend on the size.

        Raises:
            JournalError: there is no room, or `path` cannot be written.
        """
        with self._mutex, self._explained(f"snapshot {path}"):
            self.tidy()
            write_snapshot(self.db, Path(path))
            return self.position

    # ------------------------------------------------------------------ reading

    def answer(self, request: str) -> Any | None:
        """Return the answer stored with a request, or None if there is none or it is no longer kept."""
        with self._mutex:
            answer = self._answers.get(request)
            return None if answer is None else json.loads(answer)

    def answers(self) -> list[tuple[str, Any]]:
        """Return the names and answers of the latest requests, oldest first."""
        with self._mutex:
            return [(name, json.loads(answer)) for name, answer in self._answers.items()]

    def read_group(self, seq: int) -> bytes:
        """Return the payload of a group; `codec.decode` verifies it.

        Raises:
            JournalError: there is no such group, or its payload is missing.
        """
        with self._mutex, self._explained(f"reading group {seq}"):
            if seq not in self._seqs:
                raise JournalError(f"journal {self.path} has no group {seq}")
            found = self.db.execute("SELECT CAST(payload AS BLOB) FROM payloads WHERE seq = ?", (int(seq),)).fetchone()
            if found is None:
                raise JournalError(f"journal {self.path}: group {seq} has lost its payload; restore a checkpoint")
            return found[0]

    def load(self) -> Stored:
        """Return the stored state without vectors, reviews and payloads.

        Raises:
            JournalError: a row is damaged; the message names it.
        """
        with self._mutex, self._explained("loading it"):
            self._fold()
            return stored_in(self.db, f"journal {self.path}", self.item, self.group)

    def vectors(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield slot and vector, float32, in slot order; do not commit during the iteration."""
        with self._mutex, self._explained("reading vectors"):
            self._fold()
            for slot, data, stored in self.db.execute("SELECT * FROM vectors ORDER BY slot"):
                yield slot, np.frombuffer(checked(data, stored, f"journal {self.path}, vector {slot}"), "<f4")

    def reviews(self, after: int = 0, last: int | None = None) -> np.ndarray:
        """Return reviews, oldest first, as rows of `REVIEW`.

        Args:
            after: only those of commits after this position.
            last: at most this many, the newest ones; None returns all.
        """
        with self._mutex, self._explained("reading reviews"):
            self._fold()
            return reviews_in(self.db, after, last)

    def has_group(self, seq: int) -> bool:
        """Return whether a group is stored."""
        return seq in self._seqs

    # ------------------------------------------------------------------ ending

    def close(self, is_clean: bool = True) -> None:
        """Close the file and release its lock; a second call does nothing.

        Args:
            is_clean: whether to call `tidy` first, so that the next opening has nothing to recover.
        """
        with self._mutex:
            if self._db is not None:
                if is_clean:
                    with suppress(JournalError):  # if the disk is full, the next opening does this work
                        self.tidy()
                self._db.close()
                self._db = None
            self._file_lock.release()
            if self._scratch is not None:
                self._scratch.cleanup()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        with explained(self.path, doing):
            yield
