"""Translate between a client and vLLM: the request that is forwarded, and the answer with its tokens taken out.

    ChatRequest ──forwarded──> vLLM's body      sampling made explicit, token ids and log-probs asked for
    vLLM's reply, or its events ──Collected──>  what the client gets (no tokens), and what is logged (with tokens)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllib_srl.envs.agents.requests import ChatRequest, RequestError
from rllib_srl.envs.agents.web import MODEL
from rllib_srl.people.lineage.conversations import Tokens

OURS = ("prompt_token_ids", "prompt_logprobs", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics")
OURS_OF_CHOICE = ("token_ids", "routed_experts", "stop_reason")
REFUSED = {  # fields that `read_request` takes and this server does not
    "tools": "this server answers with text only",
    "seed": "vLLM cannot seed single requests on a CPU",
}


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled unless a request says otherwise."""

    temperature: float
    max_tokens: int
    stop: tuple[str, ...]
    end_ids: tuple[int, ...] = ()  # tokens that end an answer, besides those of the model


def forwarded(asked: ChatRequest, usual: Sampling, model: str) -> tuple[dict[str, Any], str]:
    """Return the body for vLLM, and why the answer cannot be trained on, "" if it can.

    Raises:
        RequestError: the request has a field that this server does not support.
    """
    for name, why in REFUSED.items():
        if getattr(asked, name) is not None:
            raise RequestError(f"{name} is not supported: {why}", name)
    messages = asked.plain_messages()
    if any(one["role"] == "tool" or one.get("tool_calls") for one in messages):
        raise RequestError(f"calls of tools are not supported: {REFUSED['tools']}", "messages")
    temperature = usual.temperature if asked.temperature is None else asked.temperature
    top_p, top_k = asked.top_p or 1.0, asked.top_k or 0
    limits = [one for one in (asked.max_tokens, asked.max_completion_tokens) if one is not None]
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": bool(asked.stream)}
    body |= {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": 0.0, "repetition_penalty": 1.0}
    body["max_tokens"] = min(limits, default=usual.max_tokens)
    body["stop"] = list(dict.fromkeys((*usual.stop, *asked.stops())))
    if arguments := asked.template_arguments():
        body["chat_template_kwargs"] = arguments
    if usual.end_ids:
        body["stop_token_ids"] = list(usual.end_ids)
    body |= {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
    if asked.stream:
        body["stream_options"] = {"include_usage": True}
    changed = {"temperature": (temperature, usual.temperature), "top_p": (top_p, 1.0), "top_k": (max(top_k, 0), 0)}
    off = [f"{name} = {value}; expected {want}" for name, (value, want) in changed.items() if value != want]
    return body, "; ".join(off)


@dataclass
class Collected:
    """An answer as it comes from vLLM. Invariant: what is returned for the client holds no tokens."""

    conversation_id: str
    version: int
    text: str = ""
    finish_reason: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def take(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Add a whole reply or a chunk; return it as the client gets it."""
        self.prompt_ids += value.get("prompt_token_ids") or []
        for choice in value.get("choices", ()):
            said = choice.get("message") or choice.get("delta") or {}
            self.text += said.get("content") or ""
            self.ids += choice.get("token_ids") or []
            self.logps += [one["logprob"] for one in (choice.get("logprobs") or {}).get("content") or ()]
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        names = {"id": self.conversation_id, "model": MODEL, "system_fingerprint": f"version-{self.version}"}
        rest = {name: one for name, one in value.items() if name not in OURS}
        choices = [
            {**{name: one for name, one in choice.items() if name not in OURS_OF_CHOICE}, "logprobs": None}
            for choice in value.get("choices", ())
        ]
        return {**rest, **names, "choices": choices}

    def tokens(self, why_not: str) -> tuple[Tokens | None, str]:
        """Return the tokens to train on, or None and why there are none.

        Args:
            why_not: what speaks against it already, "" if nothing does.
        """
        found = Tokens(self.prompt_ids, self.ids, self.logps)
        fault = why_not or found.faults()
        return (None, fault) if fault else (found, "")


def event(value: Any) -> bytes:
    """Return an object as a server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
