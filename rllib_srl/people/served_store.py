"""Everything that a served model keeps, in one SQLite file: conversations, ratings of them, and the versions.

    DIR/served.db   conversations                 redacted, with the tokens of their answers
                    answers, ratings, raters      as in every file of ratings (`rating_store.py`)
                    versions, uses, changes       each version with its parent, the ratings that trained it, its states

    begin ─> training ─> candidate ─> active ─> superseded ─> active (its child was rolled back)
                │            │           └────> rolled_back
                └────────────┴─> rejected (a gate, a checksum or the canary), or stale

Version 0 is the model that was given. It has no row, cannot be rejected, and is active while no other version is.

A version is *stale* if a rating that it was trained on has changed, or its parent was rolled back, before it was
active; its ratings are free. An active version whose ratings change is served on, and listed with their number. A
rating is used up by the version that was trained on it, whatever became of that version, until it is changed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rllib_srl.people.conversation import Conversation, Tokens
from rllib_srl.people.rating import TAKEN_BACK, Rating
from rllib_srl.people.rating_store import RatingStore

FILE = "served.db"  # in the directory of a served model
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
CREATE TABLE conversations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, version INTEGER NOT NULL, at TEXT NOT NULL,
    messages TEXT NOT NULL, answer TEXT NOT NULL, finish_reason TEXT NOT NULL, tokens TEXT, untrainable TEXT NOT NULL);
CREATE TABLE versions (
    number INTEGER PRIMARY KEY AUTOINCREMENT, parent INTEGER NOT NULL, state TEXT NOT NULL, begun_at TEXT NOT NULL,
    changed_at TEXT NOT NULL, settings TEXT NOT NULL, metrics TEXT NOT NULL, files TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE uses (
    version INTEGER NOT NULL REFERENCES versions, answer TEXT NOT NULL, value TEXT NOT NULL,
    PRIMARY KEY (version, answer)) WITHOUT ROWID;
CREATE TABLE changes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, version INTEGER NOT NULL, state TEXT NOT NULL, at TEXT NOT NULL,
    reason TEXT NOT NULL);
CREATE INDEX uses_by_answer ON uses (answer, value);
CREATE UNIQUE INDEX one_active ON versions (state) WHERE state = 'active';
CREATE UNIQUE INDEX one_training ON versions (state) WHERE state = 'training';
"""
_OF_CONVERSATION = ("id", "version", "at", "messages", "answer", "finish_reason", "tokens", "untrainable")
_OF_VERSION = ("number", "parent", "state", "begun_at", "changed_at", "settings", "metrics", "files", "reason")
_AT_ONCE = 100  # conversations that a search reads at once
_TODAY = "(SELECT a.id, a.group_id, r.value, r.seq FROM answers a JOIN ratings r ON r.seq = a.newest)"
_FREE = f"""
SELECT t.id, t.value FROM {_TODAY} t
WHERE t.value != '{TAKEN_BACK}' AND NOT EXISTS (
    SELECT 1 FROM uses u JOIN versions v ON v.number = u.version
    WHERE u.answer = t.id AND u.value = t.value AND v.state != '{STALE}'
) AND EXISTS (SELECT 1 FROM conversations c WHERE c.id = t.group_id AND c.tokens IS NOT NULL)
ORDER BY t.seq"""
_STALE = f"SELECT u.version, count(*) FROM uses u JOIN {_TODAY} t ON t.id = u.answer WHERE t.value != u.value"
_WITHDRAWN = f"""
SELECT u.answer, u.value FROM uses u JOIN versions v ON v.number = u.version GROUP BY u.answer, u.value
HAVING sum(v.state = '{ROLLED_BACK}') > 0 AND sum(v.state NOT IN ('{ROLLED_BACK}', '{REJECTED}', '{STALE}')) = 0"""
_REMEMBERED = """
WITH RECURSIVE line (number) AS (
    SELECT ? UNION ALL SELECT v.parent FROM versions v JOIN line ON v.number = line.number)
SELECT u.answer, u.value, max(u.version) FROM uses u JOIN line ON u.version = line.number GROUP BY u.answer"""


class LineageError(RuntimeError):
    """A version cannot change so; the message says why."""


@dataclass(frozen=True)
class Hits:
    """Conversations that a search has found, the newest first."""

    conversations: Sequence[Conversation]
    before: int | None  # where the search goes on; None: at the end
    is_cut: bool  # it stopped for its time


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


