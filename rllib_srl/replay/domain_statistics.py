"""Keep the mean reward of each domain's played groups.

    played group ──note──> faded sums of its domain ──> mean, means_without

Every played group counts, also one that was refused. Within a call, groups count in their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

REWARD_FADE = 0.97  # a group
NO_WEIGHT = 1e-9  # below it nothing but rounding is left of a faded weight
_OF_MEAN = ("reward", "reward_weight", "num_noted")


@dataclass
class _Sums:
    """Faded sums of one domain."""

    reward: float = 0.0  # of groups' mean rewards
    reward_weight: float = 0.0
    num_noted: int = 0  # groups


class DomainStatistics:
    """Statistics by domain name. Invariant: `get_state` holds all of it, as JSON types."""

    def __init__(self) -> None:
        """Start without groups."""
        self._sums: dict[str, _Sums] = {}

    def note(self, domain: str, reward: float) -> int:
        """Add the mean reward of a played group; return its number among the groups of its domain, from 1."""
        sums = self._sums.setdefault(domain, _Sums())
        sums.reward = REWARD_FADE * sums.reward + reward
        sums.reward_weight = REWARD_FADE * sums.reward_weight + 1
        sums.num_noted += 1
        return sums.num_noted

    def mean(self, domain: str) -> float:
        """Return the faded mean reward of a domain; without a group, that of all domains; without any, .5."""
        known = self._sums.get(domain)
        parts = [known] if known is not None else list(self._sums.values())
        weight = sum(one.reward_weight for one in parts)
        return sum(one.reward for one in parts) / weight if weight else 0.5

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

    def get_state(self) -> dict[str, dict[str, Any]]:
        """Return the sums by domain, as JSON types."""
        return {domain: asdict(sums) for domain, sums in self._sums.items()}

    def set_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the state that `get_state` returned."""
        self._sums = {domain: _Sums(**values) for domain, values in state.items()}
