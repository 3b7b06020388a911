"""Exact values of the best policies of a small environment with a hidden state, with and without memory.

With memory a policy is as good as one that maps a belief, the weights of the states given all that was seen, to an
action. With t turns left,

    V(b, t) = max over actions of  sum over s of b(s) E[reward]  +  sum over observations o of V(b_o, t - 1)
    V(b, 0) = 0

where b_o holds the states that the action leads to and that show o, with their probabilities and not scaled to 1.
Without memory (a reactive policy) an action is chosen by the last observation alone, without the number of turns taken.
The best of all deterministic policies of this kind is found by branch and bound: an observation gets its action when it
is met first, and the value with memory from there on bounds what any completion earns.

All is computed in whole numbers, so nothing is rounded. `Solved` gives an environment both values of each prompt.

Source: Kaelbling, Littman and Cassandra 1998, Artificial
Intelligence 101, section 3; Littman 1994, "Memoryless policies: theoretical limitations and practical results".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import Any, NamedTuple

State = Hashable
Belief = Mapping[Any, int]  # state -> weight


class Outcome(NamedTuple):
    """One thing that an action can lead to. `state` is None at the end of the episode."""

    weight: int  # its probability, times `Pomdp.scale`
    reward: int  # times `Pomdp.reward_scale`
    state: State | None
    seen: str


class Pomdp(ABC):
    """A finite environment with a hidden state.

    Invariant: the weights of the outcomes of an action sum to `scale`; no reward is negative.
    """

    actions: Sequence[str]
    scale: int = 1
    reward_scale: int = 1

    @abstractmethod
    def starts(self) -> Iterable[tuple[int, State, str]]:
        """Return weight, state and first observation of each start; the weights may have any sum above 0."""

    @abstractmethod
    def outcomes(self, state: Any, action: str) -> Iterable[Outcome]:
        """Return what an action can lead to from a state."""


@dataclass(frozen=True)
class OptimalValues:
    """Expected rewards of the best policies. Invariant: `without_memory` <= `with_memory`."""

    with_memory: float
    without_memory: float  # of the best deterministic policy that sees the last observation alone


def optimal_values(pomdp: Pomdp, num_turns: int) -> OptimalValues:
    """Return the exact values of the best policies for episodes of `num_turns` turns."""
    policies = Policies(pomdp)
    return OptimalValues(float(policies.with_memory(num_turns)), float(policies.without_memory(num_turns)))


class Solved(ABC):
    """An environment whose best policies are computed exactly, prompt by prompt.

    Invariant: `optimal_value(id)` is `optimal_values(id).with_memory`; both are means over all that the prompt's text
    leaves hidden.
    """

    @abstractmethod
    def solved(self, prompt_id: str) -> tuple[Policies, int]:
        """Return the best policies of a prompt's task and the number of turns of an episode.

        Raises:
            ValueError: this environment has no such task.
        """

    def optimal_value(self, prompt_id: str) -> float:
        """Return the expected reward of the best policy with memory: much faster than both values."""
        policies, turns = self.solved(prompt_id)
        return float(policies.with_memory(turns))

    def optimal_values(self, prompt_id: str) -> OptimalValues:
        """Return the exact values of the best policies with and without memory."""
        policies, turns = self.solved(prompt_id)
        return OptimalValues(float(policies.with_memory(turns)), float(policies.without_memory(turns)))


class Policies:
    """The best policies of one environment.

    Invariant: `_best` is the value of a belief of weights without a common divisor, times reward_scale * scale^turns.
    """

    def __init__(self, pomdp: Pomdp):
        self.pomdp = pomdp
        self.first: dict[str, dict[Any, int]] = {}  # first observation -> belief
        for weight, state, seen in pomdp.starts():
            _add(self.first, seen, state, weight)
        self._best: dict[Any, tuple[int, str]] = {}
        self._reactive: dict[int, Fraction] = {}  # number of turns -> value without memory

    def after(self, belief: Belief, action: str) -> tuple[int, dict[str, dict[Any, int]]]:
        """Return the reward of an action at a belief, and the belief that each observation leads to."""
        earned = 0
        beliefs: dict[str, dict[Any, int]] = {}
        for state, weight in belief.items():
            for outcome in self.pomdp.outcomes(state, action):
                earned += weight * outcome.weight * outcome.reward
                if outcome.state is not None:
                    _add(beliefs, outcome.seen, outcome.state, weight * outcome.weight)
        return earned, beliefs

    def best(self, belief: Belief, turns: int) -> tuple[int, str]:
        """Return the value of a belief with memory, times reward_scale * scale^turns, and the first best action."""
        if not turns:
            return 0, self.pomdp.actions[0]
        common = gcd(*belief.values())
        belief = {state: weight // common for state, weight in belief.items()}
        key = (frozenset(belief.items()), turns)
        if key not in self._best:
            best = (-1, "")
            for action in self.pomdp.actions:
                earned, beliefs = self.after(belief, action)
                value = earned * self.pomdp.scale ** (turns - 1)
                value += sum(self.best(each, turns - 1)[0] for each in beliefs.values())
                best = (value, action) if value > best[0] else best
            self._best[key] = best
        value, action = self._best[key]
        return value * common, action

    def with_memory(self, turns: int) -> Fraction:
        """Return the expected reward of the best policy that remembers all it saw."""
        return self._unscaled(sum(self.best(belief, turns)[0] for belief in self.first.values()), turns)

    def without_memory(self, turns: int) -> Fraction:
        """Return the expected reward of the best deterministic policy that sees the last observation alone."""
        if turns not in self._reactive:
            self._reactive[turns] = self._unscaled(self._completed({}, turns, 0), turns)
        return self._reactive[turns]

    def _unscaled(self, value: int, turns: int) -> Fraction:
        total = sum(sum(belief.values()) for belief in self.first.values())
        return Fraction(value, total * self.pomdp.reward_scale * self.pomdp.scale**turns)

    def _completed(self, policy: dict[str, str], turns: int, floor: int) -> int:
        """Return the most that any completion of a partial policy earns, or `floor` if none earns more."""
        earned, open_beliefs = self._played(policy, turns)
        most = earned + sum(self.best(belief, left)[0] for _, left, belief in open_beliefs)
        if most <= floor or not open_beliefs:
            return max(earned, floor)
        seen, left, belief = open_beliefs[0]
        first = self.best(belief, left)[1]  # a good policy early leaves less to search
        for action in sorted(self.pomdp.actions, key=lambda action: action != first):
            floor = self._completed({**policy, seen: action}, turns, floor)
        return floor

    def _played(self, policy: Mapping[str, str], turns: int) -> tuple[int, list[tuple[str, int, Belief]]]:
        """Return what a partial policy earns, and where it has no action: observation, turns left, belief."""
        earned = 0
        beliefs = self.first
        open_beliefs: list[tuple[str, int, Belief]] = []
        for left in range(turns, 0, -1):
            following: dict[str, dict[Any, int]] = {}
            for seen, belief in beliefs.items():
                if seen not in policy:
                    open_beliefs.append((seen, left, belief))
                    continue
                reward, parts = self.after(belief, policy[seen])
                earned += reward * self.pomdp.scale ** (left - 1)
                for next_seen, part in parts.items():
                    for state, weight in part.items():
                        _add(following, next_seen, state, weight)
            beliefs = following
        return earned, open_beliefs


def _add(beliefs: dict[str, dict[Any, int]], seen: str, state: Any, weight: int) -> None:
    belief = beliefs.setdefault(seen, {})
    belief[state] = belief.get(state, 0) + weight
