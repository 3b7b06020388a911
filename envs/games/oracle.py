"""Find a hidden number by queries to an oracle that lies at times.

    Question: One of 12, 35, 47, 81 is hidden. A reply lies in 10% of cases, a query costs 2%. Which is it?
    Action: above 35
    above 35: yes
    Action: above 47
    above 47: no
    Action: answer 47                               reward .96: right, after two queries

Each number is as likely, and each reply lies with the same probability, also a repeated one: asking again helps. Valid
queries are "above" one of the numbers, the largest apart. The right answer after k queries earns 1 - k cost_percent /
100, a wrong one 0; a turn that is not a valid action costs no reward, but it uses up a turn. The best policy with
memory keeps a belief. One without memory sees one reply, which repeats its query, so it cannot weigh two replies
against each other. Gold turns answer at once, since they are computed from what is hidden; shots show the best policy
with memory.

The prompt id is the task with its draws of chance: "12, 35, 47, 81. hidden 47. dice 19 2 7 3 11 5". There is one die
of 0 to 19 for each turn, and the reply to the k-th query is a lie if 5 times the k-th die is below `lie_percent`; so
prompts drawn uniformly have lies of exactly this probability. The split depends on the numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import comb, gcd
from typing import Annotated

from rllib_srl.envs.math.compare import combination
from rllib_srl.envs.settings import Within
from rllib_srl.envs.turns import Answer, TurnEnv, TurnSettings

_VALUES = range(10, 100)
_SIDES = 20  # of a die
_MOST_NUMBERS = 5  # the best policies of more take longer to compute than a start may
_PROMPT_ID = re.compile(r"(\d\d(?:, \d\d)+)\. hidden (\d\d)\. dice (\d{1,2}(?: \d{1,2})*)", re.ASCII)


@dataclass(frozen=True)
class OracleSettings(TurnSettings):
    """Settings of `Oracle`. Invariant: as in `TurnSettings`."""

    num_turns: Annotated[int, Within(2, 6)] = 6  # the best policies of more take too long to compute
    cost_percent: int = 2  # of the reward, for each query
    num_numbers: Annotated[int, Within(2, _MOST_NUMBERS)] = 4
    lie_percent: Annotated[int, Within(0, 45)] = 10  # in steps of 5

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        errors, most = [], 100 // (self.num_turns - 1)
        if not 0 <= self.cost_percent <= most:
            errors.append(
                f"cost_percent = {self.cost_percent}; expected 0 to {most}, so that the {self.num_turns - 1} queries "
                f"that num_turns = {self.num_turns} allows leave a reward of at least 0"
            )
        if self.lie_percent % 5:
            errors.append(f"lie_percent = {self.lie_percent}; expected 0 to 45 in steps of 5")
        return errors


class Inquiry:
    """What is known of a task before its first query, and the best policy that remembers all replies.

    The policy keeps a belief, the weights of the numbers that may be hidden. With t turns left the value of a belief is

        V(b, t) = max over actions of  expected reward  +  sum over replies of V(b after the reply, t - 1),  V(b, 0) = 0

    in whole numbers, so that nothing is rounded. Actions are as the policy writes them.

    Source: Kaelbling, Littman and Cassandra 1998, Artificial Intelligence 101, section 3.
    """

    def __init__(self, values: tuple[int, ...], lie_percent: int, cost_percent: int):
        self.answers = {f"answer {value}": value for value in values}
        self.queries = {f"above {value}": value for value in values[:-1]}
        self._lie_percent, self._cost_percent = lie_percent, cost_percent
        self._best: dict[object, tuple[int, str]] = {}

    def percent_earned(self, num_queries: int) -> int:
        """Return the reward of the right answer after some queries, in percent."""
        return 100 - self._cost_percent * num_queries

    def reply(self, query: str, hidden: int, is_lie: bool) -> str:
        """Return the text of a reply."""
        return f"{query}: {'yes' if (hidden > self.queries[query]) != is_lie else 'no'}"

    def after(self, belief: Mapping[int, int], query: str) -> dict[str, dict[int, int]]:
        """Return the belief that each reply leads to; together their weights are 100 times those before."""
        beliefs: dict[str, dict[int, int]] = {}
        for hidden, weight in belief.items():
            for chance, is_lie in ((100 - self._lie_percent, False), (self._lie_percent, True)):
                if chance:
                    beliefs.setdefault(self.reply(query, hidden, is_lie), {})[hidden] = weight * chance
        return beliefs

    def best(self, belief: Mapping[int, int], num_queries: int, turns: int) -> tuple[int, str]:
        """Return the value of a belief, times 100 ** turns times 100 for percent, and the first best action."""
        if not turns:
            return 0, ""
        common = gcd(*belief.values())
        belief = {hidden: weight // common for hidden, weight in belief.items()}
        key = (frozenset(belief.items()), num_queries, turns)
        if key not in self._best:
            right = self.percent_earned(num_queries) * 100**turns
            values = {action: belief.get(value, 0) * right for action, value in self.answers.items()}
            for query in self.queries:
                following = self.after(belief, query).values()
                values[query] = sum(self.best(each, num_queries + 1, turns - 1)[0] for each in following)
            action = max(values, key=values.__getitem__)
            self._best[key] = values[action], action
        value, action = self._best[key]
        return value * common, action


@dataclass(frozen=True)
class Case:
    """One prompt: a task with what is hidden. Invariant: `hidden` is one of the numbers."""

    question: str
    inquiry: Inquiry
    hidden: int
    lies: frozenset[int]  # numbers of the queries, from 0, whose reply is a lie

    def reply(self, query: str, num_queries: int) -> str:
        """Return the reply to a query after `num_queries` others."""
        return self.inquiry.reply(query, self.hidden, num_queries in self.lies)


class Oracle(TurnEnv):
    """A number to be found by queries whose replies may be lies.

    Invariant: over all prompts of the same numbers, the hidden number is uniform, and lies are independent of it and of
    each other.
    """

    domain = "oracle"
    settings_class = OracleSettings
    settings: OracleSettings

    @property
    def pass_reward(self) -> float:
        """The reward of the right answer after as many queries as there are turns for: less is a wrong answer."""
        return max(100 - self.settings.cost_percent * (self.settings.num_turns - 1), 1) / 100

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
        """Return the task of a prompt.

        Raises:
            ValueError: this environment has no such task.
        """
        match = _PROMPT_ID.fullmatch(prompt_id) if isinstance(prompt_id, str) and len(prompt_id) < 80 else None
        values = [int(value) for value in match[1].split(", ")] if match else []
        dice = [int(die) for die in match[3].split()] if match else []
        is_right = match and 2 <= len(values) <= _MOST_NUMBERS and values == sorted(set(values)) and values[0] >= 10
        if not match or not is_right or int(match[2]) not in values or not self._are_dice(dice):
            raise ValueError(
                f"prompt_id = {prompt_id!r}; expected 2 to {_MOST_NUMBERS} ascending numbers, the hidden one and "
                f"num_turns = {self.settings.num_turns} dice of 0 to {_SIDES - 1}, as in "
                "'12, 35, 47, 81. hidden 47. dice 19 2 7 3 11 5'"
            )
        lies = frozenset(k for k, die in enumerate(dice) if die * 100 < self.settings.lie_percent * _SIDES)
        question = (
            f"One of {match[1]} is hidden. A reply lies in {self.settings.lie_percent}% of cases, "
            f"a query costs {self.settings.cost_percent}%. Which is it?"
        )
        return Case(question, self._inquiry(tuple(values)), int(match[2]), lies)

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the right answer, without a query."""
        return [f" answer {self.case(prompt_id).hidden}\n"]

    def shot_turns(self, prompt_id: str) -> list[str]:
        """Return the turns of the best policy with memory."""
        case = self.case(prompt_id)
        inquiry, turns = case.inquiry, []
        belief = dict.fromkeys(inquiry.answers.values(), 1)
        for num_queries in range(self.settings.num_turns):
            action = inquiry.best(belief, num_queries, self.settings.num_turns - num_queries)[1]
            turns.append(f" {action}\n")
            if action in inquiry.answers:
                break
            belief = inquiry.after(belief, action)[case.reply(action, num_queries)]
        return turns

    def begin(self, prompt_id: str) -> str:
        """Set up a task, and state it."""
        self._case, self._num_queries = self.case(prompt_id), 0
        return self._case.question

    def answer(self, action: str) -> Answer:
        """Reply to a query, or grade the answer."""
        inquiry, action = self._case.inquiry, " ".join(action.removesuffix(".").split())
        if action in inquiry.answers:
            is_right = inquiry.answers[action] == self._case.hidden
            reward = inquiry.percent_earned(self._num_queries) / 100 if is_right else 0.0
            return Answer(reward=reward, is_over=True, info={"num_queries": self._num_queries})
        if action not in inquiry.queries:
            queries, answers = (", ".join(map(str, of.values())) for of in (inquiry.queries, inquiry.answers))
            return Answer(f"Unknown. Say above and one of {queries}, or answer and one of {answers}.", is_read=False)
        said = self._case.reply(action, self._num_queries)
        self._num_queries += 1
        return Answer(said)

    def _are_dice(self, dice: list[int]) -> bool:
        return len(dice) == self.settings.num_turns and max(dice) < _SIDES

    def _inquiry(self, values: tuple[int, ...]) -> Inquiry:
        return inquiry_of(values, self.settings.lie_percent, self.settings.cost_percent)


@lru_cache(maxsize=64)
def inquiry_of(values: tuple[int, ...], lie_percent: int, cost_percent: int) -> Inquiry:
    """Return the task of some numbers, one object for equal ones."""
    return Inquiry(values, lie_percent, cost_percent)
