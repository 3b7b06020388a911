"""Store ratings in a run's directory: one SQLite file that raters and the run use at the same time.

    RUN/ratings.db    meta      schema version, id of the file, scheme of its ratings
                      answers   what was rated, as text; newest: the last change of its rating
                      ratings   one row per change, append-only, with its reward; its seq orders all changes

    store.rate(answer, "good", rater="ann")     durable when it returns; False: it has this rating already
    store.changed_since(seq)                    one indexed query; [] if nothing is new

The file is private (mode 0600): it has the text of prompts and answers. Writers wait for each other for up to
`database.TIMEOUT_S`. The newest rating of an answer counts, whoever gave it. A file never changes its scheme.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection
from contextlib import closing
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from rllib_srl.people.rating import (
    NAMED_SCHEMES,
    NORMALISED,
    TAKEN_BACK,
    Answer,
    Rating,
    check_value,
    fixed_reward,
    normalised,
)
from rllib_srl.storage.database import Database, DatabaseError

RATINGS = "ratings.db"  # in the directory of a run
SCHEMA_VERSION = 3
_TABLES = """
CREATE TABLE answers (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL, fingerprint TEXT NOT NULL, group_id TEXT NOT NULL,
    episode INTEGER NOT NULL, key TEXT NOT NULL, env_id TEXT NOT NULL, domain TEXT NOT NULL, version INTEGER NOT NULL,
    prompt TEXT NOT NULL, answer TEXT NOT NULL, newest INTEGER NOT NULL, UNIQUE (id, fingerprint));
CREATE TABLE ratings (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, answer INTEGER NOT NULL REFERENCES answers, value TEXT NOT NULL,
    rater TEXT NOT NULL, rated_at TEXT NOT NULL, reward REAL);
