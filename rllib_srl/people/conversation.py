"""A conversation with a served model: question and answer, and the tokens to train on.

Token ids reveal as much as the text. A conversation in which the redaction found a secret therefore has none: it can be
rated but is not trained on, and `untrainable` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rllib_srl.people.rating import Answer
from rllib_srl.replay.admission import redact
from rllib_srl.types import Prompt

SERVED = "served"  # environment id and domain of served answers
HAS_SECRET = "it contains a secret or personal data, so its tokens are not stored"


@dataclass(frozen=True)
class Tokens:
    """The tokens of an answer as sampled. Invariant: one log-prob for each token of the answer, at least one."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    logps: Sequence[float]  # nats, of the distribution that was sampled

    def faults(self) -> str:
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

    def redacted(self) -> Conversation:
        """Return the conversation without secrets; one that has some loses its tokens."""
        messages = [{**one, "content": redact(str(one.get("content") or ""))} for one in self.messages]
        answer = redact(self.answer)
        pairs = zip(messages, self.messages, strict=True)
        if answer == self.answer and all(a["content"] == str(b.get("content") or "") for a, b in pairs):
            return replace(self, messages=messages)
        return replace(self, messages=messages, answer=answer, tokens=None, untrainable=self.untrainable or HAS_SECRET)
