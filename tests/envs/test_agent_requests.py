"""Bodies of `/v1/chat/completions`, as clients and frameworks send them: what is taken, and what is refused and why."""

import json
from typing import Any

import pytest

from rllib_srl.envs.agents.neutral import NEUTRAL
from rllib_srl.envs.agents.requests import RequestError, read_request

USER = {"role": "user", "content": "hi"}
BASE = {"model": "m", "messages": [USER]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{not json"}}
THOUGHT = {"role": "assistant", "content": "a"}

TAKEN: list[dict[str, Any]] = [
    {}, {"messages": [{"role": "developer", "content": "x"}, USER]}, {"messages": [{**USER, "content": ""}]},
    {"messages": [{**USER, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {"messages": [USER, {"role": "assistant", "content": None, "refusal": None}]},
    {"messages": [USER, {"role": "assistant", "tool_calls": [CALLED]}]},
    {"messages": [{"role": "tool", "content": "\x00 \U0001f600", "tool_call_id": "x"}]},
    {"stop": None, "tools": None, "stream": False, "user": "me", "metadata": {"a": "b"}},
    {"stop": "\n", "max_tokens": 1, "max_completion_tokens": 10**12},
    {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    {"logit_bias": {}}, {"logit_bias": {"50256": 0}}, {"temperature": 0, "top_p": 0},
    {"temperature": 0.3, "top_p": 0.9, "seed": 3, "reasoning_effort": "low"},
    {"verbosity": "low", "store": False, "service_tier": "auto", "prompt_cache_key": "x", "safety_identifier": "x"},
    {"prediction": {"type": "content", "content": "x"}, "modalities": ["text"], "prompt_cache_retention": "24h"},
    {"n": 1, "logprobs": False, "top_logprobs": 0, "presence_penalty": 0.0, "frequency_penalty": 0},
    {"response_format": {"type": "text"}, "tool_choice": "auto", "functions": [], "function_call": "none"},
    {"min_p": 0, "repetition_penalty": 1.0, "top_k": -1, "typical_p": 1, "top_a": 0, "min_tokens": 0},
    {"min_p": 0.0, "repetition_penalty": 1, "length_penalty": 0.7, "best_of": 1, "use_beam_search": False},
    {"ignore_eos": False, "skip_special_tokens": True, "stop_token_ids": [], "bad_words": [], "echo": False},
    {"include_stop_str_in_output": False, "spaces_between_special_tokens": True, "priority": 1},
    {"guided_json": None, "structured_outputs": None, "chat_template": None, "documents": []},
    {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False},
    {"chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": False, "include_reasoning": True},
    {"messages": [{**USER, "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]},
    {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]},
    {"messages": [USER, {**THOUGHT, "reasoning_content": "I see."}, USER]},
    {"messages": [USER, {**THOUGHT, "reasoning": "I see.", "parsed": None}, USER]},
    {"messages": [USER, {**THOUGHT, "thinking_blocks": [{"thinking": "x"}]}, USER]},
    {"messages": [USER, {**THOUGHT, "provider_specific_fields": {"refusal": None}}, USER]},
    dict.fromkeys(NEUTRAL),
]  # fmt: skip


def test_what_has_no_effect_is_taken() -> None:
    for fields in TAKEN:
        assert read_request(json.dumps({**BASE, **fields}).encode()).model == "m", fields


CHANGING: list[tuple[str, Any]] = [
    ("presence_penalty", 0.5), ("frequency_penalty", -1), ("logit_bias", {"5": 1}), ("min_p", 0.1), ("min_p", "1"),
    ("repetition_penalty", 1.1), ("repetition_penalty", 0), ("typical_p", 0.9), ("min_tokens", 5), ("n", 2),
    ("ignore_eos", True), ("stop_token_ids", [7]), ("bad_words", ["no"]), ("allowed_token_ids", []), ("best_of", 2),
    ("skip_special_tokens", False), ("logprobs", True), ("top_logprobs", 3), ("prompt_logprobs", 0), ("n", 0),
    ("response_format", {"type": "json_object"}), ("guided_json", {}), ("structured_outputs", {"regex": "a"}),
    ("chat_template", "x"), ("continue_final_message", True), ("modalities", ["text", "audio"]), ("echo", True),
    ("use_beam_search", True), ("truncate_prompt_tokens", 5), ("documents", [{"text": "x"}]), ("n", True),
    ("tool_choice", "required"), ("tool_choice", {"type": "function", "function": {"name": "add"}}),
    ("chat_template_kwargs", {"add_generation_prompt": False}), ("chat_template_kwargs", {"tools": []}),
    ("functions", [{"name": "f"}]),
]  # fmt: skip


def test_what_would_change_an_answer_is_refused_by_name_with_what_to_do() -> None:
    for name, value in CHANGING:
        with pytest.raises(RequestError) as caught:
            read_request(json.dumps({**BASE, name: value}).encode())
        said = str(caught.value)
        assert caught.value.param is not None and caught.value.param.partition(".")[0] == name, (name, value)
        assert name in said and len(said.partition("expected")[2]) > 20, said


BAD: list[Any] = [
    {}, [], None, 3, "text", {"messages": [USER]}, {"model": "m"}, {**BASE, "messages": []}, {**BASE, "model": 3},
    *({**BASE, "messages": messages} for messages in ({}, "hi", [None], [[]], [USER] * 2001)),
    *({**BASE, "messages": [message]} for message in (
        {"role": "user"}, {"content": "x"}, {"role": "robot", "content": "x"}, {**USER, "content": 3},
        {**USER, "content": None}, {"role": ["user"]}, {**USER, "content": [{"type": "text"}]},
        {**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, {"role": "tool", "content": "x"},
        {**USER, "colour": "red"}, {"role": "assistant", "tool_calls": [{"id": "x"}]},
        {"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "f"}}]},
        {"role": "assistant", "audio": {"id": "x"}},
    )),
    *({**BASE, **fields} for fields in (
        {"stream": "yes"}, {"stream": 1}, {"stream_options": {"include_usage": True}}, {"max_tokens": 0},
        {"stream": True, "stream_options": 3}, {"max_tokens": 1.5}, {"max_tokens": "8"},
        {"max_completion_tokens": True}, {"stop": 3}, {"stop": [""]}, {"stop": ""}, {"stop": ["x"] * 17},
        {"temperature": 3}, {"temperature": "hot"}, {"temperature": -1}, {"top_p": 0}, {"tools": {}}, {"tools": [{}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]}, {"tools": [TOOL] * 129},
        {"tools": [{"type": "code", "function": {"name": "x"}}]}, {"prompt": "x"}, {"metadata": {"a": 1}},
        {"Model": "m"},
    )),
]  # fmt: skip
DEEP = b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
RAW = [
    b"", b"{", b"\xff\xfe", b"[" * 50_000, DEEP, b'{"model": NaN}', b"\x00", json.dumps(BASE).encode("utf-16"),
    json.dumps({**BASE, "messages": [{"role": "user", "content": "\ud800"}]}).encode(),
    json.dumps({**BASE, "\udfff": 1}).encode(), b'{"model": "m", "messages": [{"role": "user", "content": 1e999}]}',
    b'{"model": ' + b"9" * 10_000 + b"}", json.dumps(BASE).encode() + b"x", json.dumps(BASE).encode() * 2,
]  # fmt: skip


def test_a_bad_request_says_why() -> None:
    for body in [*(json.dumps(body).encode() for body in BAD), *RAW]:
        with pytest.raises(RequestError) as caught:
            read_request(body)
        assert len(str(caught.value)) > 10, body[:300]
