"""Find a hidden number by queries to an oracle that lies at times.

    Question: One of 12, 35, 47, 81 is hidden. A reply lies in 10% of cases, a query costs 2%. Which is it?
    Action: above 35
    above 35: yes
    Action: above 47
    above 47: no
    Action: answer 47                               reward .96: right, after two queries

Each number is as likely, and each reply lies with the same probability, also a repeated one: asking again helps. Valid
queries are "above" one of the numbers, the largest apart. The best policy with memory keeps a belief. One without
memory sees one reply, so it cannot weigh two replies against each other.

The prompt id is the task with its draws of chance: "12, 35, 47, 81. hidden 47. dice 19 2 7 3 11 5". There is one die
of 0 to 19 for each turn, and the reply to the k-th query is a lie if 5 times the k-th die is below `lie_percent`; so
prompts drawn uniformly have lies of exactly this probability. The split depends on the numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import comb

from rllib_srl.envs.games.beliefs import Policies
from rllib_srl.envs.games.inquiry import Case, Inquiry, InquirySettings, InquiryWorld, policies_of
from rllib_srl.envs.math.compare import combination

_VALUES = range(10, 100)
_SIDES = 20  # of a die
_MOST_NUMBERS = 5  # the best policies of more take longer to compute than a start may
_PROMPT_ID = re.compile(r"(\d\d(?:, \d\d)+)\. hidden (\d\d)\. dice (\d{1,2}(?: \d{1,2})*)", re.ASCII)


@dataclass(frozen=True)
class OracleSettings(InquirySettings):
    """Settings of `Oracle`. Invariant: as in `TurnSettings`."""

    num_turns: int = 6
    num_numbers: int = 4
    lie_percent: int = 10

    def faults(self) -> list[str]:
        """Return one error message for each setting out of its range."""
        faults = super().faults()
        if not 2 <= self.num_numbers <= _MOST_NUMBERS:
            faults.append(f"num_numbers = {self.num_numbers}; expected 2 to {_MOST_NUMBERS}")
        if self.lie_percent not in range(0, 50, 5):
            faults.append(f"lie_percent = {self.lie_percent}; expected 0 to 45 in steps of 5")
        return faults


class Oracle(InquiryWorld):
    """A number to be found by queries whose replies may be lies.

    Invariant: over all prompts of the same numbers, the hidden number is uniform, and lies are independent of it and of
    each other.
    """

    domain = "oracle"
    settings_class = OracleSettings
    settings: OracleSettings

    def _num_ids(self) -> int:
        num = self.settings.num_numbers
        num_ids: int = comb(len(_VALUES), num) * num * _SIDES**self.settings.num_turns
        return num_ids

    def _prompt_id(self, number: int) -> str:
        dice = []
        for _ in range(self.settings.num_turns):
            number, die = divmod(number, _SIDES)
            dice.append(die)
        number, hidden = divmod(number, self.settings.num_numbers)
        values = [_VALUES[index] for index in combination(number, len(_VALUES), self.settings.num_numbers)]
        return f"{', '.join(map(str, values))}. hidden {values[hidden]}. dice {' '.join(map(str, dice))}"

    def canonical(self, prompt_id: str) -> str:
        """Return the numbers, whichever is hidden."""
        self.case(prompt_id)
        return prompt_id.partition(".")[0]

    def case(self, prompt_id: str) -> Case:
        """Return the task of a prompt."""
        found = _PROMPT_ID.fullmatch(prompt_id) if isinstance(prompt_id, str) and len(prompt_id) < 80 else None
        values = [int(value) for value in found[1].split(", ")] if found else []
        dice = [int(die) for die in found[3].split()] if found else []
        is_right = found and 2 <= len(values) <= _MOST_NUMBERS and values == sorted(set(values)) and values[0] >= 10
        if not found or not is_right or int(found[2]) not in values or not self._are_dice(dice):
            raise ValueError(
                f"prompt_id = {prompt_id!r}; expected 2 to {_MOST_NUMBERS} ascending numbers, the hidden one and "
                f"num_turns = {self.settings.num_turns} dice of 0 to {_SIDES - 1}, as in "
                "'12, 35, 47, 81. hidden 47. dice 19 2 7 3 11 5'"
            )
        lies = frozenset(k for k, die in enumerate(dice) if die * 100 < self.settings.lie_percent * _SIDES)
        inquiry = _inquiry(tuple(values), self.settings.lie_percent, self.settings.cost_percent)
        question = (
            f"One of {found[1]} is hidden. A reply lies in {self.settings.lie_percent}% of cases, "
            f"a query costs {self.settings.cost_percent}%. Which is it?"
        )
        return Case(question, inquiry, f"answer {found[2]}", lies)

    def solved(self, prompt_id: str) -> tuple[Policies, int]:
        """Return the best policies for the smallest numbers: the values depend on how many there are only."""
        values = tuple(_VALUES[: len(self.case(prompt_id).inquiry.prior)])
        inquiry = _inquiry(values, self.settings.lie_percent, self.settings.cost_percent)
        return policies_of(inquiry), self.settings.num_turns

    def usage(self, inquiry: Inquiry) -> str:
        """Return what is a valid action."""
        return f"Say above and one of {_named(inquiry.chances)}, or answer and one of {_named(inquiry.prior)}."

    def _are_dice(self, dice: list[int]) -> bool:
        return len(dice) == self.settings.num_turns and max(dice) < _SIDES


@lru_cache(maxsize=64)
def _inquiry(values: tuple[int, ...], lie_percent: int, cost_percent: int) -> Inquiry:
    prior = {f"answer {value}": 1 for value in values}
    chances = {
        f"above {bound}": {f"answer {value}": 100 - lie_percent if value > bound else lie_percent for value in values}
        for bound in values[:-1]
    }
    return Inquiry(prior, chances, ("yes", "no"), cost_percent)


def _named(actions: Iterable[str]) -> str:
    """Return the numbers of some actions."""
    return ", ".join(action.split()[1] for action in actions)
