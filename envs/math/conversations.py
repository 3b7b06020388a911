"""Read the messages of a row: those of OpenAI's API, TRL and verl, of ShareGPT, and the JSON text of either.

    of_messages([{"role": "system", ...}, {"role": "user", ...}, {"role": "assistant", ...}], "prompt")
        the messages up to the question, and the last turn of the assistant, which is the solution

A turn of the assistant before the question is history. Roles are system, user and assistant in any case; "developer"
means the first, "human" the second, "gpt" and "model" the third.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rllib_srl.envs.math.data_files import RowError

_ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
          "gpt": "assistant", "model": "assistant"}  # fmt: skip
_LIKE_MESSAGES = re.compile(r"\[?\s*\{[^{}]*['\"](?:role|from)['\"]\s*:")


def unwritten(value: Any) -> Any:
    """Return the list or object that a text is the JSON (or Python) form of, as tables write it; else the value."""
    if not isinstance(value, str) or not value.strip().startswith(("[", "{")):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            parsed = read(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return parsed if isinstance(parsed, list | dict) else value
    return value


def written_messages(asked: str, name: str) -> Any:
    """Return the messages that a text is the JSON form of, else the text."""
    if not _LIKE_MESSAGES.match(asked.strip()):
        return asked
    messages = unwritten(asked)
    if isinstance(messages, str):
        raise RowError(name, f"= {shown(asked)}, which looks like a list of messages but is not JSON; expected "
                             '[{"role": "user", "content": "..."}]')  # fmt: skip
    return messages


def as_messages(value: Any) -> Any:
    """Return a list of messages for other forms of one: a list in a list, one message, or an object of lists."""
    if isinstance(value, Mapping) and isinstance(value.get("role"), list) and isinstance(value.get("content"), list):
        pairs = zip(value["role"], value["content"], strict=False)  # as `datasets` stores a sequence of objects
        return [{"role": role, "content": content} for role, content in pairs]
    if isinstance(value, Mapping) and "role" in value and "content" in value:
        return [value]
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value


def of_messages(messages: Sequence[Any], name: str) -> tuple[tuple[Mapping[str, str], ...], str]:
    """Return the messages up to the question, and the assistant's last message, which is not part of the question."""
    said = []
    for message in messages:
        keys = ("from", "value") if isinstance(message, Mapping) and "from" in message else ("role", "content")
        role, content = (message.get(key) if isinstance(message, Mapping) else None for key in keys)
        content = of_parts(content, name)
        if not isinstance(content, str) or not isinstance(role, str):
            raise RowError(name, f"has the message {shown(message)}; expected texts 'role' and 'content'")
        role = role.strip().lower()
        if role not in _ROLES:
            expected = "system, user or assistant: an environment with tools plays what others say"
            raise RowError(name, f"has a message of the role {role!r}; expected {expected}")
        said.append({"role": _ROLES[role], "content": content.strip()})
    solution = said.pop()["content"] if said and said[-1]["role"] == "assistant" else ""
    if said and all(entry["role"] != "user" for entry in said):
        raise RowError(name, "has no message of the user; expected the question in one")
    return tuple(said), solution


def of_parts(content: Any, name: str) -> Any:
    """Return the text of a content that is a list of parts, as in OpenAI's API; any other content as it is."""
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list | tuple):
        return content
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RowError(name, f"has a message with a part of type {kind!r}; expected parts of text only")
        texts.append(text)
    return "".join(texts)


def as_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Return a conversation as text: with names, if the assistant has spoken in it."""
    if any(message["role"] == "assistant" for message in messages):
        return "\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in messages)
    return "\n".join(message["content"] for message in messages)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}... ({len(text)} characters)"
