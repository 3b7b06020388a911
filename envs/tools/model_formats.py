"""Call formats of models that were trained on tool calls: XML, JSON and Python lists.

Sources: BFCL (Patil et al. 2025); the chat templates of Qwen 2.5 and 3, Qwen3-Coder, Hermes, Llama 3.1 and Llama 4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rllib_srl.envs.tools.call_format import (
    MAX_CALLS,
    CallFormat,
    Tools,
    after_thinking,
    between,
    described_line,
    without_fence,
)
from rllib_srl.envs.tools.calls import (
    CallError,
    Said,
    ToolCall,
    call_from_json,
    loaded,
    loaded_at,
    parsed_calls,
    shown,
    written_call,
)
from rllib_srl.envs.tools.tool import Tool

_OPENING = re.compile("<tool_call>|<function=")


class XmlFormat(CallFormat):
    """JSON or parameters in tags, as Hermes, Qwen and Qwen3-Coder write calls. Invariant: as in `CallFormat`."""

    has_plain_answers = True

    def stop_strings(self, tool_names: Sequence[str]) -> tuple[str, ...]:
        """Return the closing tags."""
        return ("</tool_call>", "</function>", "</answer>")

    def instructions(self, tools: Sequence[Tool]) -> str:
        """List the schemas, and show the tag."""
        return (
            f"Tools:\n{_schema_lines(tools)}To call a tool, write "
            '<tool_call>{"name": "...", "arguments": {...}}</tool_call>. The result follows in <tool_response>. '
            "To finish, write <answer>the answer</answer>.\n\n"
        )

    def _read(self, turn: str, tools: Tools) -> Said:
        text = after_thinking(turn)
        calls, where = [], 0
        while (opening := _OPENING.search(text, where)) is not None:
            if opening[0] == "<tool_call>":
                body, where = between(text, opening[0], "</tool_call>", opening.start())
                calls += _xml_body(body.strip())
            else:
                call, where = _function_tag(text, opening.start())
                calls.append(call)
            if len(calls) > MAX_CALLS:
                raise CallError(f"more than {MAX_CALLS} calls in a turn")
        return Said(calls=tuple(calls), text=turn) if calls else _answered(text)

    def call(self, *calls: ToolCall) -> str:
        """Write one tag, and in it an object, or a list of several."""
        return f"<tool_call>\n{_json_calls(calls)}\n</tool_call>"

    def answer(self, answer: str) -> str:
        """Write the answer's tag."""
        return f"<answer>{answer}</answer>"

    def results(self, results: Sequence[str]) -> str:
        """Write each result in its tag."""
        return "".join(f"<tool_response>\n{result}\n</tool_response>\n" for result in results)


class JsonFormat(CallFormat):
    """Bare JSON: an object or a list of calls, or an OpenAI message. Invariant: as in `CallFormat`."""

    has_plain_answers = True

    def instructions(self, tools: Sequence[Tool]) -> str:
        """List the schemas, and show the object."""
        return (
            f'Tools:\n{_schema_lines(tools)}To call a tool, write {{"name": "...", "arguments": {{...}}}} and nothing '
            'else. The result follows as JSON. To finish, write {"answer": "the answer"}.\n\n'
        )

    def _read(self, turn: str, tools: Tools) -> Said:
        text = without_fence(after_thinking(turn).strip().removeprefix("<|python_tag|>").removeprefix("[TOOL_CALLS]"))
        if not text.startswith(("{", "[")):
            return _answered(text)
        values: list[Any] = []
        where = 0
        while where < len(text):
            value, where = loaded_at(text, where)
            values += value if isinstance(value, list) else [value]
            where += len(text[where:]) - len(text[where:].lstrip("; \n\t\r"))
        if len(values) == 1 and isinstance(values[0], dict):
            (message,) = values
            if isinstance(message.get("answer"), (str, int, float)) and "name" not in message:
                return Said(answer=str(message["answer"]), text=turn)
            if isinstance(message.get("tool_calls"), list):
                values = message["tool_calls"]
        if not values:
            return Said(text=turn, error="an empty list; expected at least one call, or an answer")
        return Said(calls=tuple(call_from_json(value) for value in values), text=turn)

    def call(self, *calls: ToolCall) -> str:
        """Write one object, or a list of several."""
        return _json_calls(calls) + "\n"

    def answer(self, answer: str) -> str:
        """Write the answer's object."""
        return json.dumps({"answer": answer}, ensure_ascii=False) + "\n"

    def results(self, results: Sequence[str]) -> str:
        """Write one object per result."""
        return "".join(json.dumps({"result": result}, ensure_ascii=False) + "\n" for result in results)


