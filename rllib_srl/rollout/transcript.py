"""Text to tokens: how what an environment says joins what the policy wrote, without touching a token already there.

    first(text, tools)          the ids an episode begins with
    later(text, last_id, role)  the ids that follow a turn whose last token was last_id
    stop(stop_strings)          what ends a turn, besides the end-of-sequence token

`RawTranscript` lays texts end to end. `ChatTranscript` wraps them in the model's chat template, and
takes for a later observation only the part of the rendering that lies behind the policy's message
(Source: TRL, "chat template prefix preservation"): the policy's own tokens stay as sampled.

What an environment says is text. The name of a control token in it, as in a tool's output that says "<|im_end|>",
becomes tokens of plain text and never that token: nothing but the template, or the tokeniser's default in front of a
text, puts control tokens into a stream. Control tokens are the tokeniser's special tokens and the added ones with which
the template marks turns (rllib_srl/rollout/control_tokens.py). A text that would become one all the same, by a
tokeniser's normalisation, is refused. Turns that a template marks by plain words ("[INST]") can be forged by writing
them: `marks_turns` is False then.

The tokeniser is used from one thread only: Hugging Face's fast ones raise "Already borrowed" otherwise.
"""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import takewhile
from typing import Any, Protocol

from rllib_srl.rollout.control_tokens import ControlTokens, unused_character

_NUM_CACHED = 1024  # the G episodes of a prompt begin with the same text


class Transcript(Protocol):
    """What `play` needs to know of text and tokens."""

    end_of_turn_id: int | None

    def first(self, text: str, tools: str = "") -> list[int]:
        """Return the ids an episode begins with, ready for the policy's first token.

        Args:
            text: the first observation
            tools: JSON of the tool schemas that the chat template is to show; empty if none
        """

    def later(self, text: str, last_id: int, role: str = "user") -> list[int]:
        """Return the ids between a turn that ended in `last_id` and the policy's next token.

        Args:
            text: the observation
            last_id: the last token that the policy wrote
            role: who speaks in a chat: "user" or "tool"
        """

    def stop(self, stop_strings: tuple[str, ...]) -> tuple[str, ...]:
        """Return the strings that end a turn, given those of the environment."""


def make_transcript(format: str, tokenizer: Any) -> Transcript:
    """Make the transcript of a format.

    Args:
        format: "text" (texts end to end) or "chat" (the model's chat template).
        tokenizer: a Hugging Face tokeniser.

    Raises:
        ValueError: for another format, or a tokeniser or template that does not serve it.
    """
    if format == "text":
        return RawTranscript(tokenizer)
    if format == "chat":
        return ChatTranscript(tokenizer)
    raise ValueError(f"transcript format = {format!r}; expected 'text' or 'chat'")


