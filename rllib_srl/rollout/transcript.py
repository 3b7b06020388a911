"""Tokenise observations and append them to the policy's tokens, without changing earlier tokens.

    whole(messages, tools)      the ids of a conversation, up to the policy's turn; `first` of one observation
    more(messages, last_id)     the ids that follow a turn whose last token was last_id; `later` of one observation
    stop(stop_strings)          the strings that end a turn, besides the end-of-sequence token

`RawTranscript` concatenates texts. `ChatTranscript` wraps them in the model's chat template. For a later
observation it uses only the part of the rendering after the policy's message
(Source: TRL, "chat template prefix preservation"): the policy's own tokens stay as sampled.

    a prompt     ...a question<|im_end|>\n<|im_start|>assistant\n <think>\n
    later on     ...a question<|im_end|>\n<|im_start|>assistant\n It is x <|im_end|>\n<|im_start|>user\n...
                 |------------------- kept ---------------------|         |------------ new ----------|

The opening of a prompt may differ from that of an earlier answer, since templates open a thought and drop it later.

Environment text cannot inject control tokens: see `ControlTokens`.

The tokeniser is used from one thread only: Hugging Face's fast ones raise "Already borrowed" otherwise.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

from rllib_srl.rollout.control_tokens import ControlTokens, unused_character

Message = Mapping[str, Any]  # message of a conversation, as in OpenAI's API

_NUM_CACHED = 1024  # the G episodes of a prompt begin with the same text
# A conversation that tests a chat template.
_QUESTION = "What is 1 + 1?"
_SYSTEM = "Reply in one word."
_ANSWERS = ("It is x", "It is 0")  # no common last character
_UNCHANGED = "expected earlier tokens unchanged"
_ROLES = ("assistant", "model", "bot")  # the policy's, as templates name it


class Transcript(ABC):
    """The conversion of text to tokens that a player uses."""

    end_ids: tuple[int, ...] = ()  # tokens that end a turn besides the model's own, for `Sampling.end_ids`
    is_chat: bool  # does it render messages, or only their text?

    def first(self, text: str, tools: str = "", system: str = "") -> list[int]:
        """Return the ids of the first observation, after the system prompt, up to the policy's first token."""
        return self.whole(_dialogue([text], system=system), tools)

    def later(self, text: str, last_id: int, role: str = "user") -> list[int]:
        """Return the ids of an observation between a turn that ended in `last_id` and the policy's next token."""
        return self.more([{"role": role, "content": text}], last_id)

    @abstractmethod
    def stop(self, stop_strings: tuple[str, ...]) -> tuple[str, ...]:
        """Return the strings that end a turn, given the environment's `stop_strings`."""

    @abstractmethod
    def whole(self, messages: Sequence[Message], tools: str = "", template: str = "") -> list[int]:
        """Return the ids of a conversation, up to the policy's next token.

        Args:
            messages: as in OpenAI's API: `role`, `content` (text), and `tool_calls` with arguments as objects
            tools: JSON of the tool schemas for the chat template; empty if none
            template: JSON of further arguments of the chat template, such as enable_thinking; empty if none

        Raises:
            ValueError: the format, or the model's chat template, does not support a message or tools.
        """

    @abstractmethod
    def more(self, messages: Sequence[Message], last_id: int, template: str = "") -> list[int]:
        """Return the ids of messages that follow a turn that ended in `last_id`, up to the policy's next token.

        Raises:
            ValueError: as in `whole`.
        """


def make_transcript(format: str, tokenizer: Any, max_turns: int | None = None) -> Transcript:
    """Make the transcript of a format, "text" (texts concatenated) or "chat" (the model's chat template).

    With `max_turns` 1 a template need not keep earlier tokens when a turn is added.

    Raises:
        ValueError: for another format, or a tokeniser or template that does not support it.
    """
    if format == "text":
        return RawTranscript(tokenizer)
    if format == "chat":
        return ChatTranscript(tokenizer, max_turns)
    raise ValueError(f"prompt_format = {format!r}; expected 'text' or 'chat'")


