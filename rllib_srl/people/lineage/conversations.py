"""Log the conversations of a served model: what was asked and answered, and the tokens to train on.

    store.log(conversation)            durable when it returns; texts are redacted here, whoever calls
    store.find("chatcmpl-...")         one conversation, None if there is none
    store.search("fruit", None, 20, 1) the newest ones with a text

Token ids say as much as the text. A conversation in which the redaction found a secret is stored without them, so it
can be rated and is not trained on; `untrainable` says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rllib_srl.people.rating import Answer
from rllib_srl.replay.admission import redact
from rllib_srl.storage.private_database import PrivateDatabase
from rllib_srl.types import Prompt

CONVERSATIONS = "conversations.db"  # in the directory of a served model
SERVED = "served"  # environment id and domain of served answers
HAS_SECRET = "it contains a secret or personal data, so its tokens are not stored"
_TABLES = """
CREATE TABLE conversations (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, version INTEGER NOT NULL, at TEXT NOT NULL,
    messages TEXT NOT NULL, answer TEXT NOT NULL, finish_reason TEXT NOT NULL, tokens TEXT, untrainable TEXT NOT NULL);
"""
_AT_ONCE = 100  # conversations that a search reads at once
_COLUMNS = ("id", "version", "at", "messages", "answer", "finish_reason", "tokens", "untrainable")


class ConversationsError(RuntimeError):
    """The log of conversations cannot be read or written; the message names the file and what to do."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of an answer as sampled. Invariant: one log-prob for each token of the answer, at least one."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    logps: Sequence[float]  # nats, of the distribution that was sampled

    def faults(self) -> str:
        """Return what makes them unusable, "" if nothing does."""
        if not self.prompt_ids or not 0 < len(self.ids) == len(self.logps):
            return f"{len(self.prompt_ids)} prompt tokens, {len(self.ids)} tokens and {len(self.logps)} log-probs"
        return "" if max(self.logps) <= 1e-4 else "a log-prob above 0"


@dataclass(frozen=True)
class Conversation:
    """A request with its answer. Invariant: `tokens` is None exactly if `untrainable` says why."""

    id: str
    version: int  # of the model that answered; 0 is the model that was given
    at: str  # UTC, ISO 8601
    messages: Sequence[Mapping[str, Any]]
    answer: str
    finish_reason: str  # "stop", "length", or "cut" if the client or the server went away
    tokens: Tokens | None
    untrainable: str = ""

    def as_answer(self) -> Answer:
        """Return what `RatingStore` rates."""
        said = "\n".join(f"{one['role']}: {one['content']}" for one in self.messages)
        key = Prompt(SERVED, self.id).key
        return Answer(self.id, 0, key, self.id, SERVED, SERVED, self.version, said, self.answer)


def redacted(conversation: Conversation) -> Conversation:
    """Return the conversation without secrets; one that has some loses its tokens."""
    messages = [{**one, "content": redact(str(one.get("content") or ""))} for one in conversation.messages]
    answer = redact(conversation.answer)
    pairs = zip(messages, conversation.messages, strict=True)
    has_any = answer != conversation.answer or any(a["content"] != str(b.get("content") or "") for a, b in pairs)
    without = {"tokens": None, "untrainable": conversation.untrainable or HAS_SECRET} if has_any else {}
    return replace(conversation, messages=messages, answer=answer, **without)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Hits:
    """Conversations that a search has found, the newest first."""

    conversations: Sequence[Conversation]
    before: int | None  # where the search goes on; None: at the end
    is_cut: bool  # it stopped for its time


class ConversationStore(PrivateDatabase):
    """The conversations of one served model. Invariant: nothing in it was left unredacted."""

    tables, content, error = _TABLES, "conversations", ConversationsError

    def __enter__(self) -> ConversationStore:
        return self

    def log(self, conversation: Conversation) -> Conversation:
        """Store a conversation, redacted, and return it so; it is durable on return.

        Raises:
            ConversationsError: nothing was stored.
            DiskFull: likewise.
        """
        one = redacted(conversation)
        values = {**vars(one), "messages": json.dumps(one.messages, ensure_ascii=False)}
        values["tokens"] = None if one.tokens is None else json.dumps(vars(one.tokens))
        marks = ", ".join("?" * len(_COLUMNS))
        insert = f"INSERT INTO conversations ({', '.join(_COLUMNS)}) VALUES ({marks})"
        with self._explained(f"logging {one.id}"), self._transaction():
            self._db.execute(insert, [values[name] for name in _COLUMNS])
        return one

    def find(self, conversation_id: str) -> Conversation | None:
        """Return a conversation, None if there is none with this id."""
        return next(iter(self._selected("WHERE id = ?", conversation_id)), None)

    def num(self) -> int:
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
        where = "WHERE ? IS NULL OR seq < ? ORDER BY seq DESC LIMIT ?"
        while rows := self._read(f"SELECT seq, {', '.join(_COLUMNS)} FROM conversations {where}", at, at, _AT_ONCE):
            for at, *row in rows:
                one = _conversation(dict(zip(_COLUMNS, row, strict=True)))
                said = [str(message["content"]) for message in one.messages]
                if any(wanted in part.casefold() for part in (*said, one.answer)):
                    found.append(one)
                    if len(found) == most:
                        return Hits(found, at, False)
            if time.monotonic() > deadline:
                return Hits(found, at, True)
        return Hits(found, None, False)

    def trainable(self, ids: Sequence[str]) -> list[Conversation]:
        """Return those of some conversations that have tokens, in the order of `ids`."""
        return [one for name in ids for one in self._selected("WHERE id = ? AND tokens IS NOT NULL", name)]

    def trainable_ids(self, before: str) -> list[str]:
        """Return the ids of the conversations with tokens, up to a time (UTC, ISO 8601), the oldest first."""
        rows = self._read("SELECT id FROM conversations WHERE tokens IS NOT NULL AND at <= ? ORDER BY seq", before)
        return [name for (name,) in rows]

    def is_untrainable(self, conversation_id: str) -> bool:
        """Return whether there is such a conversation, and it has no tokens."""
        return bool(self._read("SELECT 1 FROM conversations WHERE id = ? AND tokens IS NULL", conversation_id))

    def _selected(self, rest: str, *values: Any) -> list[Conversation]:
        rows = self._read(f"SELECT {', '.join(_COLUMNS)} FROM conversations {rest}", *values)
        return [_conversation(dict(zip(_COLUMNS, row, strict=True))) for row in rows]


def _conversation(row: dict[str, Any]) -> Conversation:
    tokens = None if row["tokens"] is None else Tokens(**json.loads(row["tokens"]))
    return Conversation(**{**row, "messages": json.loads(row["messages"]), "tokens": tokens})