CREATE INDEX answers_by_change ON answers (newest);
CREATE INDEX answers_by_group ON answers (group_id);
"""
_OF_ANSWER = ("group_id", "episode", "key", "fingerprint", "env_id", "domain", "version", "prompt", "answer")
_FROM = "FROM answers a JOIN ratings r ON r.seq = a.newest"
_OF_RATING = "r.value, r.rater, r.rated_at, r.seq, r.reward"
_SELECT = f"SELECT {', '.join(f'a.{name}' for name in _OF_ANSWER)}, {_OF_RATING} {_FROM}"
_FIRST = f"""
SELECT answer, value, min(seq) FROM ratings WHERE rater = ? AND value != '{TAKEN_BACK}'
GROUP BY answer ORDER BY min(seq)"""


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class RatingsError(DatabaseError):
    """Ratings, or the data stored with them, cannot be read or written; the message names the file and what to do."""


class RatingStore(Database):
    """The ratings of one run. Invariant: `answers.newest` is the seq of the last change of each answer's rating."""

    tables, schema, content, error = _TABLES, SCHEMA_VERSION, "ratings", RatingsError

    def __init__(self, path: Path, scheme: str = "") -> None:
        """Open the file, or create it; `scheme` "" takes that of the file, or leaves it open.

        Raises:
            ValueError: the scheme is unknown, or the file has ratings of another one.
            RatingsError: the file cannot be used.
        """
        super().__init__(path)
        self.scheme = scheme
        try:
            self._settle()
        except BaseException:
            self.close()
            raise

    def _settle(self) -> None:
        """Take the scheme of the file, or give it one before its first rating."""
        if self.scheme and self.scheme not in NAMED_SCHEMES:
            raise ValueError(f"scheme = {self.scheme!r}; expected one of {', '.join(NAMED_SCHEMES)}")
        (row,) = self._read("SELECT (SELECT value FROM meta WHERE name = 'scheme'), (SELECT count(*) FROM ratings)")
        before, num = row[0] or "", row[1]
        if not self.scheme or self.scheme == before:
            self.scheme = before
        elif before or num:
            named = f"scheme {before!r}" if before else "ratings without a scheme (good, bad, 1 to 5)"
            raise ValueError(f"scheme = {self.scheme!r}: {self.path} has {named} already; leave the scheme out")
        else:
            with self._explained("setting their scheme"), self._transaction():
                self._db.execute("INSERT OR REPLACE INTO meta VALUES ('scheme', ?)", (self.scheme,))

    def rate(self, answer: Answer, value: str, rater: str = "") -> bool:
        """Set the rating of an answer, durably; return False if it has this rating already.

        Raises:
            ValueError: the value is not one of the file's scheme, or `TAKEN_BACK`.
            RatingsError: nothing was stored.
        """
        check_value(value, self.scheme)
        with self._explained(f"rating {answer.answer_id}"), self._transaction():
            where = (answer.answer_id, answer.fingerprint)
            query = f"SELECT a.number, r.value {_FROM} WHERE a.id = ? AND a.fingerprint = ?"
            row = self._db.execute(query, where).fetchone()
            number, before = row or (None, TAKEN_BACK)
            if value == before:
                return False
            if number is None:
                number = self._insert("answers", {"id": answer.answer_id, **vars(answer), "newest": 0})
            change = {"answer": number, "value": value, "rater": rater, "rated_at": utc_now()}
            seq = self._insert("ratings", {**change, "reward": self._reward(number, value, rater)})
            self._db.execute("UPDATE answers SET newest = ? WHERE number = ?", (seq, number))
        return True

    def _reward(self, answer: int, value: str, rater: str) -> float | None:
        """Return the reward of a new rating; "normalised": by the answers that its rater had rated before this one.

        Only the first stars of an answer count, so corrections and undone ratings move no later reward.
        """
        if value == TAKEN_BACK:
            return None
        if self.scheme != NORMALISED:
            return fixed_reward(value)
        before = takewhile(lambda row: row[0] != answer, self._db.execute(_FIRST, (rater,)))
        return normalised(int(value), (int(stars) for _, stars, _ in before))

    def newest_change(self) -> int:
        """Return the seq of the last change, 0 without one."""
        newest: int = self._read("SELECT ifnull(max(newest), 0) FROM answers")[0][0]
        return newest

    def all(self) -> list[Rating]:
        """Return the newest rating of every answer, those taken back included, in the order of their changes."""
        return self._ratings("ORDER BY r.seq")

    def changed_since(self, seq: int) -> list[Rating]:
        return self._ratings("WHERE a.newest > ? ORDER BY r.seq", seq)

    def rewards(self) -> dict[float, int]:
        """Return how many answers have each reward; ratings that were taken back do not count."""
        return dict(self._read(f"SELECT r.reward, count(*) {_FROM} WHERE r.reward IS NOT NULL GROUP BY r.reward"))

    def num_since(self, at: str) -> int:
        """Return the number of changes since a time (UTC, ISO 8601)."""
        num: int = self._read("SELECT count(*) FROM ratings WHERE rated_at >= ?", at)[0][0]
        return num

    def of_groups(self, group_ids: Collection[str]) -> list[Rating]:
        return [rating for name in group_ids for rating in self._ratings("WHERE a.group_id = ? ORDER BY r.seq", name)]

    def of_answer(self, answer_id: str) -> Rating | None:
        """Return the rating of the answer with an id, the newest of several; None if it was never rated."""
        return next(iter(self._ratings("WHERE a.id = ? ORDER BY r.seq DESC LIMIT 1", answer_id)), None)

    def rating_of(self, answer: Answer) -> Rating | None:
        """Return the rating of an answer, None if it was never rated."""
        where = "WHERE a.id = ? AND a.fingerprint = ?"
        return next(iter(self._ratings(where, answer.answer_id, answer.fingerprint)), None)

    def value_of(self, answer: Answer) -> str:
        """Return the value of an answer's rating, `TAKEN_BACK` if it has none."""
        rating = self.rating_of(answer)
        return rating.value if rating else TAKEN_BACK

    def group_ids(self) -> set[str]:
        return {group_id for (group_id,) in self._read("SELECT DISTINCT group_id FROM answers")}

    def copy_to(self, path: Path) -> None:
        """Write a copy, for a run that is resumed in another directory; it keeps the id of the file."""
        with self._explained(f"copying them to {path}"):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            with closing(sqlite3.connect(path)) as copy:
                self._db.backup(copy)

    def _ratings(self, clause: str, *values: Any) -> list[Rating]:
        num = len(_OF_ANSWER)
        rows = [(row[:num], (*row[num:], self.scheme)) for row in self._read(f"{_SELECT} {clause}", *values)]
        return [Rating(Answer(*answer), *about) for answer, about in rows]
