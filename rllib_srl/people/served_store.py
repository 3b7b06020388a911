"""Store all data of a served model in one SQLite file: conversations, their ratings, and the versions.

    DIR/served.db   conversations                 redacted, with the tokens of their answers
                    answers, ratings              as in every file of ratings (`rating_store.py`)
                    versions, uses                each version with its parent, and the ratings (seq) that trained it

    begin ─> training ─> candidate ─> active ─> superseded ─> active (its child was rolled back)
                │            │           └────> rolled_back
                └────────────┴─> rejected (a gate, a checksum or the canary), or stale

Version 0 is the model that was given. It has no row, cannot be rejected, and is active while no other version is.

A version is *stale* if a rating that it was trained on has changed, or its parent was rolled back, before it was
active; its ratings are free. A rating is used up by the version that was trained on it, even if that version
failed, until it is changed; one that is changed and then changed back is free, since a version between them may have
forgotten the answer.

Token ids reveal as much as the text. A conversation in which the redaction found a secret therefore has none: it can be
rated but is not trained on, and `untrainable` says so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rllib_srl.people.rating import TAKEN_BACK, Answer, Rating
from rllib_srl.people.rating_store import RatingStore, utc_now
from rllib_srl.replay.admission import redact
from rllib_srl.storage.database import DatabaseError
from rllib_srl.types import Prompt

Result = TypeVar("Result")

FILE = "served.db"  # in the directory of a served model
SERVED = "served"  # environment id and domain of served answers
HAS_SECRET = "it contains a secret or personal data, so its tokens are not stored"
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
    number INTEGER PRIMARY KEY AUTOINCREMENT, parent INTEGER NOT NULL, state TEXT NOT NULL, changed_at TEXT NOT NULL,
    settings TEXT NOT NULL, metrics TEXT NOT NULL, files TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE uses (
    version INTEGER NOT NULL REFERENCES versions, answer TEXT NOT NULL, value TEXT NOT NULL, rating INTEGER,
    PRIMARY KEY (version, answer)) WITHOUT ROWID;
CREATE INDEX uses_by_answer ON uses (answer, value);
CREATE UNIQUE INDEX one_active ON versions (state) WHERE state = 'active';
CREATE UNIQUE INDEX one_training ON versions (state) WHERE state = 'training';
"""
_OF_CONVERSATION = ("id", "version", "at", "messages", "answer", "finish_reason", "tokens", "untrainable")
_OF_VERSION = ("number", "parent", "state", "changed_at", "settings", "metrics", "files", "reason")
_TODAY = "(SELECT a.id, a.group_id, r.value, r.seq FROM answers a JOIN ratings r ON r.seq = a.newest)"
_FREE = f"""
SELECT t.id, t.value FROM {_TODAY} t
WHERE t.value != '{TAKEN_BACK}' AND NOT EXISTS (
    SELECT 1 FROM uses u JOIN versions v ON v.number = u.version
    WHERE u.answer = t.id AND u.rating = t.seq AND v.state != '{STALE}'
) AND EXISTS (SELECT 1 FROM conversations c WHERE c.id = t.group_id AND c.tokens IS NOT NULL)
ORDER BY t.seq"""
_WITHDRAWN = f"""
SELECT u.answer, u.value FROM uses u JOIN versions v ON v.number = u.version GROUP BY u.answer, u.value
HAVING sum(v.state = '{ROLLED_BACK}') > 0 AND sum(v.state NOT IN ('{ROLLED_BACK}', '{REJECTED}', '{STALE}')) = 0"""
_REMEMBERED = """
WITH RECURSIVE line (number) AS (
    SELECT ? UNION ALL SELECT v.parent FROM versions v JOIN line ON v.number = line.number)
SELECT u.answer, u.value, max(u.version) FROM uses u JOIN line ON u.version = line.number GROUP BY u.answer"""
_SEARCH = f"""
SELECT seq, {", ".join(_OF_CONVERSATION)} FROM conversations
WHERE seq < ? AND (instr(lower(answer), lower(?)) OR EXISTS (
    SELECT 1 FROM json_tree(messages) WHERE key IN ('content', 'name', 'arguments') AND instr(lower(value), lower(?))))
ORDER BY seq DESC LIMIT ?"""