class PythonFormat(CallFormat):
    """A list of Python calls, `[f(a=1), g()]`. Invariant: as in `CallFormat`."""

    has_plain_answers = True

    def instructions(self, tools: Sequence[Tool]) -> str:
        """List the signatures, and show the list."""
        listed = "".join(f"{described_line(tool)}\n" for tool in tools)
        return (
            f"Tools:\n{listed}To call tools, write a list such as [name(key=value), other(key=value)] and nothing "
            "else. The results follow. To finish, write 'Answer:' and the answer.\n\n"
        )

    def _read(self, turn: str, tools: Tools) -> Said:
        text = without_fence(after_thinking(turn).strip().removeprefix("<|python_start|>"))
        text = text.removesuffix("<|python_end|>").strip()
        name = re.match(r"[A-Za-z_][\w.]*(?=\()", text, re.ASCII)
        if text.startswith("[") or (name is not None and name.group() in tools):
            return Said(calls=tuple(parsed_calls(text)), text=turn)
        return _answered(text)

    def call(self, *calls: ToolCall) -> str:
        """Write the list."""
        return f"[{', '.join(map(written_call, calls))}]\n"

    def answer(self, answer: str) -> str:
        """Write the answer's line."""
        return f"Answer: {answer}\n"

    def results(self, results: Sequence[str]) -> str:
        """Write each result on a line."""
        return "".join(f"Result: {result}\n" for result in results)


def _answered(text: str) -> Said:
    """Return the answer of a turn without calls: the content of its tag, else the text after its last "Answer:"."""
    where = text.rfind("<answer>")
    if where >= 0:
        return Said(answer=text[where + len("<answer>") :].partition("</answer>")[0].strip(), text=text)
    _, cue, answer = text.rpartition("Answer:")
    if cue and answer.strip():
        return Said(answer=answer.strip(), text=text)
    return Said(text=text) if text.strip() else Said(text=text, error="an empty turn; expected a call or an answer")


def _xml_body(body: str) -> list[ToolCall]:
    if body.startswith("<function="):
        return [_function_tag(body, 0)[0]]
    if body.startswith(("{", "[")):
        value = loaded(body)
        return [call_from_json(item) for item in (value if isinstance(value, list) else [value])]
    return parsed_calls(body)


def _function_tag(text: str, where: int) -> tuple[ToolCall, int]:
    """Read <function=name>{json}</function>, or <function=name> with one <parameter=key>value</parameter> each."""
    body, end = between(text, "<function=", "</function>", where)
    name, closed, inside = body.partition(">")
    if not closed or not name.strip():
        raise CallError("<function= is not closed; expected <function=name>")
    if inside.strip().startswith("{"):
        return call_from_json({"name": name.strip(), "arguments": loaded(inside.strip())}), end
    values: dict[str, str] = {}
    at = 0
    while (opened := inside.find("<parameter=", at)) >= 0:
        parameter, at = between(inside, "<parameter=", "</parameter>", opened)
        key, closed, value = parameter.partition(">")
        if not closed or key.strip() in values:
            raise CallError(f"<parameter={key.strip()[:40]} cannot be read; expected each once, and closed")
        values[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    return ToolCall(name.strip(), (), dict(values), is_text=True), end


def _json_call(call: ToolCall) -> str:
    if call.args:
        raise ValueError(f"call {shown(written_call(call))} has arguments by position; JSON needs names")
    return json.dumps({"name": call.name, "arguments": call.kwargs}, ensure_ascii=False)


def _json_calls(calls: Sequence[ToolCall]) -> str:
    listed = [_json_call(call) for call in calls]
    return listed[0] if len(listed) == 1 else f"[{', '.join(listed)}]"


def _schema_lines(tools: Sequence[Tool]) -> str:
    return "".join(json.dumps(tool.schema()["function"], ensure_ascii=False) + "\n" for tool in tools)
