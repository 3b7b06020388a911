"""Base class for tasks of queries and one answer: each query costs some of the reward that the right answer earns.

    reward = 1 - cost_percent / 100 x number of queries     for the right answer, 0 for a wrong one or none

What is hidden does not change while it is asked about, and every query has two replies. A reply repeats its query, so
that a policy without memory sees one query with its reply. A turn that is not a valid action costs no reward, but it
uses up a turn.

Gold turns answer at once, since they are computed from what is hidden. Shots show the best policy with memory instead.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from rllib_srl.envs.games.beliefs import Outcome, Policies, Pomdp, Solved
from rllib_srl.envs.turns import Answer, TurnSettings, TurnWorld


@dataclass(frozen=True)
class InquirySettings(TurnSettings):
    """Settings of every environment of queries and one answer. Invariant: as in `TurnSettings`."""

    num_turns: int = 4
    cost_percent: int = 2  # of the reward, for each query

    def faults(self) -> list[str]:
        """Return one error message for each setting out of its range."""
        faults = super().faults()
        if not 2 <= self.num_turns <= 6:
            faults.append(f"num_turns = {self.num_turns}; expected 2 to 6 (the best policies are computed exactly)")
        elif not 0 <= self.cost_percent <= 100 // (self.num_turns - 1):
            faults.append(
                f"cost_percent = {self.cost_percent}; expected 0 to {100 // (self.num_turns - 1)}, so that the "
                f"{self.num_turns - 1} queries that num_turns = {self.num_turns} allows leave a reward of at least 0"
            )
        return faults


class Inquiry(Pomdp):
    """What is known of a task before its first query.

    Invariant: the state is the right answer and the number of queries made; actions are as the policy writes them.

    Args:
        prior: right answer, such as "answer 47" -> its weight, above 0
        chances: query, such as "above 35" -> right answer -> percentage of the first of the two replies
        replies: the two replies, such as "yes" and "no"
        cost_percent: of the reward, for each query
    """

    scale = 100
    reward_scale = 100

    def __init__(
        self,
        prior: Mapping[str, int],
        chances: Mapping[str, Mapping[str, int]],
        replies: tuple[str, str],
        cost_percent: int,
    ):
        self.prior, self.chances, self.replies, self.cost_percent = prior, chances, replies, cost_percent
        self.actions = (*prior, *chances)

    def starts(self) -> Iterable[tuple[int, tuple[str, int], str]]:
        """Return the right answers with their weights; the first observation is the same for all."""
        return [(weight, (right, 0), "") for right, weight in self.prior.items()]

    def outcomes(self, state: tuple[str, int], action: str) -> Iterable[Outcome]:
        """Return the reward of an answer, or the two replies to a query."""
        right, num_queries = state
        if action in self.prior:
            return [Outcome(self.scale, self.percent_earned(num_queries) if action == right else 0, None, "")]
        chance = self.chances[action][right]
        each = zip((chance, self.scale - chance), (True, False), strict=True)
        return [Outcome(p, 0, (right, num_queries + 1), self.reply(action, is_first)) for p, is_first in each if p]

    def percent_earned(self, num_queries: int) -> int:
        """Return the reward of the right answer after some queries, in percent."""
        return 100 - self.cost_percent * num_queries

    def reply(self, query: str, is_first: bool) -> str:
        """Return the text of a reply."""
        return f"{query}: {self.replies[not is_first]}"


@dataclass(frozen=True)
class Case:
    """One prompt: a task with what is hidden. Invariant: `right` is a key of the inquiry's prior."""

    question: str
    inquiry: Inquiry
    right: str
    lies: frozenset[int] = frozenset()  # numbers of the queries, from 0, that get the less likely reply

    def reply(self, query: str, num_queries: int) -> str:
        """Return the reply to a query after `num_queries` others."""
        is_likely = self.inquiry.chances[query][self.right] > 50
        return self.inquiry.reply(query, is_likely != (num_queries in self.lies))


class InquiryWorld(TurnWorld, Solved):
    """An environment of queries and one answer. Invariant: a prompt id holds its draws of chance (see `Case.lies`)."""

    settings_class = InquirySettings
    settings: InquirySettings

    @property
    def pass_reward(self) -> float:
        """The reward of the right answer after as many queries as there are turns for: less is a wrong answer."""
        return max(100 - self.settings.cost_percent * (self.settings.num_turns - 1), 1) / 100

    @abstractmethod
    def case(self, prompt_id: str) -> Case:
        """Return the task of a prompt.

        Raises:
            ValueError: this environment has no such task.
        """

    @abstractmethod
    def usage(self, inquiry: Inquiry) -> str:
        """Return the reply to a turn that is not a valid action: what is one."""

    def read(self, action: str) -> str:
        """Return an action in the spelling of `Inquiry.actions`, where it is a valid one."""
        return " ".join(action.removesuffix(".").split())

    def solved(self, prompt_id: str) -> tuple[Policies, int]:
        """Return the best policies of a prompt's task and the number of turns."""
        return policies_of(self.case(prompt_id).inquiry), self.settings.num_turns

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the right answer, without a query."""
        return [f" {self.case(prompt_id).right}\n"]

    def shot_turns(self, prompt_id: str) -> list[str]:
        """Return the turns of the best policy with memory."""
        case = self.case(prompt_id)
        policies, turns = policies_of(case.inquiry), []
        belief = policies.first[""]
        for left in range(self.settings.num_turns, 0, -1):
            action = policies.best(belief, left)[1]
            turns.append(f" {action}\n")
            if action in case.inquiry.prior:
                break
            belief = policies.after(belief, action)[1][case.reply(action, len(turns) - 1)]
        return turns

    def begin(self, prompt_id: str) -> str:
        """Set up a task, and state it."""
        self._case, self._num_queries = self.case(prompt_id), 0
        return self._case.question

    def answer(self, action: str) -> Answer:
        """Reply to a query, or grade the answer."""
        inquiry, action = self._case.inquiry, self.read(action)
        if action in inquiry.prior:
            reward = inquiry.percent_earned(self._num_queries) / 100 if action == self._case.right else 0.0
            return Answer(reward=reward, is_over=True, info={"num_queries": self._num_queries})
        if action not in inquiry.chances:
            return Answer(f"Unknown. {self.usage(inquiry)}", is_read=False)
        said = self._case.reply(action, self._num_queries)
        self._num_queries += 1
        return Answer(said)


@lru_cache(maxsize=64)
def policies_of(inquiry: Inquiry) -> Policies:
    return Policies(inquiry)
