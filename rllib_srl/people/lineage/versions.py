"""Keep the lineage of a served model: every trained version with its parent, ratings, settings, metrics and state.

    begin ─> training ─> candidate ─> active ─> superseded ─> active (its child was rolled back)
                │            │           └────> rolled_back
                └────────────┴─> rejected (a gate, a checksum or the canary), or stale (a rating changed meanwhile)

Version 0 is the model that was given. It has no row, cannot be rejected, and is active while no other version is.
A version is *stale* if a rating that it was trained on has changed since: `stale_answers` compares what each version
used with the ratings of today, so it cannot be out of date. A stale candidate is not activated; a stale active version
is served and listed as such, since weights are not changed back.

A rating is used up by the version that was trained on it, whatever became of that version: what a rejected or rolled
back version learned from is not trained on again. Changed ratings, and those of a stale candidate, are free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rllib_srl.storage.private_database import PrivateDatabase

VERSIONS = "versions.db"  # in the directory of a served model
TRAINING, CANDIDATE, ACTIVE, SUPERSEDED = "training", "candidate", "active", "superseded"
REJECTED, ROLLED_BACK, STALE = "rejected", "rolled_back", "stale"
_AFTER = {  # state -> states that may follow
    TRAINING: (CANDIDATE, REJECTED, STALE),
    CANDIDATE: (ACTIVE, REJECTED, STALE),
    ACTIVE: (SUPERSEDED, ROLLED_BACK),
    SUPERSEDED: (ACTIVE,),
    REJECTED: (),
    ROLLED_BACK: (),
    STALE: (),
}
_TABLES = """
CREATE TABLE versions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, parent INTEGER NOT NULL, state TEXT NOT NULL, begun_at TEXT NOT NULL,
    changed_at TEXT NOT NULL, settings TEXT NOT NULL, metrics TEXT NOT NULL, files TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE uses (
    version INTEGER NOT NULL REFERENCES versions, answer TEXT NOT NULL, value TEXT NOT NULL,
    PRIMARY KEY (version, answer)) WITHOUT ROWID;
CREATE TABLE changes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, version INTEGER NOT NULL, state TEXT NOT NULL, at TEXT NOT NULL,
    reason TEXT NOT NULL);
