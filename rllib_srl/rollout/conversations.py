"""The conversations of one episode, recorded token for token: which one a call continues, and the tokens it gets.

An ordinary environment adds an observation to the one conversation of its episode. An agent calls the policy with a
whole conversation, as in OpenAI's API, and may hold several in one episode:

    recorded                     a call                            is
    [s, u1, a1]                  [s, u1, a1, u2]                   continued: the tokens so far, then those of u2
    [s, u1, a1, u2, a2]          [s, u1, a1, u2] or [.., a1, u3]   forked after a1: its tokens so far, then the rest
    [s, u1, a1]                  [s, u1, a1', u2], a1' not a1      new: the policy did not write a1'
    [s, u1, a1]                  [s, v1]                           new

Messages are compared with those that were sent and returned. Tokens that were sampled are never tokenised again: a
continued or forked conversation starts with them as they are. A new one is tokenised as a whole, and none of its
messages is trained on. In a fork the earlier tokens are context: they are trained on once, in their own conversation.

A call *rewrites* history if it begins with everything that preceded the first answer of a recorded conversation, goes
on, and neither contains nor repeats all of it. Such a call is split off as above, or refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pydantic
from pydantic import ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError

from rllib_srl.rollout.transcript import Message, Transcript

if TYPE_CHECKING:
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    from rllib_srl.engine.protocol import Turn

TOO_LONG, REWRITTEN, OUT_OF_CALLS, UNSUPPORTED = (
    "context_length_exceeded", "history_rewritten", "out_of_calls", "unsupported"
)  # fmt: skip


def _message(message: Any) -> Message:
    if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
        raise ValueError("expected a message with role and content as text")
    return message


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Ask:
    """One call of an agent: a conversation to continue. Invariant: every message has `role` and a text `content`."""

    messages: Annotated[list[Annotated[Message, PlainValidator(_message)]], Field(min_length=1)]
    tools: str = ""  # JSON of the tool schemas; empty if none
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    refuses_rewriting: bool = False
    template: str = ""  # JSON of further arguments of the chat template; empty if none

    @classmethod
    def read(cls, text: str) -> Ask:
        """Return the call that an environment wrote as JSON, the fields of this class; ValueError: it is another."""
        try:
            return _ASK.validate_json(text)
        except ValidationError as error:
            errors = (f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
            raise ValueError(f'info["conversation"] is not valid: {"; ".join(errors)}') from error


_ASK = TypeAdapter(Ask)


class AskRefusedError(ValueError):
    """A call that gets no turn; `code` is one of the constants of this module."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


@dataclass
class _Conversation:
    """One recorded conversation. Invariant: `stream` ends with a turn, and `keys[answers[n]]` is the n-th answer."""

    tools: str
    keys: list[str] = field(default_factory=list)  # see `_key`
    answers: list[int] = field(default_factory=list)  # which messages the policy wrote in it
    ends: list[int] = field(default_factory=list)  # length of `stream` after each of them
    stream: list[int] = field(default_factory=list)
    steps: list[tuple[list[int], Turn]] = field(default_factory=list)  # tokens that were given, then the turn
    text: list[tuple[str, str]] = field(default_factory=list)  # as `LiveEpisode.text`

    def shares(self, keys: Sequence[str]) -> int:
        """Return how many messages at the start are equal."""
        pairs = enumerate(zip(self.keys, keys, strict=False))
        return next((n for n, (key, other) in pairs if key != other), min(len(self.keys), len(keys)))

    def is_rewritten_by(self, keys: Sequence[str], tools: str) -> bool:
        """Return whether a call contains all that preceded the first answer, and continues in another way."""
        shared, opening = self.shares(keys), self.answers[0]
        goes_on = shared >= opening and len(keys) > opening
        is_kept = shared == len(self.keys) or (shared == len(keys) and shared in self.answers)  # whole or sampled again
        return goes_on and not (is_kept and tools == self.tools)


@dataclass
class _Open:
    """A call that is being answered."""

    conversation: _Conversation
    keys: list[str]
    tokens: list[int]  # before the next turn, without what the conversation has
    text: str  # the new messages, for people
    turn: Turn | None = None


