"""Find the faulty parts of a program by tests, each of which covers some of them.

    Question: Faulty with: A 20%, B 30%, C 10%. Tests: 1 A B, 2 B C, 3 A. A test costs 2%. Which are faulty?
    Action: test 1
    test 1: fail
    Action: test 3
    test 3: pass
    Action: answer B                                reward .96: right, after two tests

Each part is faulty with its own probability, independently of the others. A test passes if none of the parts that it
covers is faulty, whenever it is run. The answer names all faulty parts and no other, in any order: "answer A C", or
"answer none". The best policy with memory keeps a belief over sets of faulty parts. One without memory sees the last
test only.

The prompt id is the task with its draws of chance: "A 20, B 30, C 10. AB BC A. dice 2 0 7". There is one die of 0 to 9
for each part, which is faulty if ten times its die is below its percentage; so among prompts drawn uniformly a part is
faulty with exactly its probability. The split depends on the probabilities and the tests, whatever their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import perm, prod

from rllib_srl.envs.games.inquiry import Case, Inquiry, InquirySettings, InquiryWorld
from rllib_srl.envs.math.compare import ordered_choice

PARTS = "ABCD"
_MOST_TESTS = 4  # the best policies of more take longer to compute than a start may
_PERCENTAGES = (10, 20, 30, 40, 50)
_SIDES = 10  # of a die
_PROMPT_ID = re.compile(r"([A-D] \d0(?:, [A-D] \d0)+)\. ([A-D]+(?: [A-D]+)*)\. dice (\d(?: \d)*)", re.ASCII)


@dataclass(frozen=True)
class FaultsSettings(InquirySettings):
    """Settings of `Faults`. Invariant: as in `TurnSettings`."""

    num_parts: int = 3
    num_tests: int = 3
    least_percent: int = 10  # probability of the least faulty part; the higher it is, the less "none" is worth

    def faults(self) -> list[str]:
        """Return one error message for each setting out of its range."""
        faults = super().faults()
        if not 2 <= self.num_parts <= len(PARTS):
            faults.append(f"num_parts = {self.num_parts}; expected 2 to {len(PARTS)}")
        elif not 1 <= self.num_tests <= (most := min(_MOST_TESTS, 2**self.num_parts - 1)):
            faults.append(f"num_tests = {self.num_tests}; expected 1 to {most} for num_parts = {self.num_parts}")
        if self.least_percent not in _PERCENTAGES:
            faults.append(f"least_percent = {self.least_percent}; expected one of {', '.join(map(str, _PERCENTAGES))}")
        return faults

    @property
    def percentages(self) -> tuple[int, ...]:
        """Return the probabilities that parts can have, in percent."""
        return tuple(percent for percent in _PERCENTAGES if percent >= self.least_percent)


class Faults(InquiryWorld):
    """Faulty parts to be found by tests.

    Invariant: over all prompts with the same text, parts are faulty independently, each with the stated probability.
    """

    domain = "faults"
    settings_class = FaultsSettings
    settings: FaultsSettings

    def _num_ids(self) -> int:
        num = self.settings.num_parts
        num_ids: int = (len(self.settings.percentages) * _SIDES) ** num * perm(2**num - 1, self.settings.num_tests)
        return num_ids

    def _prompt_id(self, number: int) -> str:
        parts, percentages = PARTS[: self.settings.num_parts], self.settings.percentages
        dice, priors = [], []
        for part in parts:
            number, die = divmod(number, _SIDES)
            number, index = divmod(number, len(percentages))
            dice.append(str(die))
            priors.append(f"{part} {percentages[index]}")
        covers = _subsets(parts)[1:]
        tests = ["".join(cover) for cover in ordered_choice(number, covers, self.settings.num_tests)]
        return f"{', '.join(priors)}. {' '.join(tests)}. dice {' '.join(dice)}"

    def canonical(self, prompt_id: str) -> str:
        """Return the probabilities and the tests in alphabetical order, whatever is faulty."""
        self.case(prompt_id)
        priors, tests, _ = prompt_id.split(". ")
        return f"{priors}. {' '.join(sorted(tests.split()))}"

    def case(self, prompt_id: str) -> Case:
        """Return the task of a prompt."""
        found = _PROMPT_ID.fullmatch(prompt_id) if isinstance(prompt_id, str) and len(prompt_id) < 80 else None
        priors = [pair.split() for pair in found[1].split(", ")] if found else []
        tests, dice = (found[2].split(), found[3].split()) if found else ([], [])
        names = "".join(name for name, _ in priors)
        is_right = names == PARTS[: len(names)] and len(dice) == len(names)
        is_right &= all(int(percentage) in _PERCENTAGES for _, percentage in priors)
        is_right &= len(set(tests)) == len(tests) <= _MOST_TESTS
        is_right &= set(tests) <= {"".join(cover) for cover in _subsets(names)}
        if not found or not is_right:
            raise ValueError(
                f"prompt_id = {prompt_id!r}; expected the parts from A on with percentages of {_PERCENTAGES[0]} to "
                f"{_PERCENTAGES[-1]}, at most {_MOST_TESTS} different tests of them and a die of 0 to {_SIDES - 1} for "
                "each part, as in 'A 20, B 30, C 10. AB BC A. dice 2 0 7'"
            )
        percentages = tuple(int(percentage) for _, percentage in priors)
        faulty = [name for name, percent, die in zip(names, percentages, dice, strict=True) if int(die) * 10 < percent]
        listed = ", ".join(f"{number} {' '.join(test)}" for number, test in enumerate(tests, 1))
        question = (
            f"Faulty with: {', '.join(f'{name} {percent}%' for name, percent in priors)}. Tests: {listed}. "
            f"A test costs {self.settings.cost_percent}%. Which are faulty?"
        )
        return Case(question, _inquiry(percentages, tuple(tests), self.settings.cost_percent), _answer(faulty))

    def usage(self, inquiry: Inquiry) -> str:
        """Return what is a valid action."""
        return (
            f"Say test and a number of 1 to {len(inquiry.chances)}, or answer and all faulty parts, as in answer A B, "
            "or answer none."
        )

    def read(self, action: str) -> str:
        """Return an action with the parts of an answer in alphabetical order."""
        verb, *rest = super().read(action).split() or [""]
        return " ".join([verb, *(sorted(rest) if verb == "answer" else rest)])


@lru_cache(maxsize=64)
def _inquiry(percentages: tuple[int, ...], tests: tuple[str, ...], cost_percent: int) -> Inquiry:
    odds = dict(zip(PARTS, percentages, strict=False))
    sets = {_answer(faulty): faulty for faulty in _subsets("".join(odds))}
    prior = {
        right: prod(percent if part in faulty else 100 - percent for part, percent in odds.items())
        for right, faulty in sets.items()
    }
    fails = {
        f"test {number}": {right: 100 * bool(set(test) & set(faulty)) for right, faulty in sets.items()}
        for number, test in enumerate(tests, 1)
    }
    return Inquiry(prior, fails, ("fail", "pass"), cost_percent)


def _answer(faulty: Iterable[str]) -> str:
    return f"answer {' '.join(faulty) or 'none'}"


def _subsets(parts: str) -> list[list[str]]:
    """Return all sets of some parts, the empty one first."""
    chosen = product((False, True), repeat=len(parts))
    return [[part for part, is_in in zip(parts, each, strict=True) if is_in] for each in chosen]