CREATE UNIQUE INDEX one_active ON versions (state) WHERE state = 'active';
CREATE UNIQUE INDEX one_training ON versions (state) WHERE state = 'training';
"""
_COLUMNS = ("number", "parent", "state", "begun_at", "changed_at", "settings", "metrics", "files", "reason")

_OF_JSON = ("settings", "metrics", "files")


class LineageError(RuntimeError):
    """The versions cannot be read or written, or a version cannot change so; the message says why."""


@dataclass(frozen=True)
class Version:
    """One trained version. Invariant: `files` has a checksum for each file once it is a candidate."""

    number: int
    parent: int  # 0: the model that was given
    state: str
    begun_at: str  # UTC, ISO 8601
    changed_at: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, Any]
    files: Mapping[str, str]  # name -> SHA-256 in hex
    reason: str  # of its state


class Lineage(PrivateDatabase):
    """The versions of one served model. Invariant: at most one is active, and at most one in training."""

    tables, content, error = _TABLES, "versions", LineageError

    def __enter__(self) -> Lineage:
        return self

    # --- changing --------------------------------------------------------------------------------

    def begin(self, uses: Mapping[str, str], settings: Mapping[str, Any]) -> Version:
        """Begin a version whose parent is the active one; it is durable on return.

        Args:
            uses: answer id -> value of the rating that it is trained on.
            settings: of its training.

        Raises:
            LineageError: there are no ratings, or another version is in training.
        """
        if not uses:
            raise LineageError("a version needs ratings to train on; expected at least one")
        if (other := self.in_training()) is not None:
            raise LineageError(f"version {other.number} is in training; expected none")
        now = _now()
        with self._explained("beginning a version"), self._transaction():
            row = (self._active_number(), TRAINING, now, now, json.dumps(dict(settings)), "{}", "{}", "")
            insert = f"INSERT INTO versions ({', '.join(_COLUMNS[1:])}) VALUES ({', '.join('?' * len(row))})"
            number = int(self._db.execute(insert, row).lastrowid or 0)
            used = [(number, answer, value) for answer, value in uses.items()]
            self._db.executemany("INSERT INTO uses VALUES (?, ?, ?)", used)
            self._note(number, TRAINING, "")
        return self.version(number)

    def finish(self, number: int, files: Mapping[str, str], metrics: Mapping[str, Any]) -> Version:
        """Make a version in training a candidate, with the checksums of its files."""
        with self._explained("finishing a version"), self._transaction():
            self._change(number, CANDIDATE, "")
            texts = (json.dumps(dict(files)), json.dumps(dict(metrics)), number)
            self._db.execute("UPDATE versions SET files = ?, metrics = ? WHERE number = ?", texts)
        return self.version(number)

    def reject(
        self, number: int, reason: str, metrics: Mapping[str, Any] | None = None, is_stale: bool = False
    ) -> None:
        """Reject a version that is not active; a stale one leaves its ratings free."""
        with self._explained("rejecting a version"), self._transaction():
            self._change(number, STALE if is_stale else REJECTED, reason)
            if metrics is not None:
                text = json.dumps(dict(metrics))
                self._db.execute("UPDATE versions SET metrics = ? WHERE number = ?", (text, number))

    def activate(self, number: int, reason: str = "it passed all gates") -> None:
        """Make a candidate the active version, and the active one superseded, in one transaction.

        Raises:
            LineageError: it is no candidate, or not a child of the active version.
        """
        with self._explained("activating a version"), self._transaction():
            active, parent = self._active_number(), self.version(number).parent
            if parent != active:
                raise LineageError(f"version {number} was trained from version {parent}; active is version {active}")
            if active:
                self._change(active, SUPERSEDED, f"version {number} follows")
            self._change(number, ACTIVE, reason)

    def roll_back(self, reason: str, number: int | None = None) -> tuple[int, int]:
        """Roll the active version back to its parent, in one transaction; return both numbers.

        Args:
            reason: why.
            number: of the version that is meant; None: the active one.

        Raises:
            LineageError: no trained version is active, or another one than was meant.
        """
        with self._explained("rolling back"), self._transaction():
            active = self._active_number()
            self.check_active(number)
            if not active:
                raise LineageError("the model that was given is active; expected a trained version to roll back")
            parent = self.version(active).parent
            self._change(active, ROLLED_BACK, reason)
            if parent:
                self._change(parent, ACTIVE, f"version {active} was rolled back")
        return active, parent

    # --- reading ---------------------------------------------------------------------------------

    def check_active(self, number: int | None) -> None:
        """Check that a version is the active one; None: any.

        Raises:
            LineageError: it is not.
        """
        if number is not None and (active := self._active_number()) != number:
            raise LineageError(f"version {number} is not active, version {active} is; nothing was rolled back")

    def newest_change(self) -> int:
        """Return the seq of the last change of a version, 0 without one."""
        newest: int = self._read("SELECT ifnull(max(seq), 0) FROM changes")[0][0]
        return newest

    def version(self, number: int) -> Version:
        """Return a version.

        Raises:
            LineageError: there is none with this number.
        """
        found = self._selected("WHERE number = ?", number)
        if not found:
            raise LineageError(f"version = {number}; expected one that srl versions lists")
        return found[0]

    def all(self) -> list[Version]:
        """Return all versions, the oldest first."""
        return self._selected("ORDER BY number")

    def active(self) -> Version | None:
        """Return the active version; None: the model that was given."""
        return next(iter(self._selected("WHERE state = ?", ACTIVE)), None)

    def in_training(self) -> Version | None:
        """Return the version in training, None if there is none."""
        return next(iter(self._selected("WHERE state = ?", TRAINING)), None)

    def candidates(self) -> list[Version]:
        """Return the versions that are neither active nor rejected yet."""
        return self._selected("WHERE state = ?", CANDIDATE)

    def uses(self, number: int) -> dict[str, str]:
        """Return the ratings that a version was trained on: answer id -> value."""
        return dict(self._read("SELECT answer, value FROM uses WHERE version = ? ORDER BY answer", number))

    def remembered(self, number: int) -> dict[str, str]:
        """Return the ratings that a version and its ancestors were trained on, the newest use of each: id -> value."""
        found: dict[str, str] = {}
        while number:
            found = {**self.uses(number), **found}
            number = self.version(number).parent
        return found

    def all_uses(self) -> list[tuple[int, str, str]]:
        """Return (version, answer id, value) of all ratings that versions were trained on."""
        return self._read("SELECT version, answer, value FROM uses")

    def used_up(self) -> set[tuple[str, str]]:
        """Return all (answer id, value) that some version was trained on, those of stale candidates left out."""
        joined = "uses u JOIN versions v ON v.number = u.version"
        return set(self._read(f"SELECT DISTINCT u.answer, u.value FROM {joined} WHERE v.state != ?", STALE))

    def withdrawn(self) -> set[tuple[str, str]]:
        """Return all (answer id, value) that only versions which were rolled back have used."""
        joined = "uses u JOIN versions v ON v.number = u.version"
        is_out = "sum(v.state = ?) > 0 AND sum(v.state NOT IN (?, ?, ?)) = 0"
        query = f"SELECT u.answer, u.value FROM {joined} GROUP BY u.answer, u.value HAVING {is_out}"
        return set(self._read(query, ROLLED_BACK, ROLLED_BACK, REJECTED, STALE))

    def withdrawn_by(self, number: int) -> list[str]:
        """Return the ids of the answers of a version whose ratings are withdrawn, such as by its rollback."""
        withdrawn = self.withdrawn()
        return [answer for answer, value in self.uses(number).items() if (answer, value) in withdrawn]

    def stale_answers(self, number: int, today: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Return the ratings of a version that have changed: answer id -> (value used, value of today).

        Args:
            number: of the version.
            today: answer id -> value; an answer without an entry was not changed.
        """
        used = self.uses(number)
        return {name: (value, today[name]) for name, value in used.items() if today.get(name, value) != value}

    def history(self, number: int) -> list[tuple[str, str, str]]:
        """Return the states that a version has had, with time and reason."""
        return self._read("SELECT state, at, reason FROM changes WHERE version = ? ORDER BY seq", number)

    # --- rows ------------------------------------------------------------------------------------

    def _active_number(self) -> int:
        found = self._db.execute("SELECT number FROM versions WHERE state = ?", (ACTIVE,)).fetchone()
        return int(found[0]) if found else 0

    def _change(self, number: int, state: str, reason: str) -> None:
        before = self.version(number).state
        if state not in _AFTER[before]:
            after = " or ".join(_AFTER[before]) or "nothing else"
            raise LineageError(f"version {number} is {before}; it can become {after}, not {state}")
        changed = (state, _now(), reason, number)
        self._db.execute("UPDATE versions SET state = ?, changed_at = ?, reason = ? WHERE number = ?", changed)
        self._note(number, state, reason)

    def _note(self, number: int, state: str, reason: str) -> None:
        insert = "INSERT INTO changes (version, state, at, reason) VALUES (?, ?, ?, ?)"
        self._db.execute(insert, (number, state, _now(), reason))

    def _selected(self, rest: str, *values: Any) -> list[Version]:
        rows = self._read(f"SELECT {', '.join(_COLUMNS)} FROM versions {rest}", *values)
        named = (dict(zip(_COLUMNS, row, strict=True)) for row in rows)
        return [Version(**{**row, **{name: json.loads(row[name]) for name in _OF_JSON}}) for row in named]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
