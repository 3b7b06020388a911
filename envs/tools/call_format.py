"""What a call format is: how a policy writes calls and answers, and how results come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from envs.tools.calls import CallError, Said, ToolCall
from envs.tools.tool import Tool

Tools = Mapping[str, Tool]

MAX_TURN_CHARS = 1_000_000  # a longer turn is not read
MAX_CALLS = 1_000  # of a turn


class CallFormat:
    """One way to write calls, results and answers.

    Invariant: `read` never raises, whatever the turn; `read(call(c))` states c, and `read(answer(a))` states a.
    """

    has_plain_answers: ClassVar[bool] = False  # a turn without calls or a marked answer is an answer as a whole

    def __init__(self, bare_tool: str = ""):
        self.bare_tool = bare_tool  # its one text argument may stand where a call does, as in "Tool: 2 + 3"

    def stop_strings(self, tool_names: Sequence[str]) -> tuple[str, ...]:
        """Return what ends a turn in a plain transcript."""
        return ("\n",)

    def instructions(self, tools: Sequence[Tool]) -> str:
        """Return what tells a policy which tools there are and how to call them."""
        raise NotImplementedError

    def read(self, turn: str, tools: Tools) -> Said:
        """Return what a turn says."""
        if len(turn) > MAX_TURN_CHARS:
            return Said(text=turn, fault=f"{len(turn)} characters; expected at most {MAX_TURN_CHARS}")
        try:
            return self._read(turn, tools)
        except CallError as error:
            return Said(text=turn, fault=str(error))

    def _read(self, turn: str, tools: Tools) -> Said:
        raise NotImplementedError

    def call(self, *calls: ToolCall) -> str:
        """Return a turn that makes the calls."""
        raise NotImplementedError

    def answer(self, answer: str) -> str:
        """Return a turn that hands in an answer."""
        raise NotImplementedError

    def results(self, results: Sequence[str]) -> str:
        """Return the observation that shows the results of a turn's calls, in their order."""
        raise NotImplementedError

    def notice(self, text: str) -> str:
        """Return the observation that says something to the policy that is no result."""
        return f"{text}\n"


def after_thinking(turn: str) -> str:
    """Return what follows the last thought, for calls that were only considered are not made."""
    return turn.rpartition("</think>")[2]


def between(text: str, opening: str, closing: str, where: int) -> tuple[str, int]:
    """Return what lies between the tags of which the first opens at `where`, and where the second ends."""
    start = where + len(opening)
    end = text.find(closing, start)
    if end < 0:
        raise CallError(f"{opening} is not closed by {closing}")
    return text[start:end], end + len(closing)


def described_line(tool: Tool) -> str:
    """Return a tool's signature and description."""
    return f"{tool.signature()} - {tool.description}" if tool.description else tool.signature()


def without_fence(text: str) -> str:
    """Return what a turn that is one fenced block holds, or the turn itself."""
    text = text.strip()
    if not text.startswith("```") or not text.endswith("```") or "\n" not in text:
        return text
    return text.partition("\n")[2].removesuffix("```").strip()