class Conversations:
    """All conversations of one episode.

    Invariant: only turns whose answers reached the agent are recorded, each once.
    """

    def __init__(self, transcript: Transcript, max_tokens: int) -> None:
        """Begin an episode, whose conversations have at most `max_tokens` tokens each, answers included."""
        self._transcript, self._max_tokens = transcript, max_tokens
        self._all: list[_Conversation] = []
        self._open: _Open | None = None
        self.num_rewritten = self.num_unheard = 0

    def open(self, ask: Ask) -> list[int]:
        """Return the tokens after which the policy writes its next turn.

        Raises:
            AskRefusedError: the call is too long, rewrites history and may not, or the chat template does not support
                it.
        """
        keys = [_key(message) for message in ask.messages]
        same_tools = [record for record in self._all if record.tools == ask.tools]
        conversation = next((record for record in same_tools if record.shares(keys) == len(record.keys)), None)
        if conversation is None and any(record.is_rewritten_by(keys, ask.tools) for record in self._all):
            if ask.refuses_rewriting:
                raise AskRefusedError(
                    REWRITTEN, "the messages change an earlier part of a conversation of this episode; expected its "
                    "messages as they were sent and answered, or history = 'split'"
                )  # fmt: skip
            self.num_rewritten += 1
        try:
            opened = self._continued(conversation, keys, ask) if conversation else self._new(same_tools, keys, ask)
        except Exception as error:  # templates may raise anything to refuse a conversation
            raise AskRefusedError(UNSUPPORTED, " ".join(str(error).split())[:500]) from error
        prompt = opened.conversation.stream + opened.tokens
        if not 0 < len(prompt) < self._max_tokens:
            # Clients recognise a limit by these words.
            beyond = ", which exceeds the model's context length" if prompt else ""
            raise AskRefusedError(
                TOO_LONG, f"the conversation has {len(prompt)} tokens{beyond}; expected 1 to {self._max_tokens - 1}, "
                f"so that a turn fits max_episode_tokens = {self._max_tokens}"
            )  # fmt: skip
        self._open = opened
        return prompt

    def _continued(self, conversation: _Conversation, keys: list[str], ask: Ask) -> _Open:
        added = ask.messages[len(conversation.keys) :]
        return _Open(
            conversation, keys, self._transcript.more(added, conversation.stream[-1], ask.template), _shown(added)
        )

    def _new(self, others: Sequence[_Conversation], keys: list[str], ask: Ask) -> _Open:
        """Fork the conversation of which the call contains the most answers, or begin a new one."""
        candidates = [(sum(at < record.shares(keys) for at in record.answers), record) for record in others]
        num_answers, source = max(candidates, key=lambda pair: pair[0], default=(0, None))
        if not num_answers or source is None:
            ids = self._transcript.whole(ask.messages, ask.tools, ask.template)
            return _Open(_Conversation(ask.tools), keys, ids, _shown(ask.messages))
        earlier = source.stream[: source.ends[num_answers - 1]]
        added = ask.messages[source.answers[num_answers - 1] + 1 :]
        ids = earlier + self._transcript.more(added, earlier[-1], ask.template)
        return _Open(_Conversation(ask.tools), keys, ids, _shown(ask.messages))

    def add(self, turn: Turn) -> None:
        """Add the turn that answers the open call; `answered` records it."""
        assert self._open is not None
        self._open.turn = turn

    def answered(self, message: str) -> None:
        """Close the open call with the JSON of the message that the agent got; "": it got none, no turn is recorded."""
        opened, self._open = self._open, None
        if opened is None or opened.turn is None or not message:
            self.num_unheard += opened is not None and opened.turn is not None
            return
        conversation, turn = opened.conversation, opened.turn
        if not conversation.steps:
            self._all.append(conversation)
        conversation.keys = [*opened.keys, _key(json.loads(message))]
        conversation.answers.append(len(opened.keys))
        conversation.stream = conversation.stream + opened.tokens + turn.token_ids.tolist()
        conversation.ends.append(len(conversation.stream))
        conversation.steps.append((opened.tokens, turn))
        conversation.text += [("environment", opened.text), ("policy", turn.text)]

    @property
    def num_turns(self) -> int:
        return sum(len(record.steps) for record in self._all)

    @property
    def num_conversations(self) -> int:
        """The number of conversations with a recorded turn."""
        return len(self._all)

    @property
    def text(self) -> list[tuple[str, str]]:
        """Return the text of all conversations, in the order in which they began."""
        return [line for record in self._all for line in record.text]

    def write(self, episode: SingleAgentEpisode, reward: float, info: Mapping[str, Any]) -> tuple[int, ...]:
        """Write all recorded turns into an episode without a reset, one conversation after the other.

        The tokens that a turn was given are its observation; reward and info of the episode are those of the last turn.
        Return where the conversations begin in the episode's stream; see `Group.starts`.
        """
        steps = [step for record in self._all for step in record.steps]
        episode.add_env_reset(np.array(steps[0][0] if steps else [], np.int32), {})
        for n, (_, turn) in enumerate(steps):
            is_last = n + 1 == len(steps)
            episode.add_env_step(
                np.array([] if is_last else steps[n + 1][0], np.int32),
                turn.token_ids,
                reward if is_last else 0.0,
                dict(info) if is_last else {},
                extra_model_outputs={"action_logp": turn.logp},
            )
        lengths = [len(record.stream) for record in self._all]
        return tuple(int(start) for start in np.cumsum([0, *lengths[:-1]])) if lengths else (0,)


def _key(message: Message) -> str:
    """Return a text that is equal for messages that mean the same: names without a value do not count.

    Nor does a thought that a client keeps apart, because the recorded answers have none.
    """
    fields = {
        name: value for name, value in message.items() if value not in (None, [], "") and name != "reasoning_content"
    }
    return json.dumps(fields, sort_keys=True)


def _shown(messages: Sequence[Message]) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

