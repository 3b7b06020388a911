"""Store ratings in a run's directory: one SQLite file that raters and the run use at the same time.

    RUN/ratings.db    meta      schema version, id of the file
                      answers   what was rated, as text; newest: the last change of its rating
                      ratings   one row per change, append-only; its seq orders all changes

    store.rate(answer, "good", rater="ann")     durable when it returns; False: it was rated so already
    store.changed_since(seq)                    one indexed query; [] if nothing is new

The file is private (mode 0600): it has the text of prompts and answers. Writers wait for each other for up to
`TIMEOUT_S`. The newest rating of an answer counts, whoever gave it.
"""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rllib_srl.people.answer import Answer
from rllib_srl.people.rating import TAKEN_BACK, Rating, check_value
from rllib_srl.storage.disk import DiskFull, cannot_grow, full_message

RATINGS = "ratings.db"  # in the directory of a run
SCHEMA_VERSION = 1
TIMEOUT_S = 10.0
_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE answers (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL, fingerprint TEXT NOT NULL, group_id TEXT NOT NULL,
    episode INTEGER NOT NULL, key TEXT NOT NULL, env_id TEXT NOT NULL, domain TEXT NOT NULL, version INTEGER NOT NULL,
    prompt TEXT NOT NULL, answer TEXT NOT NULL, newest INTEGER NOT NULL, UNIQUE (id, fingerprint));
CREATE TABLE ratings (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, answer INTEGER NOT NULL REFERENCES answers, value TEXT NOT NULL,
    rater TEXT NOT NULL, rated_at TEXT NOT NULL);
CREATE INDEX answers_by_change ON answers (newest);
CREATE INDEX answers_by_group ON answers (group_id);
"""
_OF_ANSWER = ("group_id", "episode", "key", "fingerprint", "env_id", "domain", "version", "prompt", "answer")
_FROM = "FROM answers a JOIN ratings r ON r.seq = a.newest"
_SELECT = f"SELECT {', '.join(f'a.{name}' for name in _OF_ANSWER)}, r.value, r.rater, r.rated_at, r.seq {_FROM}"


class RatingsError(RuntimeError):
    """The ratings of a run cannot be read or written; the message names the file and what to do."""


class RatingStore:
    """The ratings of one run. Invariant: `answers.newest` is the seq of the last change of each answer's rating."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it.

        Raises:
            RatingsError: it is damaged, of another version, locked, or cannot be created.
        """
        self.path = path
        with self._explained("opening them"):
            try:
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite gives the -wal file the same mode
            except OSError as error:
                raise RatingsError(f"ratings {path} cannot be opened: {error.strerror}") from error
            self._db = sqlite3.connect(path, timeout=TIMEOUT_S, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        self._use_wal()
        self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction():
            if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _TABLES.split(";")[:-1]:
                    self._db.execute(statement)
                meta = [("schema", str(SCHEMA_VERSION)), ("id", uuid.uuid4().hex)]
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", meta)
        meta_of = dict(self._db.execute("SELECT name, value FROM meta").fetchall())
        if meta_of.get("schema") != str(SCHEMA_VERSION):
            raise RatingsError(f"ratings {self.path} have schema {meta_of.get('schema')}; expected {SCHEMA_VERSION}")
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

    # --- writing ---------------------------------------------------------------------------------

    def rate(self, answer: Answer, value: str, rater: str = "") -> bool:
        """Set the rating of an answer; it is durable on return.

        Args:
            answer: the answer.
            value: good, bad, 1 to 5, or none to take the rating back.
            rater: name of the person, "" without one.

        Returns:
            False if this is its rating already; then nothing was written.

        Raises:
            ValueError: the value is unknown.
            RatingsError: nothing was stored.
        """
        check_value(value)
        with self._explained(f"rating {answer.answer_id}"), self._transaction():
            where = (answer.answer_id, answer.fingerprint)
            query = f"SELECT a.number, r.value {_FROM} WHERE a.id = ? AND a.fingerprint = ?"
            found = self._db.execute(query, where).fetchone()
            number, before = found or (None, TAKEN_BACK)
            if value == before:
                return False
            if number is None:
                columns = ("id", *_OF_ANSWER, "newest")
                text = f"INSERT INTO answers ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
                values = [answer.answer_id, *(getattr(answer, name) for name in _OF_ANSWER), 0]
                number = self._db.execute(text, values).lastrowid
            change = (number, value, rater, datetime.now(UTC).isoformat(timespec="seconds"))
            insert = "INSERT INTO ratings (answer, value, rater, rated_at) VALUES (?, ?, ?, ?)"
            seq = self._db.execute(insert, change).lastrowid
            self._db.execute("UPDATE answers SET newest = ? WHERE number = ?", (seq, number))
        return True

    # --- reading ---------------------------------------------------------------------------------

    def newest_change(self) -> int:
        """Return the seq of the last change, 0 without one."""
        newest: int = self._read("SELECT ifnull(max(newest), 0) FROM answers")[0][0]
        return newest

    def all(self) -> list[Rating]:
        """Return the newest rating of every answer, those taken back included, in the order of their changes."""
        return self._ratings("ORDER BY r.seq")

    def changed_since(self, seq: int) -> list[Rating]:
        """Return the ratings that changed after a change."""
        return self._ratings("WHERE a.newest > ? ORDER BY r.seq", seq)

    def of_groups(self, group_ids: Collection[str]) -> list[Rating]:
        """Return all ratings of the answers of some groups."""
        return [one for name in group_ids for one in self._ratings("WHERE a.group_id = ? ORDER BY r.seq", name)]

    def of_answer(self, answer_id: str) -> Rating | None:
        """Return the rating of the answer with an id, the newest of several; None if it was never rated."""
        return next(iter(self._ratings("WHERE a.id = ? ORDER BY r.seq DESC LIMIT 1", answer_id)), None)

    def value_of(self, answer: Answer) -> str:
        """Return the value of an answer's rating, `TAKEN_BACK` if it has none."""
        where = "WHERE a.id = ? AND a.fingerprint = ?"
        found = self._ratings(where, answer.answer_id, answer.fingerprint)
        return found[0].value if found else TAKEN_BACK

    def group_ids(self) -> set[str]:
        """Return the ids of all groups with a rated answer."""
        return {group_id for (group_id,) in self._read("SELECT DISTINCT group_id FROM answers")}

    def copy_to(self, path: Path) -> None:
        """Write a copy, for a run that is resumed in another directory; it keeps the id of the file.

        Raises:
            RatingsError: the copy cannot be written.
        """
        with self._explained(f"copying them to {path}"):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            with closing(sqlite3.connect(path)) as copy:
                self._db.backup(copy)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> RatingStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ratings(self, rest: str, *values: Any) -> list[Rating]:
        num = len(_OF_ANSWER)
        return [Rating(Answer(*row[:num]), *row[num:]) for row in self._read(f"{_SELECT} {rest}", *values)]

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
                text += ": the file is damaged, or no file of ratings; move it away, or restore a copy"
            raise RatingsError(f"ratings {self.path}: {doing} failed: {text}") from error
