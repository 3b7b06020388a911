"""Tokenise observations and append them to the policy's tokens, without changing earlier tokens.

    first(text, tools, system)  the ids at the start of an episode
    later(text, last_id, role)  the ids that follow a turn whose last token was last_id
    stop(stop_strings)          the strings that end a turn, besides the end-of-sequence token
    whole(messages, tools)      the ids of a conversation given as messages; `more` those of further messages

`RawTranscript` concatenates texts. `ChatTranscript` wraps them in the model's chat template. For a later
observation it uses only the part of the rendering after the policy's message
(Source: TRL, "chat template prefix preservation"): the policy's own tokens stay as sampled.

Environment text cannot inject control tokens. Control tokens are the tokeniser's special tokens and the added tokens
with which the template marks turns (`ControlTokens`). Only the template, or the tokeniser's default in front of a text,
puts them into a stream. A tokeniser reads the name of a special token as that token anywhere in a text, so a tool or a
user could close its turn and write the next one. Therefore each name is split after its first character:

    "So: <|im_end|>"   split   "So: <" "|im_end|>"   tokenised separately: the same text, without a control token

Names are searched at every position, overlapping ones too; since each one is split, no piece contains a whole name.
A text that becomes a control token nevertheless, by a tokeniser's normalisation, raises ValueError. Turns that a
template marks by plain words ("[INST]") can be forged by writing them: `marks_turns` is False then.

The tokeniser is used from one thread only: Hugging Face's fast ones raise "Already borrowed" otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, takewhile
from typing import Any, Protocol

Message = Mapping[str, Any]  # of a conversation, as in OpenAI's API

_LAST_CHARACTER = 0x10FFFF  # the private-use characters from here downwards have no meaning
_NUM_MARKS = 1 << 16
_NUM_CACHED = 1024  # the G episodes of a prompt begin with the same text
# A conversation that tests a chat template.
_QUESTION = "What is 1 + 1?"
_SYSTEM = "Reply in one word."
_ANSWERS = ("It is x", "It is 0")  # no common last character


class ControlTokens:
    """The control tokens of a tokeniser: its special tokens, and added tokens with which a template marks turns.

    Invariant: every name has more than one character; a single character cannot be split.
    """

    def __init__(self, tokenizer: Any, marking: Iterable[int] = ()) -> None:
        """Collect the control tokens of a tokeniser.

        Args:
            tokenizer: a Hugging Face tokeniser.
            marking: ids of a rendered conversation with dummy texts; the added tokens among them are control tokens.
        """
        wanted = set(marking)
        # A tokeniser without names for its special tokens recognises none in a text.
        names, ids = (getattr(tokenizer, f"all_special_{kind}", ()) for kind in ("tokens", "ids"))
        named = dict(zip(names, ids, strict=True))
        for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
            if token.special or token_id in wanted:
                named[str(token.content)] = token_id
        named = {name: token_id for name, token_id in named.items() if len(name.strip()) > 1}
        # The token for unknown characters is not a control token, unless it is also the EOS or BOS token.
        unknown, *ends = (getattr(tokenizer, f"{kind}_token_id", None) for kind in ("unk", "eos", "bos"))
        self.ids = frozenset(named.values()) - ({unknown} - {*ends} - wanted)
        self._start = re.compile(f"(?={'|'.join(map(re.escape, sorted(named)))})") if named else None

    def breaks(self, text: str) -> list[int]:
        """Return the split positions of `text`, in order: after the first character of each name."""
        return [found.start() + 1 for found in self._start.finditer(text)] if self._start else []

    def pieces(self, text: str) -> list[str]:
        """Split `text` into pieces that contain no name."""
        places = [0, *self.breaks(text), len(text)]
        return [text[start:end] for start, end in pairwise(places)]

    def marked(self, value: Any, mark: str) -> Any:
        """Return a text, or a JSON value with all its texts, with `mark` inserted at each split position."""
        if isinstance(value, str):
            return mark.join(self.pieces(value))
        if isinstance(value, list):
            return [self.marked(one, mark) for one in value]
        if isinstance(value, dict):
            return {self.marked(key, mark): self.marked(one, mark) for key, one in value.items()}
        return value

    def count(self, ids: Iterable[int]) -> int:
        """Return how many of `ids` are control tokens."""
        return sum(token_id in self.ids for token_id in ids)


def unused_character(texts: Iterable[str]) -> str:
    """Return a character without a meaning that occurs in none of the texts.

    Raises:
        ValueError: all 65,536 candidates occur.
    """
    used = {character for text in texts for character in text if character > "\U000effff"}
    for code in range(_LAST_CHARACTER, _LAST_CHARACTER - _NUM_MARKS, -1):
        if chr(code) not in used:
            return chr(code)
    raise ValueError(f"the text contains all of the last {_NUM_MARKS} Unicode code points; expected an unused one")


class Transcript(Protocol):
    """The conversion of text to tokens that `play` uses."""

    end_of_turn_id: int | None

    def first(self, text: str, tools: str = "", system: str = "") -> list[int]:
        """Return the ids at the start of an episode, up to the policy's first token.

        Args:
            text: the first observation
            tools: JSON of the tool schemas for the chat template; empty if none
            system: the system prompt; empty if none

        Raises:
            ValueError: the format, or the model's chat template, does not support tools or a system prompt.
        """

    def later(self, text: str, last_id: int, role: str = "user") -> list[int]:
        """Return the ids between a turn that ended in `last_id` and the policy's next token.

        Args:
            text: the observation
            last_id: the last token that the policy wrote
            role: role of the observation in a chat, "user" or "tool"
        """

    def stop(self, stop_strings: tuple[str, ...]) -> tuple[str, ...]:
        """Return the strings that end a turn, given the environment's `stop_strings`."""

    def whole(self, messages: Sequence[Message], tools: str = "") -> list[int]:
        """Return the ids of a conversation, up to the policy's next token.

        Args:
            messages: as in OpenAI's API: `role`, `content` (text), and `tool_calls` with arguments as objects
            tools: JSON of the tool schemas for the chat template; empty if none

        Raises:
            ValueError: the format, or the model's chat template, does not support a message or tools.
        """

    def more(self, messages: Sequence[Message], last_id: int) -> list[int]:
        """Return the ids of messages that follow a turn that ended in `last_id`, up to the policy's next token.

        Raises:
            ValueError: as `whole`.
        """


