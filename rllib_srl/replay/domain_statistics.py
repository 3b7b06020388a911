"""Keep statistics of each domain's played groups: mean reward, share with signal, solutions, likeness of its items.

    played group ──note──> faded sums of its domain ──> mean, signal_rate, num_unsolved, unsolved_scale, icc

Every played group counts, also one that was refused. Within a call, groups count in their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rllib_srl.replay.history import SMALL_GROUP, varies
from rllib_srl.replay.visits import GroupFacts

REWARD_FADE = 0.97  # a group
SIGNAL_FADE = 0.985  # a group; of pairs of visits too
FIRST_SOLVED, FIRST_SOLVED_WEIGHT = 4.0, 2.0  # prior mean of groups that vary before an item is first solved
NO_WEIGHT = 1e-9  # below it nothing but rounding is left of a faded weight
_OF_MEAN = ("reward", "reward_weight", "num_noted")
MIN_PAIRS = 8.0  # faded pairs of visits below which the likeness of items is unknown


@dataclass
class _Sums:
    """Faded sums of one domain."""

    reward: float = 0.0  # of groups' mean rewards
    reward_weight: float = 0.0
    num_noted: int = 0  # groups
    num_signal: float = 0.0  # M
    num_groups: float = 0.0  # T
    num_unsolved: int = 0  # groups whose rewards vary, of a domain of which nothing was ever solved
    is_solved: bool = False
    first_solved: float = 0.0  # groups whose rewards vary before a first solution, summed over items
    num_first_solved: int = 0
    # successive pass rates x, y of an item
    pairs: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0


class DomainStatistics:
    """Statistics by domain name. Invariant: `get_state` holds all of it, as JSON types."""

    def __init__(self) -> None:
        """Start without groups."""
        self._sums: dict[str, _Sums] = {}

    def note(
        self,
        domain: str,
        facts: GroupFacts,
        before: np.void | None,
        is_solved: bool,
        compares_singles: bool = True,
    ) -> int:
        """Add a played group; return its number among the groups of its domain, from 1.

        Args:
            domain: of its prompt.
            facts: summary of the group.
            before: row of its item before the visit; None: it has no item.
            is_solved: whether its item was ever solved, this visit included; False without an item.
            compares_singles: as in `history.varies`.
        """
        sums, has_signal = self._sums.setdefault(domain, _Sums()), facts.variance > 0
        sums.reward = REWARD_FADE * sums.reward + facts.reward
        sums.reward_weight = REWARD_FADE * sums.reward_weight + 1
        sums.num_noted += 1
        sums.num_signal = SIGNAL_FADE * sums.num_signal + has_signal
        sums.num_groups = SIGNAL_FADE * sums.num_groups + 1
        sums.is_solved |= is_solved or facts.num_success == facts.size >= SMALL_GROUP
        sums.num_unsolved = 0 if sums.is_solved else sums.num_unsolved + varies(facts, before, compares_singles)
        if before is None:
            return sums.num_noted
        if is_solved and not before["is_solved"]:
            sums.first_solved += int(before["num_unsolved"])
            sums.num_first_solved += 1
        if before["visits"] > 0:
            _note_pair(sums, int(before["num_success"]) / int(before["group_size"]), facts.num_success / facts.size)
        return sums.num_noted

    def mean(self, domain: str) -> float:
        """Return the faded mean reward of a domain; without a group, that of all domains; without any, .5."""
        reward, weight = self._rewards(domain)
        return reward / weight if weight else 0.5

    def expected_reward(self, domain: str) -> float:
        """Return (R + 1) / (T + 2), R the faded rewards of T groups: never 0 or 1, however few or alike they are."""
        reward, weight = self._rewards(domain)
        return (reward + 1) / (weight + 2)

    def _rewards(self, domain: str) -> tuple[float, float]:
        """Return the faded sum of a domain's rewards and its weight; without a group, those of all domains."""
        known = self._sums.get(domain)
        parts = [known] if known is not None else list(self._sums.values())
        return sum(one.reward for one in parts), sum(one.reward_weight for one in parts)

    def means_without(
        self, domains: Sequence[str], domain_N: np.ndarray, place_N: np.ndarray, reward_N: np.ndarray
    ) -> np.ndarray:
        """Return `mean` of the domain of each of N groups, without the group itself, float64 [N].

        Args:
            domains: names.
            domain_N: position of each group's domain among `domains`.
            place_N: number of each group among those of its domain, as `note` returned it; 0: it is not among them.
            reward_N: mean reward of each group when it was noted.
        """
        of = [self._sums.get(name, _Sums()) for name in domains]
        reward_D, weight_D, num_D = (np.array([getattr(one, n) for one in of], np.float64) for n in _OF_MEAN)
        own_N = np.where(place_N > 0, REWARD_FADE ** (num_D[domain_N] - place_N), 0.0)
        sum_N, weight_N = reward_D[domain_N] - own_N * reward_N, weight_D[domain_N] - own_N
        is_alone_N = weight_N < NO_WEIGHT
        if not is_alone_N.any():
            without_N: np.ndarray = sum_N / weight_N
            return without_N
        totals = [sum(getattr(one, n) for one in self._sums.values()) for n in _OF_MEAN[:2]]
        sum_N = np.where(is_alone_N, totals[0] - reward_D[domain_N], sum_N)
        weight_N = np.where(is_alone_N, totals[1] - weight_D[domain_N], weight_N)
        is_known_N = weight_N >= NO_WEIGHT
        mean_N: np.ndarray = np.where(is_known_N, sum_N / np.where(is_known_N, weight_N, 1.0), 0.5)
        return mean_N

    def signal_rate(self, domain: str) -> float:
        """Return (M + 1) / (T + 2), M groups with signal of T groups: the chance that a group has signal."""
        sums = self._sums.get(domain, _Sums())
        return (sums.num_signal + 1) / (sums.num_groups + 2)

    def num_unsolved(self, domain: str) -> int:
        """Return the groups that vary, fresh ones included, while nothing of the domain was ever solved; then 0."""
        return self._sums.get(domain, _Sums()).num_unsolved

    def unsolved_scale(self, domain: str) -> float:
        """Return U, at least 4: the mean number of groups that vary before an item of the domain is first solved.

        The prior is 4 with the weight of two items.
        """
        sums = self._sums.get(domain, _Sums())
        total = FIRST_SOLVED * FIRST_SOLVED_WEIGHT + sums.first_solved
        return max(FIRST_SOLVED, total / (FIRST_SOLVED_WEIGHT + sums.num_first_solved))

    def icc(self, domain: str) -> float:
        """Return the correlation of successive pass rates of an item over the domain's visits, in [-1, 1].

        1: items differ and keep their pass rates; 0: they are alike. nan with few visits, or without any spread.
        """
        one = self._sums.get(domain, _Sums())
        if one.pairs < MIN_PAIRS:
            return math.nan
        mean_x, mean_y = one.x / one.pairs, one.y / one.pairs
        spread = (one.xx / one.pairs - mean_x**2) * (one.yy / one.pairs - mean_y**2)
        if spread <= 1e-12:
            return math.nan
        return min(1.0, max(-1.0, (one.xy / one.pairs - mean_x * mean_y) / math.sqrt(spread)))

    def get_state(self) -> dict[str, dict[str, Any]]:
        """Return the sums by domain, as JSON types; `num_noted` is left out where it is 0, as earlier versions did."""
        return {
            domain: {name: value for name, value in asdict(sums).items() if value or name != "num_noted"}
            for domain, sums in self._sums.items()
        }

    def set_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the state that `get_state` returned."""
        self._sums = {domain: _Sums(**values) for domain, values in state.items()}


def _note_pair(sums: _Sums, x: float, y: float) -> None:
    for name, value in {"pairs": 1.0, "x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y}.items():
        setattr(sums, name, SIGNAL_FADE * getattr(sums, name) + value)
