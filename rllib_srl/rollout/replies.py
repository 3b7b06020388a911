"""Call an environment and validate its reply, inside the worker thread, where a wrong object affects no other episode.

    construct(creator)   -> Constructed(creator, env, stop_strings)
    reset(env, prompt)   -> Reply(observation, info)
    step(env, text, ...) -> Reply(observation, reward, is_terminated, is_truncated, stop_reason, info)

A chat with an environment that has `opening_messages` (a list of {"role", "content"}, [] for none) begins with them, in
place of the observation as one message of the user. An environment's `hear_turn(token_ids, version)`, if it has one, is
called with the tokens of each turn before its step.

An environment that holds its own conversations (`rllib_srl.envs.agents`) names the next one in
`info["conversation"]`, the fields of an `Ask` as JSON, in place of an observation to append. It is stepped by
`answer_call` and `refuse_call` then, and `info["answered"]` has the message that its agent got.

A reply that breaks the contract raises `BadReplyError`; the episode then ends as if the
environment had crashed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rllib_srl.common.environments import SEED_PREFIX
from rllib_srl.rollout.conversations import Ask
from rllib_srl.types import Prompt, StopReason

ROLES = ("user", "tool")

_PLAIN = (str, int, float, bool, type(None), np.number, np.bool_)
# The stop reasons an environment may report: those caused by the policy, and a grader's timeout.
_ENDINGS = {r.value: r for r in StopReason if not r.is_infrastructure or r is StopReason.ENV_TIMEOUT}


class BadReplyError(ValueError):
    """An environment's reply breaks the contract."""


@dataclass(frozen=True, slots=True)
class Constructed:
    """An environment instance, its creator, the strings that end a turn in it, and its `abandon`, if it has one.

    `abandon` is called from another thread when a call of the environment hangs and nobody waits for it any more.
    """

    creator: Callable[[], Any]
    env: Any
    stop_strings: tuple[str, ...]
    abandon: Callable[[], None] | None = None

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


@dataclass(frozen=True, slots=True)
class Reply:
    """One validated reply.

    Invariant: `observation` is a plain str that can be encoded as UTF-8, `reward` is finite.
    """

    observation: str
    reward: float = 0.0
    is_terminated: bool = False
    is_truncated: bool = False
    stop_reason: StopReason | None = None  # from the info of the last step, if it names one
    info: dict[str, Any] = field(default_factory=dict)
    tools: str = ""  # of a reset: JSON of the tool schemas for the chat template; empty if none
    role: str = "user"  # role of the observation in a chat: "user", or "tool" for a tool's result
    system: str = ""  # of a reset: the system prompt of the episode; empty if none
    pass_reward: float | None = None  # of a reset: the environment's own lowest reward that counts as a pass
    ask: Ask | None = None  # the conversation to continue; None for an observation
    answered: str = ""  # JSON of the message with which the last call was answered; "" if nobody got it
    is_unpaid: bool = False  # of a reset: the environment pays no reward, people rate the answers
    messages: tuple[dict[str, str], ...] = ()  # of a reset: the observation as a conversation; () for one message


def construct(creator: Callable[[], Any]) -> Constructed:
    """Construct an environment and read its `stop_strings`, empty if it has none."""
    env = creator()
    stop = attribute(env, "stop_strings", ())
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise BadReplyError(f"stop_strings = {stop!r}; expected a tuple of non-empty strings")
    return Constructed(creator, env, tuple(stop), attribute(env, "abandon", None))


def reset(env: Any, prompt: Prompt) -> Reply:
    """Reset the environment to `prompt`: by prompt id if it has `prompt_ids`, else with the id as seed.

    The reply's info has `can_iterate` (whether the policy can improve its answer) if the environment defines it: in
    the info of the reset or, for all episodes, as an attribute.
    """
    if attribute(env, "prompt_ids", None) is not None:
        options = {"prompt_id": prompt.prompt_id, "history": list(prompt.history)}
        answer = env.reset(options={**options, "step": prompt.step} if prompt.step else options)
    else:
        answer = env.reset(seed=_seed_of(prompt))
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise BadReplyError(f"reset returned {_shape(answer)}; expected (observation, info)")
    ask, info = _ask(answer[1]), _plain_info(answer[1])
    lowest = attribute(env, "pass_reward", None)
    can_iterate = attribute(env, "can_iterate", None)
    if isinstance(can_iterate, bool):
        info.setdefault("can_iterate", can_iterate)
    return Reply(
        _text(answer[0]),
        info=info,
        tools=_tools(attribute(env, "tool_schemas", ())),
        system=_text(attribute(env, "system_prompt", ""), "system_prompt"),
        pass_reward=None if lowest is None else _number(lowest, "pass_reward"),
        ask=ask,
        is_unpaid=attribute(env, "is_unpaid", False) is True,
        messages=_messages(attribute(env, "opening_messages", ())),
    )


def step(env: Any, text: str, token_ids: Sequence[int] = (), version: int = 0) -> Reply:
    """Pass one turn of the policy to the environment; `version` is that of the weights that ended it."""
    if (hear := attribute(env, "hear_turn", None)) is not None:
        hear(token_ids, version)
    return _stepped(env.step(text))