class RawTranscript:
    """Texts end to end; only the first gets the special tokens the tokeniser puts in front by default.

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
                f"tokenizer {_name(tokenizer)} ends every text with {tokenizer.eos_token!r}; expected a text that "
                "the policy can continue: set add_eos_token=False"
            )
        self._first = lru_cache(_NUM_CACHED)(lambda text: tuple(self._encode(text, True)))

    def first(self, text: str, tools: str = "") -> list[int]:
        """Tokenise with the tokeniser's default special tokens."""
        if tools:
            raise ValueError(
                "prompt_format = 'text' has no template to show tools with; expected prompt_format = 'chat', or a "
                "world whose prompt shows them (tools_in = 'prompt')"
            )
        return list(self._first(text))

    def later(self, text: str, last_id: int, role: str = "user") -> list[int]:
        """Tokenise without special tokens, whatever the turn ended in."""
        return self._encode(text, False)

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

    Invariant: for a policy that closes its turns as the template does, and an environment that names no control token,
    the stream is exactly the rendering of the conversation, which is checked on a dummy conversation when constructed;
    and the control tokens of a stream are those that the template gives to the same conversation of harmless texts.

    `end_of_turn_id` is the token the template closes a message with; the engine must end turns with it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"tokenizer {_name(tokenizer)} has no chat template; expected one for the transcript format 'chat': "
                "use the format 'text' or an instruction-tuned model"
            )
        self._controls = ControlTokens(tokenizer)
        self._harmless = lru_cache(_NUM_CACHED)(self._num_controls)
        self._prefix, closing = self._split_template()
        self._controls = ControlTokens(tokenizer, self._render([_QUESTION] * 2))
        self._has_checked_tools = False
        special = set(tokenizer.all_special_ids)
        self.end_of_turn_id: int | None = closing[0] if closing and closing[0] in special else None
        self._check_earlier_tokens_stay()
        self._first = lru_cache(_NUM_CACHED)(lambda text, tools: tuple(self._said([text], tools=tools)))

    @property
    def marks_turns(self) -> bool:
        """Say whether a control token, which no text can forge, stands between a text and the policy's turn."""
        one, other = (self._render([question]) for question in _ANSWERS)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
        return self._controls.count(token_id for token_id, _ in same) > 0

    def first(self, text: str, tools: str = "") -> list[int]:
        """Render the tools, one user message and the opening of the assistant's."""
        if tools and not self._has_checked_tools:
            self._check_tools(tools)
            self._has_checked_tools = True
        return list(self._first(text, tools))

    def later(self, text: str, last_id: int, role: str = "user") -> list[int]:
        """Render what follows the assistant's message: its closing, unless the turn wrote it, and the next opening."""
        ids = self._said([_QUESTION, text], role=role)
        if ids[: len(self._prefix)] != self._prefix:
            raise ValueError(
                f"the chat template of {_name(self._tokenizer)} rewrites an earlier message when the next one is "
                f"{text[:40]!r}; expected earlier tokens to stay: use the transcript format 'text'"
            )
        tail = ids[len(self._prefix) :]
        return tail[1:] if last_id == self.end_of_turn_id else tail

    def stop(self, stop_strings: tuple[str, ...]) -> tuple[str, ...]:
        """Return nothing: a chat turn ends with the end-of-turn token."""
        return ()

    def _said(self, questions: list[str], *, role: str = "user", tools: str = "") -> list[int]:
        """Render a conversation that ends in what an environment says."""
        ids = self._render(questions, role=role, tools=tools)
        if self._controls.count(ids) > self._harmless(len(questions), role, tools):
            raise ValueError(_forged(self._tokenizer, questions[-1]))
        return ids

    def _num_controls(self, num_questions: int, role: str, tools: str) -> int:
        return self._controls.count(self._render([_QUESTION] * num_questions, role=role, tools=tools))

    def _render(
        self, questions: list[str], answer: str | None = None, *, role: str = "user", tools: str = ""
    ) -> list[int]:
        schemas = json.loads(tools) if tools else None
        texts = (*questions, json.dumps(schemas, ensure_ascii=False))
        mark = unused_character(texts) if any(map(self._controls.breaks, texts)) else ""
        if mark:
            questions, schemas = self._controls.marked(questions, mark), self._controls.marked(schemas, mark)
        messages = [{"role": "user", "content": questions[0]}]
        for question in questions[1:]:
            messages += [
                {"role": "assistant", "content": answer or _ANSWERS[0]},
                {"role": role, "content": question},
            ]
        rendered = self._tokenizer.apply_chat_template(
            messages,
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
        """Return the ids up to the end of a dummy answer, and those the template closes a message with.

        Two answers with different last characters differ exactly up to where the closing begins.
        """
        one, other = (self._render([_QUESTION, _QUESTION], answer) for answer in _ANSWERS)
        num_same = 0
        while num_same < min(len(one), len(other)) and one[-1 - num_same] == other[-1 - num_same]:
            num_same += 1
        prefix, tail = one[: len(one) - num_same], one[len(one) - num_same :]
        if not self._tokenizer.decode(prefix).rstrip().endswith(_ANSWERS[0]):
            raise ValueError(
                f"the chat template of {_name(self._tokenizer)} does not show the assistant's message as it is; "
                "expected its text, then a closing of its own: use the transcript format 'text'"
            )
        return prefix, tail

    def _check_earlier_tokens_stay(self) -> None:
        """Check that a conversation's tokens are a prefix of the next turn's, and that `later` builds just those."""
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
                "expected earlier tokens to stay: use the transcript format 'text' or another template"
            )

    def _check_tools(self, tools: str) -> None:
        """Check that the template shows tools, takes their results, and keeps earlier tokens when it does.

        `later` renders without tools, so what follows an answer must not depend on them.
        """
        name, plain = _name(self._tokenizer), self._render([_QUESTION])
        shown = self._render([_QUESTION], tools=tools)
        if shown == plain:
            raise ValueError(
                f"the chat template of {name} shows no tools; expected one that does: let the world's prompt show "
                "them (tools_in = 'prompt')"
            )
        try:
            whole, bare = (self._render([_QUESTION] * 2, role="tool", tools=each) for each in (tools, ""))
        except Exception as error:  # templates refuse a conversation in whatever way they like
            raise ValueError(
                f"the chat template of {name} takes no message of the role 'tool' ({error}); expected one that does: "
                "let the world's prompt show the tools (tools_in = 'prompt')"
            ) from error
        self._controls = ControlTokens(self._tokenizer, bare)
        self._harmless.cache_clear()
        answer, tail = self._prefix[len(plain) :], bare[len(self._prefix) :]
        if bare[: len(self._prefix)] != self._prefix or whole != shown + answer + tail:
            raise ValueError(
                f"the chat template of {name} changes earlier tokens when a tool answers; expected earlier tokens to "
                "stay: let the world's prompt show the tools (tools_in = 'prompt')"
            )

    def _token(self, ids: list[int], where: int) -> str:
        return repr(self._tokenizer.decode(ids[where : where + 1])) if where < len(ids) else "nothing"


_QUESTION = "What is 1 + 1?"
_ANSWERS = ("It is x", "It is 0")  # no common last character


def _forged(tokenizer: Any, text: str) -> str:
    return (
        f"tokenizer {_name(tokenizer)} reads control tokens in {text[:40]!r}, which does not hold their names; "
        "expected one that does not normalise text to them"
    )


def _name(tokenizer: Any) -> str:
    return repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
