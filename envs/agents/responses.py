"""Write the policy's turns as OpenAI's chat completions, whole or as a stream of events.

    answer_of("<tool_call>{...}</tool_call>", ...)      Answer(message with tool_calls, "tool_calls", ...)
    completion(answer, ...)                             the body of a reply
    events(answer, ...)                                 the same as server-sent events

A stream is written once the turn is complete: its pieces joined are the reply that is not streamed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_srl.envs.agents.requests import ChatRequest
from rllib_srl.envs.tools.call_format import CallFormat

_PIECE = re.compile(r"\s*\S+|\s+")
_CALL_OPENINGS = ("<tool_call>", "<function=", "<|python_tag|>", "[TOOL_CALLS]")


@dataclass(frozen=True)
class Answer:
    """The answer to a request. Invariant: `message` is as an assistant's message in OpenAI's API."""

    message: dict[str, Any]
    finish_reason: str  # "stop", "length" or "tool_calls"
    num_prompt_tokens: int
    num_tokens: int
    prompt_ids: Sequence[int] = ()  # the tokens, for requests with return_token_ids
    ids: Sequence[int] = ()

    @property
    def usage(self) -> dict[str, int]:
        """Return the number of tokens."""
        total = self.num_prompt_tokens + self.num_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens, "completion_tokens": self.num_tokens, "total_tokens": total
        }  # fmt: skip


def answer_of(
    text: str,
    request: ChatRequest,
    call_format: CallFormat,
    call_id: str,
    reason: str,
    num_tokens: tuple[int, int],
    ids: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Answer:
    """Return the answer that a turn gives.

    Args:
        text: the turn, without special tokens.
        request: to be answered.
        call_format: how the policy writes calls.
        call_id: beginning of the ids of its calls.
        reason: "stop" or "length".
        num_tokens: of the prompt and of the turn.
        ids: the tokens of the prompt and of the turn.
    """
    calls: list[dict[str, Any]] = []
    if request.tools and request.tool_choice != "none":
        calls = _calls_in(text, request, call_format, call_id)
        calls = calls[:1] if request.parallel_tool_calls is False else calls
    if calls:
        before = [text.partition(opening)[0] for opening in _CALL_OPENINGS if opening in text]
        content = min(before, key=len).strip() if before else ""
        message = {"role": "assistant", "content": content or None, "tool_calls": calls}
        return Answer(message, "length" if reason == "length" else "tool_calls", *num_tokens, *ids)
    places = [place for stop in request.stops() if (place := text.find(stop)) >= 0]
    content = text[: min(places)] if places else text
    message = {"role": "assistant", "content": content}
    return Answer(message, "length" if reason == "length" else "stop", *num_tokens, *ids)


def _calls_in(text: str, request: ChatRequest, call_format: CallFormat, call_id: str) -> list[dict[str, Any]]:
    """Return the calls of a turn, [] if it has none or one that JSON cannot hold: it is then an ordinary answer."""
    said = call_format.read(text, {tool.function.name: None for tool in request.tools or ()})  # type: ignore[misc]
    calls = []
    for number, call in enumerate(said.calls):
        if call.args:
            return []  # by position
        try:
            arguments = json.dumps(call.kwargs, ensure_ascii=False, allow_nan=False)
        except ValueError:
            return []
        function = {"name": call.name, "arguments": arguments}
        calls.append({"id": f"{call_id}_{number}", "type": "function", "function": function})
    return calls


def completion(answer: Answer, request: ChatRequest, number: str) -> dict[str, Any]:
    """Return the body of a reply that is not streamed.

    Args:
        answer: to be written.
        request: that it answers.
        number: a unique part of the reply's id.
    """
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason, "logprobs": None}
    whole = {**_head(request, number, "chat.completion"), "choices": [choice], "usage": answer.usage}
    if request.return_token_ids:  # in the places where vLLM's server has them
        choice["token_ids"], whole["prompt_token_ids"] = list(answer.ids), list(answer.prompt_ids)
    return whole


def events(answer: Answer, request: ChatRequest, number: str) -> Iterator[bytes]:
    """Yield the events of a streamed reply; arguments are those of `completion`."""
    head = _head(request, number, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish_reason: str | None = None, ids: Sequence[int] = ()) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        choice |= {"token_ids": list(ids)} if request.return_token_ids else {}
        return event({**head, "choices": [choice]})

    if request.return_token_ids:
        head["prompt_token_ids"] = list(answer.prompt_ids)
    yield chunk({"role": "assistant", "content": ""})
    head.pop("prompt_token_ids", None)
    for piece in _PIECE.findall(answer.message["content"] or ""):
        yield chunk({"content": piece})
    for index, call in enumerate(answer.message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, answer.finish_reason, answer.ids)
    if request.stream_options is not None and request.stream_options.include_usage:
        yield event({**head, "choices": [], "usage": answer.usage})
    yield b"data: [DONE]\n\n"


def _head(request: ChatRequest, number: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": request.model}


def event(value: Any) -> bytes:
    """Return an event of one line; it is ASCII, since clients take U+2028 and the like in a text for ends of lines."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"
