"""Translate between a client and vLLM: the request that is forwarded, and the answer with its tokens taken out.

    ServedRequest ──forwarded──> vLLM's body      sampling made explicit, token ids and log-probs asked for
    vLLM's reply, or its events ──Collected──>    what the client gets (no tokens), and what is logged (with tokens)

What the learner's log-probs would not describe is answered and not trained on; `untrainable` says why.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from rllib_srl.envs.agents.requests import ChatRequest, RequestError
from rllib_srl.envs.agents.responses import answer_of, event
from rllib_srl.envs.agents.web import MODEL
from rllib_srl.envs.tools.formats import CALL_FORMATS
from rllib_srl.people.served_store import Tokens

OURS = ("prompt_token_ids", "prompt_logprobs", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics")
OURS_OF_CHOICE = ("token_ids", "routed_experts", "stop_reason")
MOST_CHOICES = 16
# Fields that change the distribution -> the value that does not.
NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "repetition_penalty": 1.0}
_CALLS = CALL_FORMATS["native"]()
_OF_MESSAGE: Any = {  # the others have no effect
    **dict.fromkeys(("role", "content", "name", "tool_call_id", "reasoning", "reasoning_content"), True),
    "tool_calls": {"__all__": {"id", "type", "function"}},
}


class ResponseFormat(BaseModel):
    """The form of an answer; vLLM checks a schema."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ServedRequest(ChatRequest):
    """The body of a request to a served model."""

    taken: ClassVar[frozenset[str]] = frozenset(
        ("n", "logprobs", "top_logprobs", "response_format", "tool_choice", *NEUTRAL)
    )

    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tool_choice: str | dict[str, Any] | None = None  # type: ignore[assignment]
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0.01, le=2)

    @property
    def has_form(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def must_call(self) -> bool:
        """Return whether the answer must be a call of a tool."""
        return self.tool_choice not in (None, "auto", "none")  # "required", or one that is named

    @property
    def may_call(self) -> bool:
        """Return whether calls are read from the answer, which is then streamed once it is complete."""
        return bool(self.tools) and self.tool_choice != "none"

    def sent_messages(self) -> list[dict[str, Any]]:
        """Return the messages as vLLM reads them, and as clients may send them again; contents are texts."""
        messages = [message.model_dump(include=_OF_MESSAGE, exclude_none=True) for message in self.messages]
        for message in messages:
            if isinstance(message.get("content"), list):
                message["content"] = "".join(part["text"] for part in message["content"])
            message["role"] = "system" if message["role"] == "developer" else message["role"]
        return messages

    def check(self, shows_tools: bool) -> None:
        """Check the fields together, for a model that shows tools or not; RequestError: one does not fit the others."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs is given without logprobs = true", "top_logprobs")
        form = self.response_format
        if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
            text = "response_format; expected json_schema with type = 'json_schema', and only there"
            raise RequestError(text, "response_format")
        if self.must_call and not self.tools:
            raise RequestError("tool_choice is given without tools", "tool_choice")
        has_calls = any(message.role == "tool" or getattr(message, "tool_calls", None) for message in self.messages)
        if (self.tools or has_calls) and not shows_tools:
            name = "tools" if self.tools else "messages"
            raise RequestError(f"{name}: the chat template of this model shows no tools to it; leave them out", name)


@dataclass(frozen=True)
class SamplingDefaults:
    """How answers are sampled unless a request says otherwise, and what the model and the engine can."""

    temperature: float
    max_tokens: int
    stop: tuple[str, ...]
    end_ids: tuple[int, ...] = ()  # tokens that end an answer, besides those of the model
    shows_tools: bool = False  # whether the chat template does
    can_seed: bool = True  # vLLM ends at a seed on a CPU


def forwarded(asked: ServedRequest, usual: SamplingDefaults, model: str) -> tuple[dict[str, Any], str]:
    """Return the body for vLLM, and why the answer cannot be trained on, "" if it can; RequestError: no such answer."""
    asked.check(usual.shows_tools)
    trainable = {"temperature": usual.temperature, "top_p": 1.0, "top_k": 0, "n": 1, **NEUTRAL}
    passed = {*trainable, "top_logprobs", "seed", "response_format", "tools", "parallel_tool_calls"}
    body: dict[str, Any] = trainable | asked.model_dump(include=passed, exclude_none=True)
    body |= {"top_p": body["top_p"] or 1.0, "top_k": max(body["top_k"], 0)}  # 0 beside temperature = 0, and -1
    why_not = [f"{name} = {body[name]}; expected {value}" for name, value in trainable.items() if body[name] != value]
    edited = {"response_format": asked.has_form, "tool_choice": asked.must_call}
    why_not += [f"{name}: the engine edits the probabilities" for name, is_edited in edited.items() if is_edited]
    if not usual.can_seed:
        body.pop("seed", None)
    limits = [limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit is not None]
    is_stream = bool(asked.stream and not asked.may_call)
    body |= {"model": model, "messages": asked.sent_messages(), "max_tokens": min(limits, default=usual.max_tokens)}
    usual_stop = () if asked.has_form else usual.stop  # JSON may have line breaks; its grammar ends it
    body |= {"stop": list(dict.fromkeys((*usual_stop, *asked.stops()))), "stream": is_stream}
    body |= {"logprobs": True, "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}} if is_stream else {}
    if asked.tools:  # of free answers the calls are read here, as those of agents are
        body["tool_choice"] = asked.tool_choice if asked.must_call else "none"
    if arguments := asked.template_arguments():
        body["chat_template_kwargs"] = arguments
    if usual.end_ids:
        body["stop_token_ids"] = list(usual.end_ids)
    return body, "; ".join(why_not)


@dataclass
class Collected:
    """An answer as it comes from vLLM, of several the first. Invariant: what the client gets holds no token ids."""

    conversation_id: str
    version: int
    asked: ServedRequest
    text: str = ""
    finish_reason: str = ""  # of all choices; "" until the last one has one
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    _reasons: dict[int, str] = field(default_factory=dict)

    def take(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Add a whole reply or a chunk; return it as the client gets it."""
        self.prompt_ids += value.get("prompt_token_ids") or []
        choices = [self._taken(choice) for choice in value.get("choices", ())]
        if len(self._reasons) == (self.asked.n or 1):
            self.finish_reason = self._reasons.get(0, "stop")
        names = {"id": self.conversation_id, "model": MODEL, "system_fingerprint": f"version-{self.version}"}
        return {**{name: entry for name, entry in value.items() if name not in OURS}, **names, "choices": choices}

    def _taken(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        message = choice.get("message") or choice.get("delta") or {}
        listed = choice.get("logprobs")
        if not choice.get("index"):
            self.text += message.get("content") or ""
            self.text += json.dumps(message["tool_calls"], ensure_ascii=False) if message.get("tool_calls") else ""
            self.ids += choice.get("token_ids") or []
            self.logps += [token["logprob"] for token in (listed or {}).get("content") or ()]
        if reason := choice.get("finish_reason"):
            self._reasons[choice.get("index", 0)] = reason
        kept = {name: entry for name, entry in choice.items() if name not in OURS_OF_CHOICE}
        kept["logprobs"] = listed if self.asked.logprobs else None
        if "message" in choice and self.asked.may_call and not self.asked.must_call:
            call_id = f"call_{self.conversation_id.removeprefix('chatcmpl-')}_{choice.get('index', 0)}"
            answer = answer_of(message.get("content") or "", self.asked, _CALLS, call_id, reason or "stop", (0, 0))
            kept |= {"message": {**message, **answer.message}, "finish_reason": answer.finish_reason}
        return kept

    def tokens(self, why_not: str) -> tuple[Tokens | None, str]:
        """Return the tokens to train on, or None and why there are none; `why_not` speaks against it already."""
        tokens = Tokens(self.prompt_ids, self.ids, self.logps)
        error = why_not or tokens.errors()
        return (None, error) if error else (tokens, "")


def events_of(reply: Mapping[str, Any], with_usage: bool) -> Iterator[bytes]:
    """Yield a whole reply as the events of a stream, without their end."""
    head = {**{name: entry for name, entry in reply.items() if name != "usage"}, "object": "chat.completion.chunk"}
    for choice in reply["choices"]:
        message, about = choice["message"], {"index": choice["index"], "finish_reason": None, "logprobs": None}
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls") or ())]
        delta = {"role": "assistant", "content": message.get("content")} | ({"tool_calls": calls} if calls else {})
        yield event({**head, "choices": [{**about, "delta": delta, "logprobs": choice["logprobs"]}]})
        yield event({**head, "choices": [{**about, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    if with_usage:
        yield event({**head, "choices": [], "usage": reply.get("usage")})