class RawTranscript(Transcript):
    """Concatenated texts; only the first gets the special tokens that the tokeniser prepends by default.

    Invariant: turns end with the environment's stop strings or the end-of-sequence token; no text becomes a control
    token.
    """

    is_chat = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._controls = ControlTokens(tokenizer)
        self._num_in_front = self._controls.count(tokenizer("", add_special_tokens=True)["input_ids"])
        if self._encode("a", True)[-1:] == [tokenizer.eos_token_id]:
            raise ValueError(
                f"tokenizer {_name(tokenizer)} appends {tokenizer.eos_token!r} to every text, so the policy cannot "
                "continue it; expected add_eos_token=False"
            )
        self._first = lru_cache(_NUM_CACHED)(lambda text: tuple(self._encode(text, True)))

    def whole(self, messages: Sequence[Message], tools: str = "", template: str = "") -> list[int]:
        """Tokenise the concatenated contents; a blank line follows a system message at the start."""
        if tools:
            raise ValueError(
                "prompt_format = 'text' has no template for tools; expected prompt_format = 'chat', or an "
                "environment that lists them in its prompt (tools_in = 'prompt')"
            )
        system, dialogue = "", messages
        if messages and messages[0]["role"] == "system":
            system, dialogue = messages[0]["content"] + "\n\n", messages[1:]
        return list(self._first(system + _contents(dialogue)))

    def more(self, messages: Sequence[Message], last_id: int, template: str = "") -> list[int]:
        """Tokenise the concatenated contents without special tokens."""
        return self._encode(_contents(messages), False)

    def stop(self, stop_strings: tuple[str, ...]) -> tuple[str, ...]:
        return stop_strings

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        first, *pieces = self._controls.pieces(text)
        ids = list(self._tokenizer(first, add_special_tokens=add_special_tokens)["input_ids"])
        for piece in pieces:
            ids += self._tokenizer(piece, add_special_tokens=False)["input_ids"]
        if self._controls.count(ids) > (self._num_in_front if add_special_tokens else 0):
            raise ValueError(_forged(self._tokenizer, text))
        return ids


