"""Read and check the body of a request to `/v1/chat/completions`.

    read_request(b'{"model": "policy", "messages": [...]}')   ChatRequest, or RequestError: what is wrong, and where

Unknown names are refused, as OpenAI's server does, and so is what this one cannot do: several choices, log-probs,
images, forced calls, JSON modes, penalties (`neutral`). `temperature`, `top_p`, `top_k` and `seed` have no effect: the
run's own values are used in their place, since the policy must be sampled as the learner computes its log-probs.
`chat_template_kwargs` and `reasoning_effort` are arguments of the chat template: the tokens that it renders are
recorded, so the learner sees the same prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rllib_srl.envs.agents.neutral import INERT, NEUTRAL, error_of

MAX_MESSAGES = 2000
MAX_DEPTH = 60  # of nested JSON; far below what Python's own functions can follow
SAMPLING = ("temperature", "top_p", "top_k", "seed")  # the run's own values are used in their place
# Arguments of a tokeniser's rendering that are not for its template.
NOT_FOR_TEMPLATES = frozenset(
    {
        "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
        "continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding",
        "truncation", "max_length", "tokenizer_kwargs",
    }
)  # fmt: skip


class RequestError(ValueError):
    """A request that cannot be answered; `param` names the field at fault, if there is one."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str
    cache_control: Any = None


Content = str | list[TextPart]


class SystemMessage(_Strict):
    """Instructions."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None
    cache_control: Any = None


class UserMessage(_Strict):
    """A question."""

    role: Literal["user"]
    content: Content
    name: str | None = None
    cache_control: Any = None


class CalledFunction(_Strict):
    """Name and arguments of a call; the arguments are the text of a JSON object."""

    name: str
    arguments: str


class CallOfTool(_Strict):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # some clients keep it from a stream
    provider_specific_fields: Any = None


class AssistantMessage(_Strict):
    """An answer of the policy, or an example of one."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[CallOfTool] | None = None
    name: str | None = None
    # Always empty in what this server returns; clients send them back.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)
    parsed: None = None
    # A thought that the client keeps apart: shown to the template, which may have a place for it.
    reasoning: str | None = None
    reasoning_content: str | None = None
    # Other forms of the same, and notes of a provider: without effect.
    reasoning_details: Any = None
    thinking_blocks: Any = None
    provider_specific_fields: Any = None
    cache_control: Any = None


class ToolMessage(_Strict):
    """The result of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None
    cache_control: Any = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionSchema(_Strict):
    """A tool that the policy may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSchema(_Strict):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionSchema
    cache_control: Any = None


class StreamOptions(_Strict):
    """What a stream holds besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect
    continuous_usage_stats: Literal[False] | None = None


class ChatRequest(_Strict):
    """The body of a request, without the fields of `NEUTRAL` and `INERT`; see the module."""

    taken: ClassVar[frozenset[str]] = frozenset()  # fields of `NEUTRAL` that a sub-class takes at any value

    model: str
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[ToolSchema] | None = Field(default=None, max_length=128)
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None  # False: an answer has its first call alone
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)  # engines cannot pass larger ones on
    seed: int | None = None
    return_token_ids: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=20)
    chat_template_kwargs: dict[str, Any] | None = None
    # Notes for a server's owner, without effect on an answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def stops(self) -> tuple[str, ...]:
        """Return the strings that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def plain_messages(self) -> list[dict[str, Any]]:
        """Return the messages as `plain_message` writes them."""
        return [plain_message(message.model_dump(exclude_none=True)) for message in self.messages]

    def template_arguments(self) -> dict[str, Any]:
        """Return the arguments of the chat template."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return {**effort, **(self.chat_template_kwargs or {})}

    def sampling(self) -> list[str]:
        """Return the names of given values in whose place the run's own are used."""
        return [name for name in SAMPLING if getattr(self, name) is not None]


R = TypeVar("R", bound=ChatRequest)
M = TypeVar("M", bound=BaseModel)


def read_object(body: bytes) -> Mapping[str, Any]:
    """Return the JSON object of a body.

    Raises:
        RequestError: it is not JSON, no object, nested too deeply, or no Unicode text.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
        _check_depth(value)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is valid in JSON, but no text
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise RequestError("the body has half of a surrogate pair; expected Unicode text") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise RequestError(f"the body is a {type(value).__name__}; expected a JSON object")
    return value


def fields_of(value: Mapping[str, Any], kind: type[M]) -> M:
    """Return the fields of an object as a model.

    Raises:
        RequestError: they are other ones.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        _refuse(error)


def read_request(body: bytes, kind: type[R] = ChatRequest) -> R:  # type: ignore[assignment]
    """Return the request, with the fields of its kind.

    Raises:
        RequestError: it is not JSON, or not a request that can be answered.
    """
    value = read_object(body)
    for name, field in value.items():
        if name not in kind.taken and (reason := error_of(name, field)):
            raise RequestError(reason, name)
    unread = (INERT | NEUTRAL.keys()) - kind.model_fields.keys()
    request = fields_of({name: field for name, field in value.items() if name not in unread}, kind)
    if len(request.stops()) > 16 or not all(request.stops()):
        raise RequestError("stop = ...; expected at most 16 texts, none of them empty", "stop")
    if request.top_p == 0 and request.temperature != 0:
        raise RequestError("top_p = 0; expected above 0, or temperature = 0 with it", "top_p")
    if taken := sorted(NOT_FOR_TEMPLATES & (request.chat_template_kwargs or {}).keys()):
        name = f"chat_template_kwargs.{taken[0]}"
        raise RequestError(f"{name} is set by the run; expected arguments that the chat template reads", name)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is given without stream = true", "stream_options")
    return request


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with a text as content and its calls' arguments as an object, as chat templates expect them.

    Two messages that mean the same are equal in this form.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    plain = {"role": role, "content": content}
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        plain["reasoning_content"] = thought
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": _arguments(call["function"]["arguments"])},
            }
            for call in calls
        ]
    return plain | {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return text  # what a policy wrote may be anything
    return value if isinstance(value, dict) else text


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number in JSON")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RecursionError
        lists = [list(v.values()) if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [v for parts in lists for v in parts]


def _refuse(error: ValidationError) -> NoReturn:
    """Raise the first errors as a `RequestError`."""
    errors = error.errors(include_url=False, include_context=False)
    lines = [f"{_place(detail['loc'])}: {_message_of(detail)}" for detail in errors[:3]]
    raise RequestError("; ".join(lines)[:600], _place(errors[0]["loc"])) from None


def _message_of(detail: Mapping[str, Any]) -> str:
    is_unknown = detail["type"] == "extra_forbidden"
    return "this endpoint does not know the field; leave it out" if is_unknown else str(detail["msg"])


def _place(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc))[:100]