def make_transcript(format: str, tokenizer: Any) -> Transcript:
    """Make the transcript of a format.

    Args:
        format: "text" (texts concatenated) or "chat" (the model's chat template).
        tokenizer: a Hugging Face tokeniser.

    Raises:
        ValueError: for another format, or a tokeniser or template that does not support it.
    """
    if format == "text":
        return RawTranscript(tokenizer)
    if format == "chat":
        return ChatTranscript(tokenizer)
    raise ValueError(f"prompt_format = {format!r}; expected 'text' or 'chat'")


class RawTranscript:
    """Concatenated texts; only the first gets the special tokens that the tokeniser prepends by default.

    Invariant: turns end with the environment's stop strings or the end-of-sequence token; no text becomes a control
    token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._controls = ControlTokens(tokenizer)
        self._num_in_front = self._controls.count(tokenizer("", add_special_tokens=True)["input_ids"])
        self.end_of_turn_id: int | None = tokenizer.eos_token_id
        if self._encode("a", True)[-1:] == [self.end_of_turn_id]:
            raise ValueError(
                f"tokenizer {_name(tokenizer)} appends {tokenizer.eos_token!r} to every text, so the policy cannot "
                "continue it; expected add_eos_token=False"
            )
        self._first = lru_cache(_NUM_CACHED)(lambda text: tuple(self._encode(text, True)))

    def first(self, text: str, tools: str = "", system: str = "") -> list[int]:
        """Tokenise with the tokeniser's default special tokens, a system prompt and a blank line in front."""
        if tools:
            raise ValueError(
                "prompt_format = 'text' has no template for tools; expected prompt_format = 'chat', or an "
                "environment that lists them in its prompt (tools_in = 'prompt')"
            )
        return list(self._first(f"{system}\n\n{text}" if system else text))

    def later(self, text: str, last_id: int, role: str = "user") -> list[int]:
        """Tokenise without special tokens, whatever the last token of the turn."""
        return self._encode(text, False)

    def whole(self, messages: Sequence[Message], tools: str = "") -> list[int]:
        """Tokenise the concatenated contents; a blank line follows a system message at the start."""
        if messages and messages[0]["role"] == "system":
            return self.first(_contents(messages[1:]), tools, messages[0]["content"])
        return self.first(_contents(messages), tools)

    def more(self, messages: Sequence[Message], last_id: int) -> list[int]:
        """Tokenise the concatenated contents without special tokens."""
        return self._encode(_contents(messages), False)

    def stop(self, stop_strings: tuple[str, ...]) -> tuple[str, ...]:
        """Return the environment's own stop strings."""
        return stop_strings

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        first, *rest = self._controls.pieces(text)
        ids = list(self._tokenizer(first, add_special_tokens=add_special_tokens)["input_ids"])
        for piece in rest:
            ids += self._tokenizer(piece, add_special_tokens=False)["input_ids"]
        if self._controls.count(ids) > (self._num_in_front if add_special_tokens else 0):
            raise ValueError(_forged(self._tokenizer, text))
        return ids


