"""Base class of call formats: how a policy writes calls and answers, and how results are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rllib_srl.envs.tools.calls import CallError, Said, ToolCall
from rllib_srl.envs.tools.tool import Tool

Tools = Mapping[str, Tool]

MAX_TURN_CHARS = 1_000_000  # a longer turn is not read
MAX_CALLS = 1_000  # of a turn


class CallFormat:
    """One way to write calls, results and answers.

    Invariant: `read` never raises; `read(call(c))` returns the calls c, and `read(answer(a))` the answer a.
    """

    has_plain_answers: ClassVar[bool] = False  # a turn without calls or a marked answer is an answer as a whole

    def __init__(self, bare_tool: str = ""):
        self.bare_tool = bare_tool  # tool that may be called by its one text argument alone, as in "Tool: 2 + 3"

    def stop_strings(self, tool_names: Sequence[str]) -> tuple[str, ...]:
        """Return the strings that end a turn in a plain transcript."""
        return ("\n",)

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Return the prompt text that lists the tools and explains how to call them."""
        raise NotImplementedError

    def read(self, turn: str, tools: Tools) -> Said:
        """Return the calls or the answer of a turn."""
        if len(turn) > MAX_TURN_CHARS:
            return Said(text=turn, error=f"{len(turn)} characters; expected at most {MAX_TURN_CHARS}")
        try:
            return self._read(turn, tools)
        except CallError as error:
            return Said(text=turn, error=str(error))

    def _read(self, turn: str, tools: Tools) -> Said:
        raise NotImplementedError

    def call(self, *calls: ToolCall) -> str:
        """Return a turn that makes the calls."""
        raise NotImplementedError

    def answer(self, answer: str) -> str:
        """Return a turn that states an answer."""
        raise NotImplementedError

    def results(self, results: Sequence[str]) -> str:
        """Return the observation that shows the results of a turn's calls, in their order."""
        raise NotImplementedError

    def notice(self, text: str) -> str:
        """Return an observation with a message that is not a result."""
        return f"{text}\n"


def after_thinking(turn: str) -> str:
    """Return the text after the last reasoning block, because calls inside it are not made."""
    return turn.rpartition("</think>")[2]


def between(text: str, opening: str, closing: str, where: int) -> tuple[str, int]:
    """Return the text between the opening tag at `where` and the closing tag, and the position after it."""
    start = where + len(opening)
    end = text.find(closing, start)
    if end < 0:
        raise CallError(f"{opening} is not closed by {closing}")
    return text[start:end], end + len(closing)


def described_line(tool: Tool) -> str:
    """Return a tool's signature and description."""
    return f"{tool.signature()} - {tool.description}" if tool.description else tool.signature()


def without_fence(text: str) -> str:
    """Return the content of a turn that is one fenced block, or else the turn itself."""
    text = text.strip()
    if not text.startswith("```") or not text.endswith("```") or "\n" not in text:
        return text
    return text.partition("\n")[2].removesuffix("```").strip()
