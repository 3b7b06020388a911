"""The baseline of a rated answer: what other ratings of its prompt, by its rater and of all answers say.

    m    mean of all other ratings, and one that is neutral
    m_q  (w0 m + other rewards by rater q) / (w0 + their number)                    a strict rater is below m
    b    m_q + sum of (r_k - m_qk) over other ratings of the prompt / (w0 + their number)     an easy prompt is above

It is `batch.posterior` with the rewards of the prompt in units of the answer's rater. No reward is part of its own
baseline. Pure Python.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rllib_srl.batch.advantages import AdvantageBatch, AdvantageEstimator
from rllib_srl.losses.settings import LossSettings
from rllib_srl.people.lineage.conversations import SERVED
from rllib_srl.types import GroupMeta, History


@dataclass(frozen=True)
class Rated:
    """The rating of an answer, as the baseline of other answers reads it."""

    prompt: str  # the same for answers to the same tokens
    rater: str
    reward: float
    since: int  # version in which it was trained on first


Histories = Callable[[Sequence[str], Mapping[str, Rated]], list[History]]


def prompt_name(prompt_ids: Sequence[int]) -> str:
    """Return a name of the tokens before an answer."""
    return hashlib.blake2b(np.array(prompt_ids, "<i4").tobytes(), digest_size=8).hexdigest()


def histories_of(
    names: Sequence[str], ratings: Mapping[str, Rated], prior_weight: float, neutral: float
) -> list[History]:
    """Return for each answer the history from which `batch.posterior.baseline` is b.

    Args:
        names: of rated answers, all of which are in `ratings`.
        ratings: of all answers that are remembered.
        prior_weight: w0.
        neutral: reward of an answer that is neither good nor bad.
    """
    sums, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    of_prompt = defaultdict[str, list[str]](list)
    for name, one in ratings.items():
        sums[one.rater] += one.reward
        counts[one.rater] += 1
        of_prompt[one.prompt].append(name)
    total = sum(one.reward for one in ratings.values())

    def level(rater: str, own: Rated) -> float:
        """Return m_q without the reward of `own`."""
        is_own = rater == own.rater
        mean = (neutral + total - own.reward) / len(ratings)
        weight = prior_weight + counts[rater] - is_own
        return (prior_weight * mean + sums[rater] - is_own * own.reward) / weight if weight else mean

    def history(name: str) -> History:
        own = ratings[name]
        others = [ratings[other] for other in of_prompt[own.prompt] if other != name]
        of_rater = level(own.rater, own)
        return History(sum(one.reward - level(one.rater, own) + of_rater for one in others), len(others), of_rater)

    return [history(name) for name in names]


class RatedEstimator(AdvantageEstimator):
    """Estimates rated answers by a history of ratings, apart from what is played beside them."""

    def __init__(self, settings: LossSettings, ratings: Callable[[], Mapping[str, Rated]], histories: Histories):
        """Set how the history of drawn answers follows from the ratings at present."""
        super().__init__(settings)
        self._ratings, self._histories = ratings, histories

    def estimate(
        self,
        groups: Sequence[GroupMeta],
        rewards: Sequence[np.ndarray],
        kl: Sequence[np.ndarray] | None,
        reused: Sequence[GroupMeta],
        histories: Sequence[History] = (),
    ) -> AdvantageBatch:
        """Return what is trained on, as `AdvantageEstimator.estimate`; rated answers have a scale of their own."""
        drawn = [group for group in reused if group.prompt.env_id == SERVED]
        found = self._histories([group.prompt.prompt_id for group in drawn], self._ratings())
        rated = [replace(group, history=history) for group, history in zip(drawn, found, strict=True)]
        played = super().estimate(
            groups, rewards, kl, [one for one in reused if one.prompt.env_id != SERVED], histories
        )
        again = super().estimate([], [], None, rated)
        counts = {name: number + again.counts[name] for name, number in played.counts.items()}
        advantages = played.advantages + again.advantages
        return AdvantageBatch(played.groups + again.groups, advantages, played.played, counts)
