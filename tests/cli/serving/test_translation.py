"""What a client's request becomes for vLLM, and what its answer becomes for the client and for training."""

import json
from typing import Any

import pytest

from rllib_srl.cli.serving.translation import Collected, SamplingDefaults, ServedRequest, forwarded
from rllib_srl.envs.agents.requests import RequestError, read_request

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
USUAL = SamplingDefaults(1.0, 64, (), shows_tools=True)
WITHOUT_TOOLS = SamplingDefaults(1.0, 64, ())
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


def asked(**fields: Any) -> ServedRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return read_request(json.dumps(body).encode(), ServedRequest)


def sent(usual: SamplingDefaults = USUAL, **fields: Any) -> dict[str, Any]:
    return forwarded(asked(**fields), usual, "v0")[0]


@pytest.mark.parametrize(("ends", "wanted"), [((), None), ((7, 9), [7, 9])])
def test_what_closes_a_turn_in_the_template_ends_an_answer(ends: tuple[int, ...], wanted: list[int] | None) -> None:
    assert sent(SamplingDefaults(1.0, 64, ("\n",), ends)).get("stop_token_ids") == wanted


@pytest.mark.parametrize(("form", "stop"), [({"type": "text"}, ["\n", "x"]), (SCHEMA, ["x"])])
def test_the_usual_stop_strings_do_not_cut_an_answer_whose_form_is_forced(form: Any, stop: list[str]) -> None:
    assert sent(SamplingDefaults(1.0, 64, ("\n",)), response_format=form, stop="x")["stop"] == stop


def test_a_greedy_request_may_say_so_twice() -> None:
    body = sent(temperature=0, top_p=0)
    assert (body["temperature"], body["top_p"]) == (0, 1.0)  # vLLM refuses a top_p of 0


@pytest.mark.parametrize(
    ("fields", "wanted", "why"),
    [
        ({"stop": "x"}, {"stop": ["x"]}, ""),
        ({"max_completion_tokens": 3, "max_tokens": 9}, {"max_tokens": 3}, ""),
        ({"seed": 3}, {"seed": 3}, ""),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": True, "top_logprobs": 4}, ""),
        ({"n": 3}, {"n": 3}, "n = 3"),
        ({"presence_penalty": 0.5, "min_p": 0}, {"presence_penalty": 0.5, "min_p": 0}, "presence_penalty = 0.5"),
        ({"response_format": {"type": "text"}}, {}, ""),
        ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": SCHEMA}, {"response_format": SCHEMA}, "response_format"),
        ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, ""),  # the calls are read here
        ({"tools": [TOOL], "tool_choice": "required"}, {"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, {"parallel_tool_calls": False}, ""),  # for forced ones
    ],
)  # fmt: skip
def test_what_clients_ask_for_is_passed_on_and_what_edits_probabilities_is_not_trained_on(
    fields: dict[str, Any], wanted: dict[str, Any], why: str
) -> None:
    body, untrainable = forwarded(asked(**fields), USUAL, "v0")
    assert {name: body[name] for name in wanted} == wanted
    assert why in untrainable and bool(why) == bool(untrainable)
    assert "response_format" in body or "response_format" not in wanted


@pytest.mark.parametrize(("fields", "usual", "param"), [
    ({"tools": [TOOL]}, WITHOUT_TOOLS, "tools"),
    ({"messages": [{"role": "tool", "content": "7", "tool_call_id": "1"}]}, WITHOUT_TOOLS, "messages"),
    ({"tool_choice": "required"}, USUAL, "tool_choice"),
    ({"top_logprobs": 2}, USUAL, "top_logprobs"),
    ({"response_format": {"type": "json_schema"}}, USUAL, "response_format"),
])  # fmt: skip
def test_contradictions_and_tools_that_no_template_shows_are_refused(
    fields: dict[str, Any], usual: SamplingDefaults, param: str
) -> None:
    with pytest.raises(RequestError) as error:
        forwarded(asked(**fields), usual, "v0")
    assert error.value.param == param


def test_a_seed_is_left_out_where_the_engine_would_end_at_it() -> None:
    assert "seed" not in sent(SamplingDefaults(1.0, 64, (), can_seed=False), seed=3)


def choice(index: int, text: str, ids: list[int], reason: str | None = "stop", name: str = "message") -> dict[str, Any]:
    listed = {"content": [{"token": "x", "logprob": -0.5} for _ in ids]}
    said = {"role": "assistant", "content": text}
    return {"index": index, name: said, "token_ids": ids, "logprobs": listed, "finish_reason": reason}


def test_calls_are_read_from_the_text_that_is_logged() -> None:
    answer = Collected("chatcmpl-7", 1, asked(tools=[TOOL]))
    reply = answer.take({"prompt_token_ids": [1], "choices": [choice(0, f"I add. {CALL}", [5, 6])]})
    (found,) = reply["choices"]
    assert found["finish_reason"] == "tool_calls" and found["message"]["content"] == "I add."
    (call,) = found["message"]["tool_calls"]
    assert call == {"id": "call_7_0_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    assert answer.text == f"I add. {CALL}"
    assert answer.tokens("")[0].ids == [5, 6]  # type: ignore[union-attr]


def test_of_several_choices_the_first_is_logged_and_the_stream_goes_on_to_the_last() -> None:
    answer = Collected("c", 1, asked(n=2, logprobs=True))
    for index, text, reason in ((1, "b", None), (0, "a", "stop"), (1, "c", "length")):
        assert answer.finish_reason == ""
        piece = answer.take({"choices": [choice(index, text, [index], reason, "delta")]})
        assert piece["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5 and "token_ids" not in str(piece)
    assert (answer.text, answer.ids, answer.finish_reason) == ("a", [0], "stop")
