"""Turns of ten megabytes: every world answers one soon, or ends the episode for it."""

from __future__ import annotations

import math
import time

import pytest

from rllib_srl.envs.tools.call_format import MAX_TURN_CHARS
from rllib_srl.envs.tools.formats import CALL_FORMATS
from rllib_srl.envs.tools.tool import Tool
from rllib_srl.rollout import replies
from rllib_srl.types import Prompt, StopReason
from tests.envs import world_table

NUM_BYTES = 10_000_000
MOST_S = 10.0  # of this thread's work; it takes a tenth of a second
LATEST_S = 60.0
PIECES = {
    "newlines": "\n", "returns": "\r", "separators": "\x1c", "spaces": " ", "letters": "x", "foxes": "🦊",
    "digits": "7", "brackets": "[", "braces": '{"a": ', "lines": "Line \n", "lines of tools": "Tool:\n",
    "lines of answers": "Answer:\n", "calls": "Tool: f()\n", "numbers": "7, ", "thoughts": "<think></think>",
    "open tags": "<tool_call>", "tags": "<tool_call>f()</tool_call>", "functions": "<function=f></function>",
    "answers": "<answer></answer>", "searches": "<search>x</search>", "fences": "```python\n", "boxes": "\\boxed{",
    "phrases": "answer is ",
}  # fmt: skip
TURNS = {
    **{name: piece * (NUM_BYTES // len(piece)) for name, piece in PIECES.items()},
    "parameters": f"<function=f>{'<parameter=a>x</parameter>' * (NUM_BYTES // 26)}</function>",
    "a function in newlines": "\n" * NUM_BYTES + "<function=f></function>",
}
OF_WORLDS = ("newlines", "foxes", "braces", "lines of tools", "lines of answers", "calls", "thoughts", "boxes")
CASES = {name: case for name, case in world_table.cases().items() if not case[1].is_slow}


def work_of(take, *arguments):
    """Return what a call returns; it must not have worked long, nor kept anybody waiting."""
    work, wall = time.thread_time(), time.monotonic()
    found = take(*arguments)
    assert time.thread_time() - work < MOST_S
    assert time.monotonic() - wall < LATEST_S
    return found


@pytest.mark.slow
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_every_format_reads_it_in_time(name, turn):
    def search(query: str) -> str:
        """Find."""
        return query

    tools = {"search": Tool.of(search)}
    said = work_of(CALL_FORMATS[name]().read, TURNS[turn], tools)
    assert said.fault and not said.calls and said.answer is None
    said = work_of(CALL_FORMATS[name]().read, TURNS[turn][-MAX_TURN_CHARS:], tools)  # the longest that are read
    assert not said.fault or not said.calls


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_world_takes_it_in_time(name):
    path, row = CASES[name]
    if absent := world_table.missing(row):
        pytest.skip(f"{', '.join(absent)} not installed")
    world = world_table.made(path, row)
    prompt_id = next(iter(world.prompt_ids("train", 0)))
    for turn in map(TURNS.get, OF_WORLDS):
        replies.reset(world, Prompt("world", prompt_id))
        reply = work_of(replies.step, world, turn)
        assert math.isfinite(reply.reward) and len(reply.observation) < 100_000
        assert reply.stop_reason in (None, StopReason.UNPARSABLE, StopReason.OUT_OF_TURNS, StopReason.TOOL_TIMEOUT)
    world.close()
