"""Fields of a request that only servers of inference know: which of their values are taken, and why no other.

A field without effect on the distribution that the policy samples from is taken, whatever it says (`INERT`) or at its
neutral value (`NEUTRAL`). Another value would make an answer that the learner's log-probs do not describe, or one that
this server cannot give: it is refused by name, with what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Notes for a server's owner, hints for its caches and its speed, and the form of an answer's report.
INERT = frozenset(
    {
        "prompt_cache_retention", "cache_salt", "priority", "request_id", "verbosity", "prediction",
        "include_reasoning", "return_tokens_as_token_ids", "spaces_between_special_tokens", "mm_processor_kwargs",
        "length_penalty",  # of beam search alone
    }
)  # fmt: skip

_SAMPLED = (
    "the learner computes the log-probs of the policy's whole distribution at the run's temperature; leave it out, or "
    "set sampling in the run"
)
_FORM = "answers are not constrained to a form; ask for it in the messages and check the answer in the agent"
_ONE = "a call gets one answer; make several calls"
_REPORT = "answers come without log-probs; the run records them itself"
_TEMPLATE = "the chat template of the run's model renders the messages; change it in the model's directory"
_TEXT = "the policy reads and writes text alone; leave it out"
_TOKENS = "the policy's turn ends with its template; use max_tokens and stop"
_CHOICE = "the policy decides whether it calls a tool; set auto in the agent's client and ask for calls in the messages"


def _numbers(*neutral: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and value in neutral


def _flag(neutral: bool) -> Callable[[Any], bool]:
    return lambda value: value is neutral


def _is_empty(value: Any) -> bool:
    return value in ([], {}, "") and not isinstance(value, int | float)


def _never(value: Any) -> bool:
    return False


def _is_bias_of_zero(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_numbers(0), value.values()))


# name -> (whether a value is neutral, the neutral value, what to do); None is always neutral
NEUTRAL: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "presence_penalty": (_numbers(0), "0", _SAMPLED),
    "frequency_penalty": (_numbers(0), "0", _SAMPLED),
    "repetition_penalty": (_numbers(1), "1", _SAMPLED),
    "min_p": (_numbers(0), "0", _SAMPLED),
    "typical_p": (_numbers(1), "1", _SAMPLED),
    "top_a": (_numbers(0), "0", _SAMPLED),
    "logit_bias": (_is_bias_of_zero, "{}", _SAMPLED),
    "bad_words": (_is_empty, "[]", _SAMPLED),
    "allowed_token_ids": (_never, "null", _SAMPLED),
    "logits_processors": (_is_empty, "[]", _SAMPLED),
    "thinking_token_budget": (_never, "null", _SAMPLED),
    "min_tokens": (_numbers(0), "0", _TOKENS),
    "ignore_eos": (_flag(False), "false", _TOKENS),
    "stop_token_ids": (_is_empty, "[]", _TOKENS),
    "include_stop_str_in_output": (_flag(False), "false", _TOKENS),
    "skip_special_tokens": (_flag(True), "true", _TOKENS),
    "truncate_prompt_tokens": (_numbers(-1), "null", "a prompt is used as it is; shorten the messages in the agent"),
    "n": (_numbers(1), "1", _ONE),
    "best_of": (_numbers(1), "1", _ONE),
    "use_beam_search": (_flag(False), "false", _ONE),
    "logprobs": (_flag(False), "false", _REPORT),
    "top_logprobs": (_numbers(0), "0", _REPORT),
    "prompt_logprobs": (_never, "null", _REPORT),
    "response_format": (lambda value: value == {"type": "text"}, '{"type": "text"}', _FORM),
    "structured_outputs": (_is_empty, "null", _FORM),
    **{f"guided_{kind}": (_never, "null", _FORM) for kind in ("json", "regex", "choice", "grammar", "json_object")},
    "tool_choice": (lambda value: value in ("auto", "none"), "auto or none", _CHOICE),
    "functions": (_is_empty, "[]", "functions are an older form; use tools"),
    "function_call": (lambda value: value in ("auto", "none"), "auto or none", _CHOICE),
    "chat_template": (_never, "null", _TEMPLATE),
    "add_generation_prompt": (_flag(True), "true", _TEMPLATE),
    "continue_final_message": (_flag(False), "false", _TEMPLATE),
    "add_special_tokens": (_flag(False), "false", _TEMPLATE),
    "documents": (_is_empty, "[]", _TEMPLATE),
    "echo": (_flag(False), "false", "an answer does not repeat its prompt; leave it out"),
    "modalities": (lambda value: value == ["text"], '["text"]', _TEXT),
    "audio": (_never, "null", _TEXT),
    "web_search_options": (_never, "null", _TEXT),
}  # fmt: skip


def error_of(name: str, value: Any) -> str:
    """Return why a field cannot be taken, "" if it can, or if it is not one of `NEUTRAL`."""
    if value is None or name not in NEUTRAL:
        return ""
    is_neutral, neutral, advice = NEUTRAL[name]
    return "" if is_neutral(value) else f"{name} = {value!r:.60} is not supported, expected {neutral}: {advice}"
