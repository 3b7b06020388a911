"""Summarise played groups, and keep the history of items and domains: discounted rewards, equal rewards in a row.

    Group -> GroupFacts -> row of its group, row of its item

    before a visit   s, n *= rho,  rho = 0.5 ** (versions since the last visit / half_life)     `Visit.history`
    after it         s += sum of raw rewards,  n += episodes                                    the item's row
    of a stored group   rho (s - w S),  rho (n - w n_g),  w = 0.5 ** (versions since its visit / half_life)

A version is an update of the policy. The default half-life of 11 is a factor of .5 per visit for groups that come back
every 10 updates. `DomainStatistics` has the mean reward of each domain, of every played group that has rewards, refused
ones too.

Sources: `docs/design/0003-memory.md`; SPO, arXiv 2509.13232, whose tracker is discounted by the policy's KL instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.batch.advantages import EPSILON
from rllib_srl.types import Group, History

MAX_ZERO_VARIANCE = 8
_ROUNDING = 1e-9  # episodes
REWARD_FADE = 0.97  # factor per group

MOST_ANSWERS = 2  # of a group: many prompts represent a skill better than many answers
OF_GROUP = (  # numbers in the row of a group
    *("size", "num_rewarded", "num_success", "num_answers", "reward", "variance", "abs_advantage", "nll"),
    *("num_tokens", "num_loss_tokens", "version"),
)


@dataclass(frozen=True)
class GroupFacts:
    """Summary numbers of one group, stored in its row and in its item's row.

    Statistics of rewards are over the episodes that have one (`Group.has_reward_G`); `size` counts all.
    """

    size: int
    num_success: int
    num_answers: int  # right answers that may be held
    reward: float  # mean
    reward_sum: float
    variance: float  # population variance of the rewards: ExIt's score S
    abs_advantage: float  # mean |advantage| of the group rule
    nll: float  # mean -log-prob of the policy's tokens, nats
    num_tokens: int
    num_loss_tokens: int
    version: int  # oldest policy version that wrote any of its tokens
    num_rewarded: int  # episodes that have a reward


def facts_of(group: Group, pass_reward: float) -> GroupFacts:
    """Summarise a group of at least one episode; `pass_reward` is used where the environment defines none."""
    has_reward_G = group.has_reward_G
    rewards_G = group.rewards_G[has_reward_G].astype(np.float64)
    size = max(1, len(rewards_G))
    reward_sum = float(rewards_G.sum())
    reward = reward_sum / size
    centred_G = rewards_G - reward
    squares = float(centred_G @ centred_G)
    deviation = math.sqrt(squares / (size - 1)) if size > 1 else 0.0
    num_loss_tokens = int(np.count_nonzero(group.loss_mask_N))
    return GroupFacts(
        size=group.size,
        num_success=int(np.count_nonzero(group.is_success_G(pass_reward) & has_reward_G)),
        num_answers=len(right_answers(group, pass_reward)),
        reward=reward,
        reward_sum=reward_sum,
        # Same threshold as `batch.advantages.has_variance`: rounding errors of equal rewards are not a variance.
        variance=squares / size if len(rewards_G) and np.ptp(rewards_G) > 1e-8 else 0.0,
        abs_advantage=float(np.abs(centred_G).sum() / size / (deviation + EPSILON)),
        nll=float(-group.behaviour_logp_N.sum(dtype=np.float64) / max(1, num_loss_tokens)),
        num_tokens=len(group.token_ids_N),
        num_loss_tokens=num_loss_tokens,
        version=int(group.versions_G2.min()),
        num_rewarded=len(rewards_G),
    )


def right_answers(group: Group, pass_reward: float) -> list[int]:
    """Return the first `MOST_ANSWERS` episodes of a group that passed and in which the policy wrote something."""
    is_right_G = group.is_success_G(pass_reward) & group.has_reward_G & (group.num_loss_tokens_G() > 0)
    right: list[int] = np.flatnonzero(is_right_G)[:MOST_ANSWERS].tolist()
    return right


def discount(half_life: float, num_versions: Any) -> Any:
    """Return 0.5 ** (num_versions / half_life), 1 for negative numbers; numbers or arrays."""
    return 0.5 ** (np.maximum(0.0, num_versions) / half_life)


def after_visit(rows_N: np.ndarray, facts: Sequence[GroupFacts], half_life: float) -> dict[str, np.ndarray]:
    """Return the fields of the items' history after a visit by groups with `facts`."""
    version_N = np.array([group.version for group in facts], np.float64)
    rho_N = discount(half_life, version_N - rows_N["version"])
    is_equal_N = np.array([group.variance <= 0 for group in facts], bool)
    return {
        "history_sum": rho_N * rows_N["history_sum"] + np.array([group.reward_sum for group in facts]),
        "history_count": rho_N * rows_N["history_count"] + np.array([group.size for group in facts]),
        "version": np.maximum(version_N, rows_N["version"]),
        "num_zero_variance": np.where(is_equal_N, np.minimum(MAX_ZERO_VARIANCE, rows_N["num_zero_variance"] + 1), 0),
    }


def history_of(
    item: np.void,
    version: int,
    half_life: float,
    domain_mean: float,
    without: Group | None = None,
    row: np.void | None = None,
) -> History:
    """Return an item's history for a policy of this version, without one of its stored groups (given by its row).

    The mean of the domain includes that group's reward: it has 3 % of the weight there, less with every later group.
    """
    total, count = float(item["history_sum"]), float(item["history_count"])
    if without is not None and row is not None:
        rewards_G = without.rewards_G[without.has_reward_G].astype(np.float64)
        weight = row["in_history"] * discount(half_life, float(item["version"]) - float(row["version"]))
        total, count = total - weight * rewards_G.sum(), count - weight * len(rewards_G)
        if count <= _ROUNDING:
            return History(0.0, 0.0, domain_mean)
    rho = discount(half_life, version - float(item["version"]))
    return History(float(rho * total), float(rho * count), domain_mean)


class DomainStatistics:
    """The faded sum of the mean rewards of each domain's groups, and its weight. Invariant: `sums` holds all of it."""

    def __init__(self, sums: Mapping[str, Sequence[float]] | None = None) -> None:
        self.sums = {domain: (reward, weight) for domain, (reward, weight) in (sums or {}).items()}

    def note(self, domain: str, reward: float) -> None:
        total, weight = self.sums.get(domain, (0.0, 0.0))
        self.sums[domain] = (REWARD_FADE * total + reward, REWARD_FADE * weight + 1)

    def mean(self, domain: str) -> float:
        """Return the faded mean reward of a domain; without a group, the mean of all domains; without any, .5."""
        parts = [self.sums[domain]] if domain in self.sums else list(self.sums.values())
        weight = sum(weight for _, weight in parts)
        return sum(total for total, _ in parts) / weight if weight else 0.5