def answer(env: Any, text: str, reason: str, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Reply:
    """Answer the call of an environment that holds conversations; see `step` and `Turn.reason`."""
    take = attribute(env, "answer_call", None)
    return _of_call(_stepped(take(text, reason, len(prompt_ids), len(token_ids), prompt_ids, token_ids)))


def refuse(env: Any, code: str, message: str) -> Reply:
    """Refuse the call of an environment that holds conversations; see `step`."""
    return _of_call(_stepped(attribute(env, "refuse_call", None)(code, message)))


def _of_call(reply: Reply) -> Reply:
    if reply.ask is None and not (reply.is_terminated or reply.is_truncated):
        raise BadReplyError('the step returned no info["conversation"]; expected one until the episode ends')
    return reply


def _stepped(answer: Any) -> Reply:
    if not isinstance(answer, tuple) or len(answer) != 5:
        raise BadReplyError(
            f"step returned {_shape(answer)}; expected (observation, reward, terminated, truncated, info)"
        )
    observation, reward, terminated, truncated, info = answer
    is_over = bool(terminated) or bool(truncated)
    ask, answered = _ask(info), _taken(info, "answered")
    return Reply(
        observation=_text(observation),
        reward=_number(reward),
        is_terminated=bool(terminated),
        is_truncated=bool(truncated),
        stop_reason=_special_ending(info) if is_over else None,
        info=_plain_info(info),
        role=_role(info),
        ask=None if is_over else ask,
        answered=answered,
    )


def attribute(env: Any, name: str, default: Any) -> Any:
    """Return attribute `name` of `env`, else of its `unwrapped` environment: gymnasium's wrappers hide attributes."""
    return getattr(env, name, getattr(getattr(env, "unwrapped", env), name, default))


def _seed_of(prompt: Prompt) -> int:
    try:
        seed = int(prompt.prompt_id.removeprefix(SEED_PREFIX))
    except ValueError:
        seed = -1
    if seed < 0 or prompt.history or prompt.step:
        asked = f" and step {prompt.step!r}" if prompt.step else ""
        raise BadReplyError(
            f"prompt_id = {prompt.prompt_id!r} with {len(prompt.history)} turns of history{asked}; expected a seed, no "
            "history and no step: this environment has no prompt_ids"
        )
    return seed


def _text(value: Any, what: str = "the observation") -> str:
    if not isinstance(value, str):
        raise BadReplyError(f"{what} is {_shape(value)}; expected a str (text in, text out)")
    text = str.__str__(value)  # a subclass may override anything
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadReplyError(f"{what} cannot be encoded as UTF-8: {error.reason} at {error.start}") from None
    return text


def _number(number: Any, what: str = "the reward") -> float:
    if not isinstance(number, (int, float, np.number, np.bool_)) or isinstance(number, np.complexfloating):
        raise BadReplyError(f"{what} is {_shape(number)}; expected a number")
    try:
        value = float(number)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise BadReplyError(f"{what} is {value}; expected a finite number")
    return value


def _tools(schemas: Any) -> str:
    if not isinstance(schemas, (list, tuple)) or not all(isinstance(schema, dict) for schema in schemas):
        raise BadReplyError(f"tool_schemas is {_shape(schemas)}; expected a list of JSON schemas, one per tool")
    try:
        return json.dumps(schemas) if schemas else ""
    except (TypeError, ValueError) as error:
        raise BadReplyError(f"tool_schemas cannot be written as JSON: {error}") from None


def _messages(messages: Any) -> tuple[dict[str, str], ...]:
    is_list = isinstance(messages, list | tuple)
    if not is_list or not all(isinstance(message, dict) and {*message} == {"role", "content"} for message in messages):
        raise BadReplyError(
            f"opening_messages is {_shape(messages)}; expected a list of mappings with 'role' and 'content'"
        )
    return tuple(
        {name: _text(value, f"the {name} of a message") for name, value in message.items()} for message in messages
    )


def _role(info: Any) -> str:
    role = info.get("role", "user") if isinstance(info, dict) else "user"
    if role not in ROLES:
        raise BadReplyError(f'info["role"] = {role!r}; expected one of {", ".join(ROLES)}')
    return role


def _ask(info: Any) -> Ask | None:
    if not (text := _taken(info, "conversation")):
        return None
    try:
        return Ask.read(text)
    except ValueError as error:
        raise BadReplyError(str(error)) from error


def _taken(info: Any, name: str) -> str:
    """Remove a text from the info and return it, "" if it is missing."""
    text = info.pop(name, "") if isinstance(info, dict) else ""
    if not isinstance(text, str):
        raise BadReplyError(f'info["{name}"] is {_shape(text)}; expected text')
    return text


def _special_ending(info: Any) -> StopReason | None:
    name = info.get("stop_reason") if isinstance(info, dict) else None
    if name is None:
        return None
    ending = _ENDINGS.get(str.__str__(name)) if isinstance(name, str) else None
    if ending is None:
        raise BadReplyError(f'info["stop_reason"] = {name!r}; expected one of {", ".join(_ENDINGS)}')
    return ending


def _plain_info(info: Any) -> dict[str, Any]:
    """Keep the plain values of `info`: anything else may be huge, or impossible to send to another process."""
    if not isinstance(info, dict):
        raise BadReplyError(f"the info is {_shape(info)}; expected a dict")
    return {key: value for key, value in info.items() if type(key) is str and isinstance(value, _PLAIN)}


def _shape(value: Any) -> str:
    kind = f"of type {type(value).__name__}"
    return f"{kind} with {len(value)} entries" if isinstance(value, (tuple, list)) else kind