class ServedStore(RatingStore):
    """The file of one served model. Invariant: nothing in it was left unredacted; at most one version is active.

    Each method that changes something is one transaction, durable on return. All raise `RatingsError` if the file
    cannot be read or written, and `DiskFull`.
    """

    tables, content = RatingStore.tables + _TABLES, "conversations, ratings and versions"
    _free: tuple[list[int], dict[str, str]] = ([], {})  # `seen` and free ratings of the last call

    def __enter__(self) -> ServedStore:
        return self

    # --- conversations -----------------------------------------------------------------------------

    def log(self, conversation: Conversation) -> Conversation:
        """Store a conversation, redacted, and return it so."""
        one = conversation.redacted()
        values = {**vars(one), "messages": json.dumps(one.messages, ensure_ascii=False)}
        values["tokens"] = None if one.tokens is None else json.dumps(vars(one.tokens))
        marks = ", ".join("?" * len(_OF_CONVERSATION))
        insert = f"INSERT INTO conversations ({', '.join(_OF_CONVERSATION)}) VALUES ({marks})"
        with self._explained(f"logging {one.id}"), self._transaction():
            self._db.execute(insert, [values[name] for name in _OF_CONVERSATION])
        return one

    def find(self, conversation_id: str) -> Conversation | None:
        """Return a conversation, None if there is none with this id."""
        rows = self._read(f"SELECT {', '.join(_OF_CONVERSATION)} FROM conversations WHERE id = ?", conversation_id)
        return _conversation(rows[0]) if rows else None

    def num_conversations(self) -> int:
        """Return the number of conversations."""
        return int(self._read("SELECT count(*) FROM conversations")[0][0])

    def search(self, text: str, before: int | None, most: int, limit_s: float) -> Hits:
        """Return the newest conversations in which a text occurs, in any case; all have "".

        Args:
            text: in a message or the answer.
            before: a former `Hits.before`, to go on; None: from the newest one.
            most: number of conversations to find.
            limit_s: after which the search stops.
        """
        found: list[Conversation] = []
        deadline, wanted, at = time.monotonic() + limit_s, text.casefold(), before
        query = f"SELECT seq, {', '.join(_OF_CONVERSATION)} FROM conversations WHERE ? IS NULL OR seq < ?"
        while rows := self._read(f"{query} ORDER BY seq DESC LIMIT ?", at, at, _AT_ONCE):
            for at, *row in rows:
                one = _conversation(row)
                said = [str(message["content"]) for message in one.messages]
                if any(wanted in part.casefold() for part in (*said, one.answer)):
                    found.append(one)
                    if len(found) == most:
                        return Hits(found, at, False)
            if time.monotonic() > deadline:
                return Hits(found, at, True)
        return Hits(found, None, False)

    # --- changing versions -------------------------------------------------------------------------

    def begin(self, uses: Mapping[str, str], settings: Mapping[str, Any]) -> Version:
        """Begin a version whose parent is the active one.

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
            insert = f"INSERT INTO versions ({', '.join(_OF_VERSION[1:])}) VALUES ({', '.join('?' * len(row))})"
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
        """Make a candidate the active version, and the active one superseded.

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

    def roll_back(self, reason: str, number: int | None = None) -> dict[str, Any]:
        """Roll the active version back to its parent; what is being trained from it becomes stale.

        Args:
            reason: why.
            number: of the version that is meant; None: the active one.

        Returns:
            `rolled_back`, `active`: numbers of both; `withdrawn_ratings`: ids of answers whose ratings only the first
            had used.

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
            for child in self._versions("WHERE parent = ? AND state IN (?, ?)", active, TRAINING, CANDIDATE):
                self._change(child.number, STALE, f"version {active}, from which it was trained, was rolled back")
            if parent:
                self._change(parent, ACTIVE, f"version {active} was rolled back")
        query = f"SELECT u.answer FROM uses u JOIN ({_WITHDRAWN}) w USING (answer, value) WHERE u.version = ?"
        withdrawn = [answer for (answer,) in self._read(f"{query} ORDER BY u.answer", active)]
        return {"rolled_back": active, "active": parent, "withdrawn_ratings": withdrawn}

    # --- reading versions --------------------------------------------------------------------------

    def check_active(self, number: int | None) -> None:
        """Check that a version is the active one; None: any.

        Raises:
            LineageError: it is not.
        """
        if number is not None and (active := self._active_number()) != number:
            raise LineageError(f"version {number} is not active, version {active} is; nothing was rolled back")

    def seen(self) -> list[int]:
        """Return two numbers, of which one differs whenever a version or a rating has changed."""
        return [int(self._read("SELECT ifnull(max(seq), 0) FROM changes")[0][0]), self.newest_change()]

    def version(self, number: int) -> Version:
        """Return a version.

        Raises:
            LineageError: there is none with this number.
        """
        found = self._versions("WHERE number = ?", number)
        if not found:
            raise LineageError(f"version = {number}; expected one that srl versions lists")
        return found[0]

    def versions(self) -> list[Version]:
        """Return all versions, the oldest first."""
        return self._versions("ORDER BY number")

    def active(self) -> Version | None:
        """Return the active version; None: the model that was given."""
        return next(iter(self._versions("WHERE state = ?", ACTIVE)), None)

    def in_training(self) -> Version | None:
        """Return the version in training, None if there is none."""
        return next(iter(self._versions("WHERE state = ?", TRAINING)), None)

    def candidates(self) -> list[Version]:
        """Return the versions that are neither active nor rejected yet."""
        return self._versions("WHERE state = ?", CANDIDATE)

    def rows(self) -> list[dict[str, Any]]:
        """Return all versions with their history, and the number of their ratings, changed and withdrawn ones too."""
        used = dict(self._read("SELECT version, count(*) FROM uses GROUP BY version"))
        stale = dict(self._read(f"{_STALE} GROUP BY u.version"))
        query = f"SELECT u.version, count(*) FROM uses u JOIN ({_WITHDRAWN}) w USING (answer, value) GROUP BY u.version"
        withdrawn = dict(self._read(query))
        history = "SELECT state, at, reason FROM changes WHERE version = ? ORDER BY seq"
        return [
            {
                **vars(one),
                "num_ratings": used.get(one.number, 0),
                "num_stale_ratings": stale.get(one.number, 0),
                "num_withdrawn_ratings": withdrawn.get(one.number, 0),
                "history": self._read(history, one.number),
            }
            for one in self.versions()
        ]

    # --- ratings of versions -----------------------------------------------------------------------

    def free_ratings(self) -> dict[str, str]:
        """Return the ratings that can be trained on and are not used up: answer id -> value, in their order.

        They are read again only after a change: the page asks every two seconds.
        """
        if self._free[0] != (seen := self.seen()):
            self._free = (seen, dict(self._read(_FREE)))
        return dict(self._free[1])

    def uses(self, number: int) -> dict[str, str]:
        """Return the ratings that a version was trained on: answer id -> value."""
        return dict(self._read("SELECT answer, value FROM uses WHERE version = ? ORDER BY answer", number))

    def remembered(self, number: int) -> dict[str, str]:
        """Return the ratings that a version and its ancestors were trained on, the newest use of each: id -> value."""
        return {answer: value for answer, value, _ in self._read(_REMEMBERED, number)}

    def changed(self, uses: Mapping[str, str]) -> list[str]:
        """Return the ids of those answers whose rating is another today."""
        today = dict(self._read(f"SELECT id, value FROM {_TODAY}"))
        return [answer for answer, value in uses.items() if today.get(answer, value) != value]

    def versions_against(self, answer_id: str) -> list[int]:
        """Return the versions that were trained on another rating of an answer than that of today."""
        return [number for number, _ in self._read(f"{_STALE} AND u.answer = ? GROUP BY u.version", answer_id)]

    def rated(self, number: int) -> list[tuple[Conversation, Rating]]:
        """Return the conversations that a version is trained on, with their ratings of today."""
        pairs = [(self.find(answer.rpartition("/")[0]), self.of_answer(answer)) for answer in self.uses(number)]
        return [(one, rating) for one, rating in pairs if one and one.tokens and rating and rating.is_given]

    # --- rows --------------------------------------------------------------------------------------

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

    def _versions(self, rest: str, *values: Any) -> list[Version]:
        rows = self._read(f"SELECT {', '.join(_OF_VERSION)} FROM versions {rest}", *values)
        named = [dict(zip(_OF_VERSION, row, strict=True)) for row in rows]
        of_json = ("settings", "metrics", "files")
        return [Version(**one | {name: json.loads(one[name]) for name in of_json}) for one in named]


def _conversation(values: Sequence[Any]) -> Conversation:
    row = dict(zip(_OF_CONVERSATION, values, strict=True))
    tokens = None if row["tokens"] is None else Tokens(**json.loads(row["tokens"]))
    return Conversation(**row | {"messages": json.loads(row["messages"]), "tokens": tokens})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
