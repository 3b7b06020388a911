"""Write a function that is graded by hidden checks.

    Question: Write f(xs), where xs is a list of whole numbers: keep those that are divisible by 5, multiply each by 4,
    and return the sum of the results. For example, f([5, 7, -10]) is -20.
    Answer:
    ```python
    def f(xs):
        return sum(x * 4 for x in xs if x % 5 == 0)
    ```                                             reward: the share of the hidden checks that it passes

The code runs in envs/sandbox, which receives the arguments of the checks and returns the function's results. The
expected results stay in this process and are compared here, so the code cannot forge a verdict.
Code that runs too long ends the episode, "tool_timeout".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rllib_srl.envs import text
from rllib_srl.envs.coding import function_tasks
from rllib_srl.envs.question import Question, QuestionEnv, QuestionSettings
from rllib_srl.envs.sandbox.calls import Call, Limits, SandboxResult
from rllib_srl.envs.sandbox.run import Sandbox
from rllib_srl.envs.settings import Within

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(?P<code>.*?)(?:\n```|(?<=\n)```|\Z)", re.DOTALL)
_WRONG = "def f(x):\n    return None"


@dataclass(frozen=True)
class CodeTaskSettings(QuestionSettings):
    """Settings of `CodeTask`. Invariant: as in `QuestionSettings`."""

    num_shots: int = 2
    num_checks: Annotated[int, Within(3, 1000)] = 8
    partial: bool = True  # reward the share of checks passed; else all or nothing
    timeout_s: Annotated[float, Within(0.1, 3600)] = 5.0  # for all checks of one answer
    memory_mib: Annotated[int, Within(64, 1 << 20)] = 512  # address space
    allow_weak_sandbox: bool = False  # play even where the machine cannot isolate the code


class CodeTask(QuestionEnv):
    """Functions to write. Invariant: a prompt id names the parts of a task, as in "list 3 22 0"."""

    domain = "code_function"
    stop_strings = ("\n```\n",)
    settings_class = CodeTaskSettings
    settings: CodeTaskSettings

    @property
    def num_questions(self) -> int:
        """Return how many tasks both splits hold together."""
        return self._num_ids() - self.settings.num_shots

    def _prepare(self) -> None:
        limits = Limits(timeout_s=self.settings.timeout_s, memory_bytes=self.settings.memory_mib << 20)
        self._sandbox = Sandbox(limits, allow_weak_sandbox=self.settings.allow_weak_sandbox)
        self._stop = ""  # of the last run

    def _num_ids(self) -> int:
        return function_tasks.NUM_IDS

    def _prompt_id(self, number: int) -> str:
        return function_tasks.prompt_id_of(number)

    def _task(self, prompt_id: str) -> function_tasks.FunctionTask:
        return function_tasks.task(prompt_id, self.settings.num_checks)

    def question(self, prompt_id: str) -> Question:
        """Return the task of `prompt_id` in words."""
        task = self._task(prompt_id)
        return Question(task.words, answer=task.gold, wrong=_WRONG, canonical=function_tasks.canonical(prompt_id))

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Run the code against the hidden checks; return None if the answer holds no code."""
        self._stop = ""
        if not answer:
            return None
        task = self._task(prompt_id)
        returned = self._returned(answer, [Call(task.name, [argument]) for argument, _ in task.checks])
        num_passed = sum(is_same(value, wanted) for value, (_, wanted) in zip(returned, task.checks))
        share = num_passed / len(task.checks)
        return share if self.settings.partial else float(share == 1.0)

    def _returned(self, code: str, calls: Sequence[Call]) -> list[Any]:
        """Return the result of each call, `None` for one that failed; an empty list if the code itself failed."""
        result: SandboxResult = self._sandbox.run(code, calls=calls)
        self._stop = result.stop
        return [None if row.error else row.value for row in result.returned]

    def _graded(self, action: str, answer: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super()._graded(action, answer)
        if terminated and self._stop == "timeout":
            info = {**info, "stop_reason": "tool_timeout"}
        return observation, reward, terminated, truncated, info

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the turn that earns reward 1."""
        return [_fenced(self._task(prompt_id).gold)]

    def answer_in(self, turn: str) -> str:
        """Return the code of the first fenced block of a turn, "" if there is none."""
        fenced = _FENCED.search(turn)
        return fenced["code"].strip("\n") if fenced else ""

    def _shot(self, index: int, question: Question) -> str:
        retried = self.settings.feedback_turns > 0 and index % 2 == 1
        wrong = _fenced(question.wrong) + text.WRONG if retried else ""
        return f"{text.asked(question.text)}{wrong}{_fenced(question.answer)}\n"


def _fenced(code: str) -> str:
    return f"\n```python\n{code}\n```\n"


def is_same(value: Any, wanted: Any) -> bool:
    """Return whether a returned JSON value equals the expected one; True is not a number, and 2.0 equals 2.

    Args:
        value: returned by the code
        wanted: numbers, texts, and lists of them
    """
    if isinstance(wanted, list):
        return isinstance(value, list) and len(value) == len(wanted) and all(map(is_same, value, wanted))
    if isinstance(wanted, str) or isinstance(value, bool):
        return type(value) is type(wanted) and value == wanted
    return isinstance(value, (int, float)) and value == wanted
