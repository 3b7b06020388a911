"""What a person's rating of an answer is worth: its reward, and what the memory calls a pass.

    scheme        a rating holds     reward
    binary        up                 1 for up, 0 for down
    ordinal       stars, 1 to 5      (stars - 1) / 4
    normalised    stars              (stars - mean) / standard deviation, both moving over the ratings before it
    hybrid        up and stars       stars / 5 for up, -stars / 5 for down: up with 4 is 0.8, down with 2 is -0.4
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCHEMES = ("binary", "ordinal", "normalised", "hybrid")
# Lowest reward that the memory counts as a pass. Normalised rewards have no fixed threshold: there it is the
# setting `replay_pass_reward`, in standard deviations.
PASS_REWARDS: dict[str, float | None] = {"binary": 1.0, "ordinal": 0.75, "normalised": None, "hybrid": 0.2}
# What an answer that is neither good nor bad would earn.
NEUTRAL_REWARDS = {"binary": 0.5, "ordinal": 0.5, "normalised": 0.0, "hybrid": 0.0}
MOMENTUM = 0.95  # of the moving mean and variance: weight of the past at each rating


def reward_of(rating: Mapping[str, Any], scheme: str) -> float:
    """Return the reward of a rating, for a scheme that depends on no other ratings (all but "normalised")."""
    if scheme == "binary":
        return float(rating["up"])
    if scheme == "hybrid":
        hybrid: float = (1 if rating["up"] else -1) * rating["stars"] / 5
        return hybrid
    ordinal: float = (rating["stars"] - 1) / 4
    return ordinal


def quality_of(rating: Mapping[str, Any], scheme: str) -> float:
    """Return how good a rating calls an answer, in [0, 1], whatever its scheme: what grades a review."""
    if scheme == "hybrid":
        return (1 + reward_of(rating, "hybrid")) / 2
    return reward_of(rating, "ordinal" if scheme == "normalised" else scheme)


@dataclass
class Moving:
    """Moving mean and variance of stars.

    Starts with the moments of stars drawn uniformly from 1 to 5 (mean 3, variance 2); after a rating x

        d = x - mean,   mean += (1 - m) d,   variance = m (variance + (1 - m) d^2)
    """

    momentum: float = MOMENTUM
    mean: float = 3.0
    variance: float = 2.0

    def normalised(self, stars: float) -> float:
        """Return (stars - mean) / standard deviation of the ratings so far, then include `stars` in them.

        Source: Finch 2009, "Incremental calculation of weighted mean and variance", section 9.
        """
        difference = stars - self.mean
        normalised: float = difference / max(self.variance, 1e-6) ** 0.5
        self.mean += (1 - self.momentum) * difference
        self.variance = self.momentum * (self.variance + (1 - self.momentum) * difference**2)
        return normalised
