"""Arbitrary facts in stages: the code of an item, asked with the options in one order and measured in another.

    Question: Code of item K-37: 17, 93 or 40?
    Answer: 93                                      reward 1; any other number 0; no number: unparsable

Nothing but the fact itself tells which option is the code, so a fact can be learned only by playing its prompt, and
each later stage competes with the earlier ones for the same weights. A stage is a domain. Training prompts are the
facts as asked; held-out prompts are the same facts with the options in another order, so they measure whether the fact
was learned or the position of an answer.

Items, codes and orders are a function of `seed` alone. Shots are facts of items that no stage asks about.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Annotated

from rllib_srl.envs import text
from rllib_srl.envs.question import Question, QuestionEnv, QuestionSettings, integer_in
from rllib_srl.envs.settings import Within

_NUMBERS = range(10, 100)  # of items and codes
_MAX_FACTS = len(ascii_uppercase) * len(_NUMBERS)  # names of items
_PROMPT_ID = re.compile(r"([A-Z])-(\d\d): (\d\d(?:, \d\d)+)", re.ASCII)


@dataclass(frozen=True)
class RecallSettings(QuestionSettings):
    """Settings of `Recall`. Invariant: as in `QuestionSettings`."""

    num_shots: int = 0  # a shot shows the form of a question only: its fact is of no use for another
    num_facts: Annotated[int, Within(2)] = 64  # of a stage
    num_stages: Annotated[int, Within(1)] = 6
    stage: int = -1  # the only stage that is asked, from 0; -1: all
    num_options: Annotated[int, Within(2, 8)] = 3
    seed: Annotated[int, Within(0)] = 0  # of items, codes and orders

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        errors = []
        if self.num_facts * self.num_stages + self.num_shots > _MAX_FACTS:
            total = f"{self.num_facts} x {self.num_stages} + {self.num_shots}"
            errors.append(f"num_facts x num_stages + num_shots = {total}; expected at most {_MAX_FACTS} names of items")
        if not -1 <= self.stage < self.num_stages:
            errors.append(f"stage = {self.stage}; expected -1 (all) to {self.num_stages - 1}")
        return errors


class Recall(QuestionEnv):
    """Questions for arbitrary facts.

    Invariant: a prompt id is the item with its options in the order asked, as in "K-37: 17, 93, 40".
    """

    domain = "recall"
    settings_class = RecallSettings
    settings: RecallSettings

    def _prepare(self) -> None:
        names = text.shuffled(_MAX_FACTS, f"items:{self.settings.seed}")
        num_asked = self.settings.num_facts * self.settings.num_stages
        self._items = [_name(number) for _, number in zip(range(num_asked + self.settings.num_shots), names)]
        self._number_of = {item: number for number, item in enumerate(self._items)}

    @property
    def num_questions(self) -> int:
        """Return the number of facts that are asked."""
        return self._num_ids()

    @property
    def chance(self) -> float:
        """Return the accuracy of naming an option at random."""
        return 1 / self.settings.num_options

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield each fact once.

        Args:
            split: "train": as asked; "heldout": with the options in another order
            seed: of the order of the facts
        """
        text.check_split(split)
        for number in text.shuffled(self._num_ids(), f"{split}:{seed}"):
            item = self._items[self._first() + number]
            yield _prompt_id(item, self._options(item) if split == "train" else self._reordered(item))

    def domain_of(self, prompt_id: str) -> str:
        """Return the stage of a fact, "stage_0" for the first."""
        item, _ = self._read(prompt_id)
        return f"stage_{self._number_of[item] // self.settings.num_facts}"

    def split_of(self, prompt_id: str) -> str:
        """Return "train" for the options as asked, "heldout" for any other order, or "shots"."""
        item, options = self._read(prompt_id)
        if self._number_of[item] >= self.settings.num_facts * self.settings.num_stages:
            return "shots"
        return "train" if options == self._options(item) else "heldout"

    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`."""
        item, options = self._read(prompt_id)
        right = self._code(item)
        listed = ", ".join(map(str, options[:-1])) + f" or {options[-1]}"
        return Question(
            text=f"Code of item {item}: {listed}?",
            answer=str(right),
            wrong=str(next(option for option in options if option != right)),
            canonical=prompt_id,
        )

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return 1 for the code, 0 for another number, None for no number."""
        value = integer_in(answer)
        return None if value is None else float(value == self._code(self._read(prompt_id)[0]))

    def _num_ids(self) -> int:
        return self.settings.num_facts * (self.settings.num_stages if self.settings.stage < 0 else 1)

    def _first(self) -> int:
        return max(0, self.settings.stage) * self.settings.num_facts

    def _shot_ids(self) -> list[str]:
        spare = self._items[self.settings.num_facts * self.settings.num_stages :]
        return [_prompt_id(item, self._options(item)) for item in spare]

    def _options(self, item: str) -> list[int]:
        """Return the options of an item in the order asked; the code is at any position."""
        return self._generator(item, "options").sample(_NUMBERS, self.settings.num_options)

    def _reordered(self, item: str) -> list[int]:
        """Return the options in another order, with the code at another position."""
        options, generator = self._options(item), self._generator(item, "order")
        before = options.index(self._code(item))
        others = [option for at, option in enumerate(options) if at != before]
        generator.shuffle(others)
        places = [at for at in range(len(options)) if at != before]
        others.insert(generator.choice(places), options[before])
        return others

    def _code(self, item: str) -> int:
        return self._generator(item, "code").choice(self._options(item))

    def _generator(self, item: str, what: str) -> random.Random:
        return random.Random(f"{self.settings.seed}:{what}:{item}")

    def _read(self, prompt_id: str) -> tuple[str, list[int]]:
        """Return item and options of a prompt id."""
        match = _PROMPT_ID.fullmatch(prompt_id) if isinstance(prompt_id, str) else None
        item = f"{match[1]}-{match[2]}" if match else ""
        options = [int(number) for number in match[3].split(", ")] if match else []
        if item not in self._number_of or sorted(options) != sorted(self._options(item)):
            shown = repr(prompt_id)[:80]
            raise ValueError(f"prompt_id = {shown}; expected an item with its options, as in 'K-37: 17, 93, 40'")
        return item, options


def _name(number: int) -> str:
    letter, value = divmod(number, len(_NUMBERS))
    return f"{ascii_uppercase[letter]}-{_NUMBERS[value]}"


def _prompt_id(item: str, options: list[int]) -> str:
    return f"{item}: {', '.join(map(str, options))}"