class LineageError(DatabaseError):
    """A version cannot change its state in this way; the message says why."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of an answer as sampled. Invariant: one log-prob for each token of the answer, at least one."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    logps: Sequence[float]  # nats, of the distribution that was sampled

    def errors(self) -> str:
        """Return why the tokens are unusable, "" if they are usable."""
        if not self.prompt_ids or not 0 < len(self.ids) == len(self.logps):
            return f"{len(self.prompt_ids)} prompt tokens, {len(self.ids)} tokens and {len(self.logps)} log-probs"
        return "" if max(self.logps) <= 1e-4 else "a log-prob above 0"


@dataclass(frozen=True)
class Conversation:
    """A request with its answer. Invariant: `tokens` is None exactly if `untrainable` says why."""

    id: str
    version: int  # version of the model that answered; 0 is the initial model
    at: str  # UTC, ISO 8601
    messages: Sequence[Mapping[str, Any]]  # of OpenAI's API, with texts as content
    answer: str
    finish_reason: str  # "stop", "length", or "cut" if the client or the server went away
    tokens: Tokens | None
    untrainable: str = ""

    def as_answer(self) -> Answer:
        """Return what `RatingStore` rates."""
        text = "\n".join(f"{message['role']}: {_text(message)}" for message in self.messages)
        key = Prompt(SERVED, self.id).key
        return Answer(self.id, 0, key, self.id, SERVED, SERVED, self.version, text, self.answer)

    def redacted(self) -> Conversation:
        """Return the conversation without secrets; one that has some loses its tokens."""
        messages, answer = _redacted(self.messages), redact(self.answer)
        if messages == list(self.messages) and answer == self.answer:
            return self
        return replace(self, messages=messages, answer=answer, tokens=None, untrainable=self.untrainable or HAS_SECRET)


@dataclass(frozen=True)
class Version:
    """One trained version. Invariant: `files` has a checksum for each file once it is a candidate."""

    number: int
    parent: int  # 0: the model that was given
    state: str
    changed_at: str  # UTC, ISO 8601
    settings: Mapping[str, Any]
    metrics: Mapping[str, Any]
    files: Mapping[str, str]  # name -> SHA-256 in hex
    reason: str  # reason of its state


class ServedStore(RatingStore):
    """The file of one served model. Invariant: everything in it is redacted; at most one version is active.

    Each method that changes something is one transaction, durable on return. All raise `RatingsError` if the file
    cannot be read or written, and `DiskFull`.
    """

    tables, schema, content = RatingStore.tables + _TABLES, 4, "conversations, ratings and versions"
    _free: tuple[int, dict[str, str]] = (-1, {})  # `num_changes` and free ratings of the last call

    @property
    def num_changes(self) -> int:
        """Return a number that changes whenever this process has changed something."""
        return self._db.total_changes

    # --- conversations -----------------------------------------------------------------------------

    def log(self, conversation: Conversation) -> Conversation:
        """Redact and store a conversation; return the redacted one."""
        redacted = conversation.redacted()
        values = {**vars(redacted), "messages": json.dumps(redacted.messages, ensure_ascii=False)}
        values["tokens"] = None if redacted.tokens is None else json.dumps(vars(redacted.tokens))
        with self._explained(f"logging {redacted.id}"), self._transaction():
            self._insert("conversations", values)
        return redacted

    def find(self, conversation_id: str) -> Conversation | None:
        rows = self._read(f"SELECT {', '.join(_OF_CONVERSATION)} FROM conversations WHERE id = ?", conversation_id)
        return _conversation(rows[0]) if rows else None

    def search(self, text: str, before: int | None, most: int) -> tuple[list[Conversation], int | None]:
        """Return the newest conversations in which a text occurs, and where to continue; None: at the end.

        The text is in a message or the answer; A to Z match a to z. `before` is where an earlier search ended.
        """
        rows = self._read(_SEARCH, 2**62 if before is None else before, text, text, most)
        return [_conversation(row) for _, *row in rows], rows[-1][0] if len(rows) == most else None

    # --- changing versions -------------------------------------------------------------------------

    def begin(self, uses: Mapping[str, str], settings: Mapping[str, Any]) -> Version:
        """Begin a child of the active version on the ratings `uses`, answer id -> value; none is in training."""
        with self._explained("beginning a version"), self._transaction():
            row = {"parent": self._active_number(), "state": TRAINING, "changed_at": utc_now(), "reason": ""}
            row |= {"settings": json.dumps(dict(settings)), "metrics": "{}", "files": "{}"}
            number = self._insert("versions", row)
            used = [(number, answer, value, answer) for answer, value in uses.items()]
            seq = f"(SELECT t.seq FROM {_TODAY} t WHERE t.id = ?)"
            self._db.executemany(f"INSERT INTO uses VALUES (?, ?, ?, {seq})", used)
        return self.version(number)

    def finish(self, number: int, files: Mapping[str, str], metrics: Mapping[str, Any]) -> Version:
        """Make a version in training a candidate, with the checksums of its files."""
        with self._explained("finishing a version"), self._transaction():
            self._change(number, CANDIDATE, "", files=files, metrics=metrics)
        return self.version(number)

    def reject(
        self, number: int, reason: str, metrics: Mapping[str, Any] | None = None, is_stale: bool = False
    ) -> None:
        """Reject a version that is not active; a stale one leaves its ratings free."""
        with self._explained("rejecting a version"), self._transaction():
            about = {} if metrics is None else {"metrics": metrics}
            self._change(number, STALE if is_stale else REJECTED, reason, **about)

    def activate(self, number: int, reason: str = "it passed all gates") -> None:
        """Make a candidate that is a child of the active version the active one, and that one superseded."""
        with self._explained("activating a version"), self._transaction():
            active, parent = self._active_number(), self.version(number).parent
            if parent != active:
                raise LineageError(f"version {number} was trained from version {parent}; active is version {active}")
            if active:
                self._change(active, SUPERSEDED, f"version {number} follows")
            self._change(number, ACTIVE, reason)

    def roll_back(self, reason: str) -> dict[str, Any]:
        """Roll the active version back to its parent; a version being trained from it becomes stale.

        Returns:
            `rolled_back`, `active`: numbers of both; `withdrawn_ratings`: ids of answers whose ratings only the first
            had used.

        Raises:
            LineageError: no trained version is active.
        """
        with self._explained("rolling back"), self._transaction():
            active = self._active_number()
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

    def version(self, number: int) -> Version:
        """Return a version; LineageError: there is none with this number."""
        versions = self._versions("WHERE number = ?", number)
        if not versions:
            raise LineageError(f"version = {number}; expected one that srl versions lists")
        return versions[0]

    def versions(self) -> list[Version]:
        """Return all versions, the oldest first."""
        return self._versions("ORDER BY number")

    def in_state(self, state: str) -> list[Version]:
        """Return the versions in a state; at most one is active, and one in training."""
        return self._versions("WHERE state = ?", state)

    def active(self) -> Version | None:
        """Return the active version; None: the model that was given."""
        return next(iter(self.in_state(ACTIVE)), None)

    def in_training(self) -> Version | None:
        return next(iter(self.in_state(TRAINING)), None)

    def rows(self) -> list[dict[str, Any]]:
        """Return all versions with the number of their ratings, and of those that were withdrawn."""
        used = dict(self._read("SELECT version, count(*) FROM uses GROUP BY version"))
        query = f"SELECT u.version, count(*) FROM uses u JOIN ({_WITHDRAWN}) w USING (answer, value) GROUP BY u.version"
        gone = dict(self._read(query))
        return [
            {**vars(row), "num_ratings": used.get(row.number, 0), "num_withdrawn_ratings": gone.get(row.number, 0)}
            for row in self.versions()
        ]

    # --- ratings of versions -----------------------------------------------------------------------

    def free_ratings(self) -> dict[str, str]:
        """Return the ratings that can be trained on and are not used up: answer id -> value, in their order.

        They are read again only after a change, because training asks all the time.
        """
        if self._free[0] != (now := self.num_changes):
            self._free = (now, dict(self._read(_FREE)))
        return dict(self._free[1])

    def uses(self, number: int) -> dict[str, str]:
        """Return the ratings that a version was trained on: answer id -> value."""
        return dict(self._read("SELECT answer, value FROM uses WHERE version = ? ORDER BY answer", number))

    def remembered(self, number: int) -> dict[str, str]:
        """Return the ratings that a version and its ancestors were trained on, the newest use of each: id -> value."""
        return {answer: value for answer, value, _ in self._read(_REMEMBERED, number)}

    def changed(self, uses: Mapping[str, str]) -> list[str]:
        """Return the ids of those answers whose rating has changed since."""
        today = dict(self._read(f"SELECT id, value FROM {_TODAY}"))
        return [answer for answer, value in uses.items() if today.get(answer, value) != value]

    def rated(self, number: int) -> list[tuple[Conversation, Rating]]:
        """Return the conversations that a version is trained on, with their current ratings."""
        pairs = [(self.find(answer.rpartition("/")[0]), self.of_answer(answer)) for answer in self.uses(number)]
        return [(talk, rating) for talk, rating in pairs if talk and talk.tokens and rating and rating.is_given]

    # --- rows --------------------------------------------------------------------------------------

    def _active_number(self) -> int:
        active = self.active()
        return active.number if active else 0

    def _change(self, number: int, state: str, reason: str, **about: Mapping[str, Any]) -> None:
        """Set the state of a version, and columns that hold JSON."""
        before = self.version(number).state
        if state not in _AFTER[before]:
            after = " or ".join(_AFTER[before]) or "nothing else"
            raise LineageError(f"version {number} is {before}; it can become {after}, not {state}")
        values = {"state": state, "changed_at": utc_now(), "reason": reason}
        values |= {name: json.dumps(dict(value)) for name, value in about.items()}
        columns = ", ".join(f"{name} = ?" for name in values)
        self._db.execute(f"UPDATE versions SET {columns} WHERE number = ?", (*values.values(), number))

    def _versions(self, clause: str, *values: Any) -> list[Version]:
        rows = self._read(f"SELECT {', '.join(_OF_VERSION)} FROM versions {clause}", *values)
        named = [dict(zip(_OF_VERSION, row, strict=True)) for row in rows]
        of_json = ("settings", "metrics", "files")
        return [Version(**row | {name: json.loads(row[name]) for name in of_json}) for row in named]


class StoreThread:
    """An open store in its own thread, so that the event loop never waits for a disk.

    `await db.run(db.store.find, "chatcmpl-...")`. Invariant: methods of `store` are called only in this thread.
    """

    def __init__(self, directory: Path, scheme: str = "") -> None:
        """Open the store of a served model's directory, as `RatingStore` does."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            self.store = self._thread.submit(ServedStore, directory / FILE, scheme).result()
        except BaseException:
            self._thread.shutdown()
            raise

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments))

    def close(self) -> None:
        """Close the store after the calls that are pending."""
        self._thread.submit(self.store.close).result()
        self._thread.shutdown()


def _text(message: Mapping[str, Any]) -> str:
    """Return the content of a message with the calls in it."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [f"{function['name']} {function['arguments']}" for function in functions]
    return "\n".join(filter(None, [message.get("content"), *calls]))


def _redacted(value: Any) -> Any:
    """Return a JSON value with all its texts redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: _redacted(one) for name, one in value.items()}
    return [_redacted(one) for one in value] if isinstance(value, Sequence) else value


def _conversation(values: Sequence[Any]) -> Conversation:
    row = dict(zip(_OF_CONVERSATION, values, strict=True))
    tokens = None if row["tokens"] is None else Tokens(**json.loads(row["tokens"]))
    return Conversation(**row | {"messages": json.loads(row["messages"]), "tokens": tokens})
