"""Return the value of a name.

Question: a=12, b=40. b?
Answer: 40                                      reward 1; any other number 0; no number: unparsable
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import perm
from string import ascii_lowercase
from typing import Annotated

from rllib_srl.envs.math.compare import ordered_choice
from rllib_srl.envs.question import Question, QuestionEnv, QuestionSettings, integer_in
from rllib_srl.envs.settings import Within

_VALUES = range(10, 100)
_PROMPT_ID = re.compile(r"[a-z]=\d\d(, [a-z]=\d\d)+\. [a-z]\?", re.ASCII)


@dataclass(frozen=True)
class LookupSettings(QuestionSettings):
    """Settings of `Lookup`. Invariant: as in `QuestionSettings`."""

    num_pairs: Annotated[int, Within(2, 5)] = 2  # names with a value in a question


class Lookup(QuestionEnv):
    """Questions for one of several values, each with a one-letter name.

    Invariant: a prompt id is the text of its question; names and values are distinct.
    """

    domain = "lookup"
    settings_class = LookupSettings
    settings: LookupSettings

    @property
    def num_questions(self) -> int:
        """Return the exact number of choices of names, values and requested name, without the shots."""
        return self._num_ids() - self.settings.num_shots

    @property
    def chance(self) -> float:
        """Return the accuracy of stating one of the values at random."""
        return 1 / self.settings.num_pairs

    def _num_ids(self) -> int:
        num_pairs = self.settings.num_pairs
        return perm(len(ascii_lowercase), num_pairs) * perm(len(_VALUES), num_pairs) * num_pairs

    def _prompt_id(self, number: int) -> str:
        num_pairs = self.settings.num_pairs
        number, asked = divmod(number, num_pairs)
        number, choice = divmod(number, perm(len(ascii_lowercase), num_pairs))
        names = ordered_choice(choice, ascii_lowercase, num_pairs)
        values = ordered_choice(number, _VALUES, num_pairs)
        return ", ".join(f"{name}={value}" for name, value in zip(names, values)) + f". {names[asked]}?"

    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`."""
        pairs, name = self._pairs(prompt_id)
        others = [value for other, value in pairs.items() if other != name]
        return Question(text=prompt_id, answer=pairs[name], wrong=others[0], canonical=prompt_id)

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return 1 for the value of the requested name, 0 for another number, None for no number."""
        value = integer_in(answer)
        pairs, name = self._pairs(prompt_id)
        return None if value is None else float(value == int(pairs[name]))

    def _pairs(self, prompt_id: str) -> tuple[dict[str, str], str]:
        expected = f"prompt_id = {prompt_id!r}; expected pairs and a name among them, as in 'a=12, b=40. b?'"
        if not _PROMPT_ID.fullmatch(str(prompt_id)):
            raise ValueError(expected)
        listed, name = prompt_id[:-1].split(". ")
        pairs = dict(pair.split("=") for pair in listed.split(", "))
        if name not in pairs or len(pairs) != listed.count("="):
            raise ValueError(expected)
        return pairs, name
