"""Word problems answered with the help of a calculator.

    Question: Mia has 4 boxes of 12 pencils and 7 more pencils. How many pencils does Mia have?
    Tool: 4 * 12 + 7                                the policy's first turn
    Result: 55                                      the environment's reply
    Answer: 55                                      the policy's second turn: reward 1

The call may also be written `Tool: calculator(4 * 12 + 7)`, or in another of the formats of envs/tools/formats.py. A
call that cannot be read is answered with "Error: ..." instead of a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rllib_srl.envs.question import Question, integer_in
from rllib_srl.envs.settings import Within
from rllib_srl.envs.tools.calculator import calculator, evaluate, shown
from rllib_srl.envs.tools.calls import MAX_CALL_CHARS, ToolCall
from rllib_srl.envs.tools.tool import Tool
from rllib_srl.envs.tools.tool_questions import Reply, ToolQuestionEnv, ToolSettings

_NAMED_CALL = re.compile(r"\s*Tool:\s*calculator\s*\((?P<expression>[^'\"=\n]*)\)\s*")
_PROMPT_ID = re.compile(
    r"(?P<steps>[12])\.(?P<template>\d) (?P<numbers>[1-9]\d{0,3}( [1-9]\d{0,3}){1,2}) (?P<name>\w+) (?P<thing>\w+)",
    re.ASCII,
)


@dataclass(frozen=True)
class Template:
    """One kind of problem over the numbers a, b, c >= 1 and a `total` that follows from them.

    Invariant: distinct numbers make distinct texts, and the value of `expression` is a whole number >= 1.
    """

    text: str
    expression: str
    total: str = "0"


TEMPLATES: Mapping[int, tuple[Template, ...]] = {
    1: (
        Template("{name} has {a} {thing} and finds {b} more. How many {thing} does {name} have?", "{a} + {b}"),
        Template("{name} buys {a} bags of {b} {thing}. How many {thing} does {name} buy?", "{a} * {b}"),
        Template(
            "{name} has {total} {thing} and gives {a} away. How many {thing} are left?",
            "{total} - {a}",
            total="{a} + {b}",
        ),
        Template(
            "{name} shares {total} {thing} equally among {a} friends. How many {thing} does each friend get?",
            "{total} / {a}",
            total="{a} * {b}",
        ),
    ),
    2: (
        Template(
            "{name} has {a} boxes of {b} {thing} and {c} more {thing}. How many {thing} does {name} have?",
            "{a} * {b} + {c}",
        ),
        Template(
            "{name} packs {a} old and {b} new {thing} into each of {c} boxes. How many {thing} are packed?",
            "({a} + {b}) * {c}",
        ),
        Template(
            "{name} has {total} {thing}, keeps {c} and shares the rest equally among {a} friends. "
            "How many {thing} does each friend get?",
            "({total} - {c}) / {a}",
            total="{a} * {b} + {c}",
        ),
        Template(
            "{name} has {total} {thing}, loses {a} and then gives {b} away. How many {thing} are left?",
            "{total} - {a} - {b}",
            total="{a} + {b} + {c}",
        ),
    ),
}
NAMES = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Ida", "Jon", "Kim", "Leo", "Mia")
THINGS = ("apples", "beads", "books", "cards", "coins", "marbles", "pencils", "shells", "stamps", "stones")


@dataclass(frozen=True)
class Problem(Question):
    """A question and the arithmetic that solves it. Invariant: the value of `expression` is `answer`."""

    expression: str


@dataclass(frozen=True)
class WordProblemSettings(ToolSettings):
    """Settings of `WordProblem`. Invariant: as in `ToolSettings`."""

    num_steps: Annotated[int, Within(1, 2)] = 2  # operations that a solution takes
    lowest: int = 2
    highest: int = 20
    max_calls: int = 3
    reward_without_call: Annotated[float, Within(0, 1)] = 1.0  # share of the reward of an answer without a call

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        if 1 <= self.lowest < self.highest <= 1000:
            return super().errors()
        error = f"lowest = {self.lowest}, highest = {self.highest}; expected 1 <= lowest < highest <= 1000"
        return [*super().errors(), error]


class WordProblem(ToolQuestionEnv):
    """Word problems with a calculator as a tool.

    Invariant: a prompt id is steps, template, numbers, name and thing, as in "2.0 4 12 7 Mia pencils".
    """

    domain = "word_problem_tool"
    bare_tool = "calculator"
    settings_class = WordProblemSettings
    settings: WordProblemSettings

    @property
    def num_questions(self) -> int:
        """Return the exact number of problems, without the shots."""
        return self._num_ids() - self.settings.num_shots

    def _num_ids(self) -> int:
        num_values = self.settings.highest - self.settings.lowest + 1
        steps = self.settings.num_steps
        num_ids: int = len(TEMPLATES[steps]) * len(NAMES) * len(THINGS) * num_values ** (steps + 1)
        return num_ids

    def _prompt_id(self, number: int) -> str:
        parts = []
        for size in (len(TEMPLATES[self.settings.num_steps]), len(NAMES), len(THINGS)):
            number, part = divmod(number, size)
            parts.append(part)
        values = []
        for _ in range(self.settings.num_steps + 1):
            number, value = divmod(number, self.settings.highest - self.settings.lowest + 1)
            values.append(self.settings.lowest + value)
        listed = " ".join(str(value) for value in values)
        return f"{self.settings.num_steps}.{parts[0]} {listed} {NAMES[parts[1]]} {THINGS[parts[2]]}"

    def question(self, prompt_id: str) -> Problem:
        """Return the question of `prompt_id`."""
        template, numbers, words = _read(prompt_id)
        expression = template.expression.format(**numbers)
        right = evaluate(expression)
        return Problem(
            text=template.text.format(**numbers, **words),
            answer=shown(right),
            wrong=shown(right + 1),
            canonical=str(prompt_id).rsplit(" ", 2)[0],  # other names and things make no other problem
            expression=expression,
        )

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return 1 for the right number, 0 for another, None for no number."""
        value = integer_in(answer)
        return None if value is None else float(value == int(self.question(prompt_id).answer))

    def tools(self, prompt_id: str) -> Sequence[Callable[..., Any] | Tool]:
        """Return the calculator."""
        return [Tool.of(calculator, is_bounded=True)]

    def gold_calls(self, prompt_id: str) -> list[ToolCall]:
        """Return the one call that solves the problem."""
        return [ToolCall("calculator", (self.question(prompt_id).expression,))]

    def _taken(self, action: str) -> Reply:
        if len(action) > MAX_CALL_CHARS:
            return self._unreadable(action, f"{len(action)} characters; expected at most {MAX_CALL_CHARS}")
        # Arithmetic is not a literal, so the named call of the line format is parsed here.
        named = _NAMED_CALL.fullmatch(action) if self.settings.call_format == "line" else None
        return super()._taken(f"Tool: {named['expression']}\n" if named else action)

    def _graded(self, action: str, answer: str) -> Reply:
        observation, reward, terminated, truncated, info = super()._graded(action, answer)
        share = 1.0 if self._num_calls else self.settings.reward_without_call
        return observation, share * reward, terminated, truncated, {**info, "num_calls": self._num_calls}


def _read(prompt_id: str) -> tuple[Template, dict[str, str], dict[str, str]]:
    """Return the template, the numbers by letter and the words of `prompt_id`."""
    match = _PROMPT_ID.fullmatch(str(prompt_id))
    if match:
        steps, at, values = int(match["steps"]), int(match["template"]), match["numbers"].split()
        known = at < len(TEMPLATES[steps]) and match["name"] in NAMES and match["thing"] in THINGS
        if known and len(values) == steps + 1:
            numbers = dict(zip("abc", values, strict=False))
            template = TEMPLATES[steps][at]
            total = shown(evaluate(template.total.format(**numbers)))
            return template, {**numbers, "total": total}, {"name": match["name"], "thing": match["thing"]}
    raise ValueError(f"prompt_id = {prompt_id!r}; expected a prompt such as '2.0 4 12 7 Mia pencils'")