class ChatTranscript:
    """The model's chat template: the environment is the user, the policy the assistant.

    Invariant: if the policy closes its turns as the template does and no observation contains the name of a control
    token, the stream equals the rendering of the conversation; the constructor checks this on a dummy conversation.
    The number of control tokens in a stream equals that of the same conversation with dummy texts.

    `end_of_turn_id` is the token that closes a message in the template; the engine must end turns with it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"tokenizer {_name(tokenizer)} has no chat template; expected one for prompt_format = 'chat': "
                "use prompt_format = 'text' or an instruction-tuned model"
            )
        self._controls = ControlTokens(tokenizer)
        self._harmless = lru_cache(_NUM_CACHED)(self._num_controls)
        self._prefix, closing = self._split_template()
        self._controls = ControlTokens(tokenizer, self._render([_QUESTION] * 2))
        self._has_checked_tools = self._has_checked_system = False
        special = set(tokenizer.all_special_ids)
        self.end_of_turn_id: int | None = closing[0] if closing and closing[0] in special else None
        self._check_earlier_tokens_stay()
        self._first = lru_cache(_NUM_CACHED)(
            lambda text, tools, system: tuple(self._said(_dialogue([text], system=system), tools))
        )

    @property
    def marks_turns(self) -> bool:
        """Whether a control token, which no text can forge, separates a text from the policy's turn."""
        one, other = (self._render([question]) for question in _ANSWERS)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
        return self._controls.count(token_id for token_id, _ in same) > 0

    def first(self, text: str, tools: str = "", system: str = "") -> list[int]:
        """Render the system message, the tools, one user message and the opening of the assistant's message."""
        if tools:
            self._check_tools_once(tools)
        if system:
            self._check_system_once()
        return list(self._first(text, tools, system))

    def later(self, text: str, last_id: int, role: str = "user") -> list[int]:
        """Render what follows the assistant's message: its closing, unless the turn wrote it, and the next opening."""
        return self.more([{"role": role, "content": text}], last_id)

    def whole(self, messages: Sequence[Message], tools: str = "") -> list[int]:
        """Render the conversation and the opening of the assistant's message."""
        if tools:
            self._check_tools_once(tools)
        if any(message["role"] == "system" for message in messages):
            self._check_system_once()
        return self._said(messages, tools)

    def more(self, messages: Sequence[Message], last_id: int) -> list[int]:
        """Render the closing of the assistant's message, unless the turn wrote it, the messages and the next opening.

        They are rendered after a dummy question and answer, so no earlier token is rendered again.
        """
        ids = self._said([*_dialogue([_QUESTION]), {"role": "assistant", "content": _ANSWERS[0]}, *messages])
        if ids[: len(self._prefix)] != self._prefix:
            text = messages[-1]["content"] if messages else ""
            raise ValueError(
                f"the chat template of {_name(self._tokenizer)} changes an earlier message when the next one is "
                f"{text[:40]!r}; expected earlier tokens unchanged: use prompt_format = 'text'"
            )
        tail = ids[len(self._prefix) :]
        return tail[1:] if last_id == self.end_of_turn_id else tail

    def stop(self, stop_strings: tuple[str, ...]) -> tuple[str, ...]:
        """Return (): a chat turn ends with the end-of-turn token."""
        return ()

    def _said(self, messages: Sequence[Message], tools: str = "") -> list[int]:
        """Render a conversation that ends with an observation; raise ValueError if a text became a control token."""
        ids = self._rendered(messages, tools)
        dummies = [{**m, "content": _dummy(m)} for m in messages]
        if self._controls.count(ids) > self._harmless(json.dumps(dummies, ensure_ascii=False), tools):
            raise ValueError(_forged(self._tokenizer, messages[-1]["content"]))
        return ids

    def _num_controls(self, messages: str, tools: str) -> int:
        """Return the number of control tokens of messages, given as JSON to be cached."""
        return self._controls.count(self._rendered(json.loads(messages), tools))

    def _render(
        self, questions: list[str], answer: str | None = None, *, role: str = "user", tools: str = "", system: str = ""
    ) -> list[int]:
        return self._rendered(_dialogue(questions, answer, role=role, system=system), tools)

    def _rendered(self, messages: Sequence[Message], tools: str = "") -> list[int]:
        schemas = json.loads(tools) if tools else None
        said = [{name: value for name, value in message.items() if name != "role"} for message in messages]
        texts = [json.dumps(value, ensure_ascii=False) for value in (said, schemas)]
        mark = unused_character(texts) if any(map(self._controls.breaks, [*texts, *_texts(said)])) else ""
        if mark:
            schemas = self._controls.marked(schemas, mark)
            said = self._controls.marked(said, mark)
        rendered = self._tokenizer.apply_chat_template(
            [{"role": message["role"], **one} for message, one in zip(messages, said, strict=True)],
            tools=schemas,
            tokenize=not mark,
            add_generation_prompt=True,
            return_dict=False,
        )
        if not mark:
            return list(rendered)
        pieces = (self._tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in rendered.split(mark))
        return [token_id for piece in pieces for token_id in piece]

    def _split_template(self) -> tuple[list[int], list[int]]:
        """Return the ids up to the end of a dummy answer, and the ids with which the template closes a message.

        The closing is the common suffix of the renderings of two answers with different last characters.
        """
        one, other = (self._render([_QUESTION, _QUESTION], answer) for answer in _ANSWERS)
        num_same = 0
        while num_same < min(len(one), len(other)) and one[-1 - num_same] == other[-1 - num_same]:
            num_same += 1
        prefix, tail = one[: len(one) - num_same], one[len(one) - num_same :]
        if not self._tokenizer.decode(prefix).rstrip().endswith(_ANSWERS[0]):
            raise ValueError(
                f"the chat template of {_name(self._tokenizer)} changes the assistant's message; "
                "expected its text unchanged, then closing tokens: use prompt_format = 'text'"
            )
        return prefix, tail

    def _check_earlier_tokens_stay(self) -> None:
        """Check that a conversation's tokens are a prefix of the next turn's, and that `later` builds the same ids."""
        whole = [self._render([_QUESTION] * num) for num in (1, 2, 3)]
        answer = self._prefix[len(whole[0]) :]
        tail = whole[1][len(self._prefix) :]
        built = whole[0] + answer + tail + answer + tail
        for earlier, later in ((whole[0], whole[1]), (whole[1], whole[2]), (built, whole[2])):
            where = next((i for i, (a, b) in enumerate(zip(earlier, later, strict=False)) if a != b), None)
            if where is None and len(earlier) <= len(later):
                continue
            where = min(len(earlier), len(later)) if where is None else where
            raise ValueError(
                f"the chat template of {_name(self._tokenizer)} changes earlier tokens when a turn is added: "
                f"token {where} becomes {self._token(later, where)} instead of {self._token(earlier, where)}; "
                "expected earlier tokens unchanged: use prompt_format = 'text' or another template"
            )

    def _check_system_once(self) -> None:
        if not self._has_checked_system:
            self._check_system()
            self._has_checked_system = True

    def _check_tools_once(self, tools: str) -> None:
        if not self._has_checked_tools:
            self._check_tools(tools)
            self._has_checked_tools = True

    def _check_system(self) -> None:
        """Check that the template renders a system message and keeps earlier tokens with one.

        `later` renders without one, so the ids after an answer must not depend on it.
        """
        name, remedy = _name(self._tokenizer), "use `instruction`, which is part of the user's message"
        try:
            shown, whole = (self._render([_QUESTION] * num, system=_SYSTEM) for num in (1, 2))
        except Exception as error:  # templates refuse a conversation in whatever way they like
            raise ValueError(
                f"the chat template of {name} rejects the role 'system' ({error}); expected a template that accepts "
                f"it, for a system_prompt: {remedy}"
            ) from error
        if _SYSTEM not in self._tokenizer.decode(shown):
            raise ValueError(
                f"the chat template of {name} omits messages of the role 'system'; expected a template that renders "
                f"them, for a system_prompt: {remedy}"
            )
        plain, both = (self._render([_QUESTION] * num) for num in (1, 2))
        if whole != shown + both[len(plain) :]:
            raise ValueError(
                f"the chat template of {name} changes earlier tokens after a system message; expected earlier tokens "
                f"unchanged: {remedy}"
            )

    def _check_tools(self, tools: str) -> None:
        """Check that the template renders tools and messages of the role "tool", and keeps earlier tokens with them.

        `later` renders without tools, so the ids after an answer must not depend on them.
        """
        name, plain = _name(self._tokenizer), self._render([_QUESTION])
        shown = self._render([_QUESTION], tools=tools)
        if shown == plain:
            raise ValueError(
                f"the chat template of {name} omits the tools; expected a template that renders them, or an "
                "environment that lists them in its prompt (tools_in = 'prompt')"
            )
        try:
            whole, bare = (self._render([_QUESTION] * 2, role="tool", tools=each) for each in (tools, ""))
        except Exception as error:  # templates refuse a conversation in whatever way they like
            raise ValueError(
                f"the chat template of {name} rejects the role 'tool' ({error}); expected a template that accepts it, "
                "or an environment that lists the tools in its prompt (tools_in = 'prompt')"
            ) from error
        self._controls = ControlTokens(self._tokenizer, bare)
        self._harmless.cache_clear()
        answer, tail = self._prefix[len(plain) :], bare[len(self._prefix) :]
        if bare[: len(self._prefix)] != self._prefix or whole != shown + answer + tail:
            raise ValueError(
                f"the chat template of {name} changes earlier tokens when a tool answers; expected earlier tokens "
                "unchanged, or an environment that lists the tools in its prompt (tools_in = 'prompt')"
            )

    def _token(self, ids: list[int], where: int) -> str:
        return repr(self._tokenizer.decode(ids[where : where + 1])) if where < len(ids) else "nothing"


def _dialogue(
    questions: Sequence[str], answer: str | None = None, *, role: str = "user", system: str = ""
) -> list[Message]:
    """Return the messages of a system prompt and questions; a dummy answer is between two questions."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": questions[0]}]
    for question in questions[1:]:
        messages += [
            {"role": "assistant", "content": answer or _ANSWERS[0]},
            {"role": role, "content": question},
        ]
    return messages


def _contents(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _dummy(message: Message) -> str:
    """Return a harmless content in place of a message's own; an empty one stays, since templates may test for it."""
    if not message["content"]:
        return ""
    texts = {"system": _SYSTEM, "assistant": _ANSWERS[0]}
    return texts.get(message["role"], _QUESTION)


def _forged(tokenizer: Any, text: str) -> str:
    return (
        f"tokenizer {_name(tokenizer)} encodes control tokens in {text[:40]!r}, which does not contain their names; "
        "expected a tokenizer that does not normalise text to control tokens"
    )


def _name(tokenizer: Any) -> str:
    return repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
