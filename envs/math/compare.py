"""Name the largest, or the smallest, of some numbers.

    Question: Which is largest: 17, 93 or 40?
    Answer: 93                                      reward 1; any other number 0; no number: unparsable

With `ask="smallest"` the same prompt ids ask "Which is smallest: 17, 93 or 40?": one word changes the right answer, so
as domains of a stream the two interfere with each other.

The split ignores the order of the numbers, so a held-out question is never a reordered training question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, perm
from typing import Annotated, TypeVar

from rllib_srl.envs.question import Question, QuestionEnv, QuestionSettings, integer_in
from rllib_srl.envs.settings import OneOf, Within

T = TypeVar("T")

# `ask` -> the word for it with two numbers, and the function that picks the answer.
_ASKED: dict[str, tuple[str, Callable[[list[int]], int]]] = {"largest": ("larger", max), "smallest": ("smaller", min)}
_PROMPT_ID = re.compile(r"\d{1,7}(, \d{1,7})+", re.ASCII)


@dataclass(frozen=True)
class CompareSettings(QuestionSettings):
    """Settings of `Compare`. Invariant: as in `QuestionSettings`."""

    num_numbers: Annotated[int, Within(2, 6)] = 3  # numbers in a question
    lowest: int = 10
    highest: int = 99
    ask: Annotated[str, OneOf(*_ASKED)] = "largest"  # which number is the answer

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        if not 0 <= self.lowest < self.highest <= 10**6:
            return [f"lowest = {self.lowest}, highest = {self.highest}; expected 0 <= lowest < highest <= 10**6"]
        if (num := self.highest - self.lowest + 1) < max(self.num_numbers, self.num_shots + 2):
            return [f"lowest to highest are {num} numbers; too few for the questions"]
        return []


class Compare(QuestionEnv):
    """Questions for the largest, or smallest, of some distinct numbers.

    Invariant: a prompt id is the numbers in the order asked, as in "17, 93, 40".
    """

    domain = "compare"
    settings_class = CompareSettings
    settings: CompareSettings

    @property
    def num_questions(self) -> int:
        """Return the exact number of ordered choices of distinct numbers, without the shots."""
        return self._num_ids() - self.settings.num_shots

    @property
    def chance(self) -> float:
        """Return the accuracy of naming one of the numbers at random."""
        return 1 / self.settings.num_numbers

    def _num_ids(self) -> int:
        return perm(self.settings.highest - self.settings.lowest + 1, self.settings.num_numbers)

    def _prompt_id(self, number: int) -> str:
        first = self.settings.lowest
        chosen = ordered_choice(number, range(first, self.settings.highest + 1), self.settings.num_numbers)
        return ", ".join(str(value) for value in chosen)

    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`."""
        numbers = self._numbers(prompt_id)
        listed = ", ".join(str(number) for number in numbers[:-1]) + f" or {numbers[-1]}"
        of_two, _ = _ASKED[self.settings.ask]
        degree = of_two if len(numbers) == 2 else self.settings.ask
        right = self._right(numbers)
        return Question(
            text=f"Which is {degree}: {listed}?",
            answer=str(right),
            wrong=str(max(numbers) if right == min(numbers) else min(numbers)),
            canonical=" ".join(str(number) for number in sorted(numbers)),
        )

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return 1 for the requested number, 0 for another, None for no number."""
        value = integer_in(answer)
        return None if value is None else float(value == self._right(self._numbers(prompt_id)))

    def _right(self, numbers: list[int]) -> int:
        _, pick = _ASKED[self.settings.ask]
        return pick(numbers)

    def _numbers(self, prompt_id: str) -> list[int]:
        numbers = [int(number) for number in prompt_id.split(", ")] if _PROMPT_ID.fullmatch(str(prompt_id)) else []
        if len(numbers) < 2 or len(set(numbers)) < len(numbers):
            raise ValueError(f"prompt_id = {prompt_id!r}; expected distinct numbers as in '17, 93, 40'")
        return numbers


def ordered_choice(number: int, values: Sequence[T], num_chosen: int) -> list[T]:
    """Return choice `number` of the perm(len(values), num_chosen) ordered choices without repetition."""
    left, chosen = list(values), []
    for _ in range(num_chosen):
        number, index = divmod(number, len(left))
        chosen.append(left.pop(index))
    return chosen


def combination(number: int, size: int, num_chosen: int) -> list[int]:
    """Return set `number` of `num_chosen` distinct numbers below `size`, ascending, in the order of their largest.

    Source: Knuth, TAOCP 4A, 7.2.1.3, combinatorial number system.
    """
    chosen = []
    for left in range(num_chosen, 0, -1):
        low, high = left - 1, size
        while high - low > 1:  # the largest n with comb(n, left) <= number
            middle = (low + high) // 2
            low, high = (middle, high) if comb(middle, left) <= number else (low, middle)
        number -= comb(low, left)
        chosen.append(low)
    return chosen[::-1]
