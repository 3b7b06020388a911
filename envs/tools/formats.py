"""Call formats: how a policy writes calls and answers, and how results are shown; `CALL_FORMATS` lists the classes.

    line     Tool: add(2, b=3)                  Result: 5                           Answer: 5
    tags     <search>capital of Chad</search>   <result>N'Djamena</result>          <answer>N'Djamena</answer>
    xml      <tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>  also <function=add>...</function>
    json     {"name": "add", "arguments": {"a": 2, "b": 3}}                         also lists, and OpenAI's messages
    python   [add(a=2, b=3)]                                                        BFCL's and Llama 4's
    native   the one of these that the model's chat template uses

"line" and "tags" suit base models that continue a transcript, the others models that were trained on tool calls.
A turn with calls has no answer: its other text is ignored. In "line" the first line of either kind counts.

Source of the tags: Search-R1 (Jin et al. 2025, arXiv 2503.09516); of the others see envs/tools/model_formats.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rllib_srl.envs.tools.call_format import CallFormat, Tools, after_thinking, between, described_line, without_fence
from rllib_srl.envs.tools.calls import Said, ToolCall, parsed_calls, written_call
from rllib_srl.envs.tools.model_formats import JsonFormat, PythonFormat, XmlFormat
from rllib_srl.envs.tools.tool import Tool

_BREAKS = "\n\r\v\f\x1c-\x1e\x85\u2028\u2029"  # where `str.splitlines` parts lines
_ACTION = re.compile(rf"(?:\A|(?<=[{_BREAKS}]))[^\S{_BREAKS}]*(?P<word>Tool|Answer):(?P<rest>[^{_BREAKS}]*)")


class LineFormat(CallFormat):
    """One action per line: `Tool: name(value, key=value)` or `Answer: text`. Invariant: as in `CallFormat`."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        """List the signatures and the line prefixes."""
        listed = "".join(f"{described_line(tool)}\n" for tool in tools)
        return (
            f"Tools:\n{listed}To call a tool, write a line such as 'Tool: name(value, key=value)'. A line 'Result:' "
            "follows. To finish, write a line 'Answer:' with the answer.\n\n"
        )

    def _read(self, turn: str, tools: Tools) -> Said:
        for action in _ACTION.finditer(turn):
            argument = action["rest"].strip()
            if action["word"] == "Tool":
                return Said(calls=tuple(self._calls(argument, tools)), text=turn)
            if argument:
                return Said(answer=argument, text=turn)
        return Said(text=turn, error="expected a line that begins with 'Tool:' or 'Answer:'")

    def _calls(self, argument: str, tools: Tools) -> list[ToolCall]:
        if self.bare_tool and not re.match(rf"\s*{re.escape(self.bare_tool)}\s*\(", argument):
            return [ToolCall(self.bare_tool, (argument,), is_text=True)]
        return parsed_calls(argument)

    def call(self, *calls: ToolCall) -> str:
        """Write the calls on one line."""
        is_bare = len(calls) == 1 and calls[0].name == self.bare_tool
        if is_bare:
            (value,) = (*calls[0].args, *calls[0].kwargs.values())
            return f"Tool: {value}\n"
        return f"Tool: {'; '.join(map(written_call, calls))}\n"

    def answer(self, answer: str) -> str:
        """Write the answer's line."""
        return f"Answer: {answer}\n"

    def results(self, results: Sequence[str]) -> str:
        """Write each result after "Result:"; one of several lines starts on the next line."""
        return "".join(f"Result: {result}\n" for result in results)


class TagFormat(CallFormat):
    """A tag named like the tool around its one text argument. Invariant: as in `CallFormat`."""

    def __init__(self, bare_tool: str = "", result_tag: str = "result"):
        super().__init__(bare_tool)
        self._result_tag = result_tag

    def stop_strings(self, tool_names: Sequence[str]) -> tuple[str, ...]:
        """Return the closing tags."""
        return tuple(f"</{name}>" for name in (*tool_names, "answer"))

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Show each tool's tag."""
        listed = "".join(f"<{tool.name}>{_first_name(tool)}</{tool.name}> {tool.description}\n" for tool in tools)
        tag = self._result_tag
        return f"Tools:\n{listed}The result follows in <{tag}>. To finish, write <answer>the answer</answer>.\n\n"

    def _read(self, turn: str, tools: Tools) -> Said:
        turn = after_thinking(turn)
        opened = {name: turn.find(f"<{name}>") for name in (*tools, "answer")}
        tags = sorted((where, name) for name, where in opened.items() if where >= 0)
        if not tags:
            expected = ", ".join(f"<{name}>" for name in (*tools, "answer"))
            return Said(text=turn, error=f"expected one of {expected}")
        where, name = tags[0]
        content, _ = between(turn, f"<{name}>", f"</{name}>", where)
        if name == "answer":
            return Said(answer=content.strip(), text=turn)
        return Said(calls=(ToolCall(name, (content.strip(),), is_text=True),), text=turn)

    def call(self, *calls: ToolCall) -> str:
        """Write one tag; a turn makes one call."""
        (call,) = calls
        (value,) = (*call.args, *call.kwargs.values())
        return f"<{call.name}>{value}</{call.name}>"

    def answer(self, answer: str) -> str:
        """Write the answer's tag."""
        return f"<answer>{answer}</answer>"

    def results(self, results: Sequence[str]) -> str:
        """Write each result in its tag."""
        return "".join(f"<{self._result_tag}>{result}</{self._result_tag}>\n" for result in results)


class NativeFormat(XmlFormat):
    """Reads whichever format the turn is in, and writes XML. Invariant: as in `CallFormat`."""

    def stop_strings(self, tool_names: Sequence[str]) -> tuple[str, ...]:
        """Return no strings: the chat template defines the end of a turn."""
        return ()

    def _read(self, turn: str, tools: Tools) -> Said:
        text = after_thinking(turn).strip()
        if "<tool_call>" in text or "<function=" in text:
            return super()._read(turn, tools)
        inner = without_fence(text.removeprefix("<|python_tag|>").removeprefix("[TOOL_CALLS]"))
        if inner.startswith(("{", "[{", "[ {")):
            return JsonFormat().read(turn, tools)
        said = PythonFormat().read(turn, tools)
        if said.calls or not re.search(r"^\s*Tool:", text, re.MULTILINE):
            return said
        return LineFormat(self.bare_tool).read(text, tools)


CALL_FORMATS: dict[str, Callable[..., CallFormat]] = {
    "line": LineFormat,
    "tags": TagFormat,
    "xml": XmlFormat,
    "json": JsonFormat,
    "python": PythonFormat,
    "native": NativeFormat,
}


def _first_name(tool: Tool) -> str:
    return next(iter(tool.parameters.get("properties", {})), "")
