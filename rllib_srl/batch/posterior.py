"""Compute advantages against a baseline from history: the prompt's own, its domain's, and the group's other episodes.

    b_j = (w0 m + s + sum of the others' r_k) / (w0 + n + G - 1)           independent of r_j, so no bias
    A_j = (r_j - b_j) / rms of r - b over the batch                        "rms"

    w0  weight of the domain's mean m        s, n  history: discounted rewards and episodes        G  episodes played

A group whose answers agree has an advantage if its result is a surprise, and a single episode has a baseline. Limits:
w0 = 0 without history and scale is RLOO (arXiv 2402.14740); G = 1 with w0 = 0, "centred" and the pseudo-counts of SPO's
tracker as history is SPO (arXiv 2509.13232).

Pure NumPy. The history is that before the batch (`replay/history.py`): afterwards it contains r_j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rllib_srl.types import History

MIN_SPREAD = 0.05  # smallest divisor, so that noise is not amplified where hardly any reward is a surprise


class Scale(NamedTuple):
    """Scale from surprises to advantages: A = (r - b - middle) / spread."""

    middle: float = 0.0
    spread: float = 1.0


NO_HISTORY = History()


def baseline(rewards_G: np.ndarray, history: History, prior_weight: float) -> np.ndarray:
    """Return b_j = (w0 m + s + sum of the others' r_k) / (w0 + n + G - 1), [G].

    Args:
        rewards_G: of the episodes of one group, at least one.
        history: history of its prompt and domain before the visit.
        prior_weight: w0, in episodes, at least 0.

    Raises:
        ValueError: one episode without history and w0 = 0.
    """
    weight = prior_weight + history.num_episodes + len(rewards_G) - 1
    if weight <= 0:
        raise ValueError("one episode without a history has no baseline; expected prior_weight above 0")
    known = prior_weight * history.domain_mean + history.reward_sum
    baseline_G: np.ndarray = (known + rewards_G.sum() - rewards_G) / weight
    return baseline_G


def predicted(history: History, prior_weight: float) -> float:
    """Return (w0 m + s) / (w0 + n), the mean reward expected before the visit; m if w0 = n = 0."""
    weight = prior_weight + history.num_episodes
    return (prior_weight * history.domain_mean + history.reward_sum) / weight if weight > 0 else history.domain_mean


def posterior(
    rewards_PG: Sequence[np.ndarray], histories: Sequence[History], prior_weight: float, scale: str = "rms"
) -> list[np.ndarray]:
    """Return the advantages of each group, [G] per group.

    Args:
        rewards_PG: float64 rewards of each group, of any sizes.
        histories: one per group.
        prior_weight: w0 of `baseline`.
        scale: "rms" (of r - b over the batch), "centred" (its mean is subtracted, and it is divided by its standard
            deviation) or "none". The divisor is at least `MIN_SPREAD`.

    Raises:
        ValueError: as in `baseline`.
    """
    surprises_PG = surprises(rewards_PG, histories, prior_weight)
    return scaled(surprises_PG, scale_of(surprises_PG, scale))


def surprises(
    rewards_PG: Sequence[np.ndarray], histories: Sequence[History], prior_weight: float
) -> list[np.ndarray]:
    """Return r - b of each group, [G] per group; arguments and errors as in `posterior`."""
    pairs = zip(rewards_PG, histories, strict=True)
    return [rewards_G - baseline(rewards_G, history, prior_weight) for rewards_G, history in pairs]


def scale_of(surprises_PG: Sequence[np.ndarray], scale: str) -> Scale:
    """Return the scale of a batch; `scale` as in `posterior`. Without groups nothing is scaled."""
    if scale == "none" or not surprises_PG:
        return Scale()
    all_B = np.concatenate(surprises_PG)
    middle = float(all_B.mean()) if scale == "centred" else 0.0
    return Scale(middle, max(MIN_SPREAD, float(np.sqrt(np.mean((all_B - middle) ** 2)))))


def scaled(surprises_PG: Sequence[np.ndarray], scale: Scale) -> list[np.ndarray]:
    """Return the advantages of surprises, [G] per group."""
    return [(one_G - scale.middle) / scale.spread for one_G in surprises_PG]
