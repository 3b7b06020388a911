"""Number problems answered with the help of Python.

    Question: What is the remainder when 37 to the power of 20 is divided by 101?
    <python>print(pow(37, 20, 101))</python>        the policy's first turn
    <result>95</result>                             the environment's reply
    <answer>95</answer>                             the policy's second turn: reward 1

The code may also be a fenced block (```python), or in another of the formats of envs/tools/formats.py. It runs in
envs/sandbox, each call in a new process, so no state survives a call. The result is its output and the value of its
last line if that is an expression; for an exception the end of the traceback; for a call beyond its memory or output
limit the name of the limit. A call that runs too long ends the episode, "tool_timeout".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from rllib_srl.envs.coding import number_problems
from rllib_srl.envs.question import Question, integer_in
from rllib_srl.envs.sandbox.calls import Limits, SandboxResult
from rllib_srl.envs.sandbox.run import Sandbox
from rllib_srl.envs.settings import Within
from rllib_srl.envs.tools.calls import CallError, ToolCall, ToolTimeoutError
from rllib_srl.envs.tools.tool import Tool
from rllib_srl.envs.tools.tool_questions import Reply, ToolQuestionEnv, ToolSettings

_FENCED = re.compile(r"```(?:python|py)[ \t]*\n(?P<code>.*?)(?:\n```|\Z)", re.DOTALL)
_FENCE_END = "\n```\n"
_WHY = {
    "memory": "MemoryError: the code needed more memory than there is",
    "output": "the code printed too much",
    "crashed": "the code ended without finishing",
    "too_long": "the code is too long",
}


@dataclass(frozen=True)
class PythonToolSettings(ToolSettings):
    """Settings of `PythonTool`. Invariant: as in `ToolSettings`."""

    num_shots: int = 2
    call_format: str = "tags"
    max_calls: int = 4
    memory_mib: Annotated[int, Within(64, 1 << 20)] = 512  # address space of a call
    packages: str = ""  # names of packages that calls may import, with spaces between; else the standard library only
    allow_weak_sandbox: bool = False  # play even where the machine cannot isolate the code


class PythonTool(ToolQuestionEnv):
    """Problems about whole numbers with Python as a tool.

    Invariant: a prompt id is a template and its numbers, as in "power_mod 37 20 101".
    """

    domain = "python_tool"
    settings_class = PythonToolSettings
    settings: PythonToolSettings
    bare_tool = "python"

    @property
    def num_questions(self) -> int:
        """Return the number of distinct questions in both splits together."""
        return self._num_ids() - self.settings.num_shots

    def _prepare(self) -> None:
        super()._prepare()
        limits = Limits(
            timeout_s=self.settings.call_timeout_s,
            memory_bytes=self.settings.memory_mib << 20,
            packages=tuple(self.settings.packages.split()),
        )
        self._sandbox = Sandbox(limits, allow_weak_sandbox=self.settings.allow_weak_sandbox)
        if self.stop_strings:
            self.stop_strings = (*self.stop_strings, _FENCE_END)

    def _num_ids(self) -> int:
        return len(number_problems.NAMES) * number_problems.QUESTIONS_PER_TEMPLATE

    def _prompt_id(self, number: int) -> str:
        return number_problems.prompt_id_of(number)

    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`."""
        template, numbers = number_problems.parsed(prompt_id)
        answer = template.solve(*numbers)
        text = template.text.format(*numbers)
        return Question(text=text, answer=str(answer), wrong=str(answer + 1), canonical=text)

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return 1 for the right number, 0 for another, None for no number."""
        value = integer_in(answer)
        return None if value is None else float(str(value) == self.question(prompt_id).answer)

    def tools(self, prompt_id: str) -> Sequence[Tool]:
        """Return the tool `python`, which enforces its own deadline."""
        return [Tool.of(self._run_code, name="python", is_bounded=True)]

    def gold_calls(self, prompt_id: str) -> list[ToolCall]:
        """Return the call that prints the answer."""
        template, numbers = number_problems.parsed(prompt_id)
        return [ToolCall("python", (), {"code": template.code.format(*numbers)})]

    def _taken(self, action: str) -> Reply:
        said = self.format.read(action, self._tools)
        if not said.calls and said.answer is None and (fenced := _FENCED.search(action)):
            return self._called(action, [ToolCall("python", (), {"code": fenced["code"]})])
        return super()._taken(action)

    def _run_code(self, code: str) -> str:
        """Run Python code and return what it prints."""
        result = self._sandbox.run(code)
        if result.stop == "timeout":
            raise ToolTimeoutError(f"the code ran longer than {self.settings.call_timeout_s:g} s")
        return shown(result)


def shown(result: SandboxResult) -> str:
    """Return the text that the policy sees for a result: output and value, or the error.

    Raises:
        CallError: the code failed; the message contains the reason.
    """
    said = result.stdout.removesuffix("\n")
    if result.stop == "ok":
        return "\n".join(part for part in (said, result.value) if part)
    why = _WHY.get(result.stop, result.error)
    raise CallError(f"{said[-1000:]}\n{why}" if said else why)