class ChatTranscript(Transcript):
    """The model's chat template: the environment is the user, the policy the assistant.

    Invariant: the stream equals the rendering of the conversation, except for the openings of earlier answers, if the
    policy closes its turns as the template does and no observation contains the name of a control token. The
    constructor checks this on a dummy conversation. The number of control tokens in a stream equals that of the same
    conversation with dummy texts.

    `end_ids` are the tokens that end a turn in the engine: the one that closes the last message in the template, or an
    earlier one if the last stays open, and the one in front of a tool's answer.
    """

    is_chat = True

    def __init__(self, tokenizer: Any, max_turns: int | None = None) -> None:
        self._tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"tokenizer {_name(tokenizer)} has no chat template; expected one for prompt_format = 'chat': "
                "use prompt_format = 'text' or an instruction-tuned model"
            )
        self._controls = ControlTokens(tokenizer)
        self._harmless = lru_cache(_NUM_CACHED)(self._num_controls)
        self._checked: set[str] = set()  # features that the first prompts used: "tools", "system"
        self._has_one_turn = max_turns == 1
        opened = self._prompt()
        try:
            self._prefix, tail = self._split(_dialogue([_QUESTION, _QUESTION]))
        except Exception:  # templates may raise anything to refuse a conversation
            if not self._has_one_turn:
                raise
            self._prefix, tail = [], []
        self._num_kept = _num_common(opened, self._prefix)
        self._opening = opened[self._num_kept :]
        self._marking = [*self._prefix, *self._without_opening(tail)] or opened
        self._controls = ControlTokens(tokenizer, self._marking)
        self._closing = self._closing_of(tail, "user")
        is_always_open = self._rendered(_dialogue([_QUESTION]), is_open=False) == opened
        last_prefix, self._last_end = self._last_answer(is_always_open)
        end = self._closing[-1] if self._last_end is None and self._closing else self._last_end
        self.end_ids = () if end is None else (end,)
        if not self._has_one_turn:
            self._check_earlier_tokens_stay(opened)
        self._check_role_is_opened(opened, self._prefix or last_prefix, is_always_open)
        self._whole = lru_cache(_NUM_CACHED)(
            lambda messages, tools, template: tuple(self._ids_of(json.loads(messages), tools, template))
        )

    def _prompt(self) -> list[int]:
        """Return the prompt of a dummy question; check that the template shows it."""
        reason = "omits the user's message"
        try:
            if _QUESTION in self._tokenizer.decode(ids := self._render([_QUESTION])):
                return ids
        except Exception as error:  # templates may raise anything to refuse a conversation
            reason = f"rejects a user's message ({error})"
        raise self._refused(
            f"{reason}; expected one that takes its content as text: use prompt_format = 'text' or another template"
        )

    def whole(self, messages: Sequence[Message], tools: str = "", template: str = "") -> list[int]:
        """Render the conversation and the opening of the assistant's message."""
        if tools and "tools" not in self._checked:
            self._check_tools(tools)
            self._checked.add("tools")
        if "system" not in self._checked and any(message["role"] == "system" for message in messages):
            self._check_system()
            self._checked.add("system")
        return list(self._whole(json.dumps(messages, ensure_ascii=False), tools, template))

    def more(self, messages: Sequence[Message], last_id: int, template: str = "") -> list[int]:
        """Render the closing of the assistant's message, unless the turn wrote it, the messages and the next opening.

        They are rendered after a dummy question and answer, so no earlier token is rendered again.
        """
        whole = [*_dialogue([_QUESTION]), {"role": "assistant", "content": _ANSWERS[0]}, *messages]
        ids = self._ids_of(whole, "", template)
        if self._prefix and ids[: len(self._prefix)] == self._prefix:
            tail = ids[len(self._prefix) :]
        else:  # the answer opens otherwise, as Qwen's do in front of a tool's
            try:
                _, tail = self._split(whole, template=template)
            except ValueError as error:
                text = messages[-1]["content"] if messages else ""
                raise self._refused(
                    f"changes an earlier message when the next one is {text[:40]!r}; {_UNCHANGED}: use prompt_format = "
                    "'text'"
                ) from error
        return tail[self._num_written(tail, last_id) :]

    def stop(self, stop_strings: tuple[str, ...]) -> tuple[str, ...]:
        """Return (): a chat turn ends with the end-of-turn token."""
        return ()

    def _ids_of(self, messages: Sequence[Message], tools: str = "", template: str = "") -> list[int]:
        """Render a conversation that ends with an observation; raise ValueError if a text became a control token."""
        ids = self._rendered(messages, tools, template)
        dummies = [{**m, "content": _dummy(m)} for m in messages]
        if self._controls.count(ids) > self._harmless(json.dumps(dummies, ensure_ascii=False), tools, template):
            raise ValueError(_forged(self._tokenizer, messages[-1]["content"]))
        return ids

    def _num_controls(self, messages: str, tools: str, template: str) -> int:
        """Return the number of control tokens of messages, given as JSON to be cached."""
        return self._controls.count(self._rendered(json.loads(messages), tools, template))

    def _render(self, questions: list[str], *, role: str = "user", tools: str = "", system: str = "") -> list[int]:
        return self._rendered(_dialogue(questions, role=role, system=system), tools)

    def _rendered(
        self, messages: Sequence[Message], tools: str = "", template: str = "", *, is_open: bool = True
    ) -> list[int]:
        """Render a conversation and, if `is_open`, the opening of the assistant's next message."""
        schemas = json.loads(tools) if tools else None
        contents = [{name: value for name, value in message.items() if name != "role"} for message in messages]
        texts = list(_texts([contents, schemas]))
        mark = unused_character(texts) if any(map(self._controls.breaks, texts)) else ""
        if mark:
            contents, schemas = self._controls.marked([contents, schemas], mark)
        rendered = self._tokenizer.apply_chat_template(
            [{"role": message["role"], **content} for message, content in zip(messages, contents, strict=True)],
            tools=schemas,
            tokenize=not mark,
            add_generation_prompt=is_open,
            return_dict=False,
            **(json.loads(template) if template else {}),
        )
        if not mark:
            return list(rendered)
        pieces = (self._tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in rendered.split(mark))
        return [token_id for piece in pieces for token_id in piece]

    def _split(
        self, messages: Sequence[Message], *, template: str = "", is_open: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return the ids up to the end of the first dummy answer in `messages`, and the ids after it.

        The latter are the common suffix of the renderings of two answers with different last characters.
        """
        at = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
        changed = [*messages[:at], {**messages[at], "content": _ANSWERS[1]}, *messages[at + 1 :]]
        first, second = (self._rendered(each, "", template, is_open=is_open) for each in (messages, changed))
        num_same = _num_common(first[::-1], second[::-1])
        prefix, tail = first[: len(first) - num_same], first[len(first) - num_same :]
        if not self._tokenizer.decode(prefix).rstrip().endswith(_ANSWERS[0]):
            raise self._refused(
                "changes the assistant's message; expected its text unchanged, then closing tokens: use prompt_format "
                "= 'text'"
            )
        return prefix, tail

    def _closing_of(self, tail: Sequence[int], role: str) -> list[int]:
        """Return the ids of `tail` up to the one that ends the turn; [] if only text is in front of the next message.

        `tail` are the ids after the dummy answer, in front of a dummy question of `role`.
        """
        if not tail:
            return []
        _, other = self._split(_dialogue([_QUESTION, _ANSWERS[1]], role=role))
        head = list(tail[: _num_common(tail, other)])
        at = next((n for n, token_id in enumerate(head) if token_id in self._marks()), None)
        return [] if at is None else head[: at + 1]

    def _last_answer(self, is_always_open: bool) -> tuple[list[int], int | None]:
        """Return the ids up to the end of a conversation's last answer, and the token right after it.

        The token is None if the template leaves the answer open, or opens the next one; [] and None if it cannot show
        one.
        """
        try:
            dialogue = [*_dialogue([_QUESTION]), {"role": "assistant", "content": _ANSWERS[0]}]
            prefix, tail = self._split(dialogue, is_open=False)
        except Exception:  # templates may raise anything to refuse a conversation
            return [], None
        at = next((n for n, token_id in enumerate(tail) if token_id in self._marks()), None)
        is_right_after = at is not None and not self._tokenizer.decode(tail[:at]).strip()
        return prefix, tail[at] if at is not None and is_right_after and not is_always_open else None

    def _marks(self) -> set[int]:
        """Return the ids that no text of a policy has by accident: special tokens and added ones."""
        return {*self._tokenizer.all_special_ids, *getattr(self._tokenizer, "added_tokens_decoder", {})}

    def _without_opening(self, ids: list[int]) -> list[int]:
        """Return ids without the opening of a prompt at their end: a thought that it opens marks no turn."""
        size = len(ids) - len(self._opening)
        return ids[:size] if size >= 0 and ids[size:] == self._opening else ids

    def _num_written(self, tail: Sequence[int], last_id: int) -> int:
        """Return how many ids of `tail` a turn that ended in `last_id` has written itself, or need not have."""
        size = len(self._closing)
        if size and last_id in (self._closing[-1], self._last_end) and list(tail[:size]) == self._closing:
            return size
        return int(last_id in self.end_ids and list(tail[:1]) == [last_id])

    def _check_earlier_tokens_stay(self, opened: list[int]) -> None:
        """Check that a conversation keeps its tokens, but for the opening of an answer, and that `later` builds it."""
        two, three = (self._render([_QUESTION] * num) for num in (2, 3))
        kept, tail = opened[: self._num_kept], two[len(self._prefix) :]
        exchange = self._prefix[len(kept) :] + tail[: len(tail) - len(self._opening)]
        built = kept + exchange + exchange + self._opening
        if _QUESTION in self._tokenizer.decode(kept):
            opened, two = kept, two[: len(two) - len(self._opening)]
        for earlier, later in ((opened, two), (two, three), (built, three)):
            where = _num_common(earlier, later)
            if where == len(earlier):
                continue
            shown = [self._tokenizer.decode(ids[where : where + 1]) for ids in (later, earlier)]
            after, before = (repr(text) if text else "nothing" for text in shown)
            raise self._refused(
                f"changes earlier tokens when a turn is added: token {where} becomes {after} instead of {before}; "
                f"{_UNCHANGED}: use prompt_format = 'text', another template, or max_turns = 1 for tasks of one turn"
            )

    def _check_role_is_opened(self, opened: list[int], prefix: list[int], is_always_open: bool) -> None:
        """Check that a prompt ends with the opening of the policy's message, if the template has one.

        `prefix` is the prompt `opened` up to the end of its answer. A template is always open if it renders the prompt
        without add_generation_prompt too.
        """
        num_kept = _num_common(opened, prefix)
        header = self._tokenizer.decode(prefix[num_kept:]).rstrip().removesuffix(_ANSWERS[0]).strip()
        is_comparable = _QUESTION in self._tokenizer.decode(opened[:num_kept])
        if is_comparable and header and (is_always_open or any(name in header.lower() for name in _ROLES)):
            raise self._refused(
                f"ignores add_generation_prompt: a prompt does not end with {header!r}, so the policy would have to "
                "write its own role; expected a template that opens the assistant's message: correct it in the "
                "model's directory, or use prompt_format = 'text'"
            )

    def _check_system(self) -> None:
        """Check that the template renders a system message and keeps earlier tokens with one.

        `later` renders without one, so the ids after an answer must not depend on it.
        """
        remedy = "use `instruction`, which is part of the user's message"
        try:
            numbers = (1,) if self._has_one_turn else (1, 2)
            shown, *whole = (self._render([_QUESTION] * num, system=_SYSTEM) for num in numbers)
        except Exception as error:  # templates may raise anything to refuse a conversation
            raise self._refused(
                f"rejects the role 'system' ({error}); expected a template that accepts it, for a system_prompt: "
                f"{remedy}"
            ) from error
        if _SYSTEM not in self._tokenizer.decode(shown):
            raise self._refused(
                "omits messages of the role 'system'; expected a template that renders them, for a system_prompt: "
                f"{remedy}"
            )
        size = len(shown) - len(self._opening)
        if whole and whole[0] != shown[:size] + self._render([_QUESTION] * 2)[self._num_kept :]:
            raise self._refused(f"changes earlier tokens after a system message; {_UNCHANGED}: {remedy}")

    def _check_tools(self, tools: str) -> None:
        """Check that the template renders tools and messages of the role "tool", and keeps earlier tokens with them.

        `later` renders without tools, so the ids after an answer must not depend on them.
        """
        remedy = "an environment that lists the tools in its prompt (tools_in = 'prompt')"
        plain, shown = self._render([_QUESTION]), self._render([_QUESTION], tools=tools)
        if shown == plain:
            raise self._refused(f"omits the tools; expected a template that renders them, or {remedy}")
        if self._has_one_turn:
            return
        try:
            whole, bare = (self._render([_QUESTION] * 2, role="tool", tools=each) for each in (tools, ""))
        except Exception as error:  # templates may raise anything to refuse a conversation
            raise self._refused(
                f"rejects the role 'tool' ({error}); expected a template that accepts it, or {remedy}"
            ) from error
        size, kept = len(shown) - len(self._opening), self._num_kept
        try:
            prefix, tail = self._split(_dialogue([_QUESTION] * 2, role="tool"))
        except ValueError:
            prefix, tail = [], []
        self._controls = ControlTokens(self._tokenizer, [*self._marking, *self._without_opening(tail)])
        self._harmless.cache_clear()
        if prefix and _QUESTION not in self._tokenizer.decode(tail):
            raise self._refused(
                f"omits messages of the role 'tool'; expected a template that renders them, or {remedy}"
            )
        if prefix[:kept] != plain[:kept] or not prefix or whole != shown[:size] + bare[kept:]:
            raise self._refused(f"changes earlier tokens when a tool answers; {_UNCHANGED}, or {remedy}")
        if (closing := self._closing_of(tail, "tool")) and closing[-1] not in (*self.end_ids, *self._closing):
            self.end_ids = (*self.end_ids, closing[-1])

    def _refused(self, reason: str) -> ValueError:
        return ValueError(f"the chat template of {_name(self._tokenizer)} {reason}")


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _dialogue(questions: Sequence[str], *, role: str = "user", system: str = "") -> list[Message]:
    """Return the messages of a system prompt and questions; a dummy answer is between two questions."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": questions[0]}]
    for question in questions[1:]:
        messages += [{"role": "assistant", "content": _ANSWERS[0]}, {"role": role, "content": question}]
    return messages


def _contents(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


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
