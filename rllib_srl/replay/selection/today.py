"""Judges stored groups by the baseline of today: their prompts' history as it is now, without the groups themselves.

    s, n    rho (s_i - w S),  rho (n_i - w n_g)      rho discounts the history until now, w the group's part in it
    m       mean reward of the domain, without the group
    b_j     (w0 m + s + sum of the others' r_k) / (w0 + n + n_g - 1)               as for a group that was just played

A group may be trained on again if its largest |r - b - middle| is at least `least`, that is, if it would be trained on
had it been played today. So groups of one may be trained on again as well, and a silent group that has become a
surprise. No reward of a group is part of its own baseline.

Pure NumPy over rows of `store.records`. Sources: those of `batch/posterior.py`; `docs/design/0003-memory.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rllib_srl.replay.domain_statistics import DomainStatistics
from rllib_srl.replay.history import discount, discounts


class Today(NamedTuple):
    """Policy and baseline by which stored groups are judged."""

    version: int  # of the policy in training
    policy_kl: float  # nats per token by which it has moved since the start of the run
    prior_weight: float  # w0 of the baseline
    middle: float  # of the scale of the groups that were just played (`batch.posterior.Scale`)
    least: float  # least surprise, in units of the reward, at least 0


class Past(NamedTuple):
    """Histories of N stored groups without the groups themselves, float64 [N] each; see `types.History`."""

    reward_sum: np.ndarray
    num_episodes: np.ndarray
    domain_mean: np.ndarray


class Judged(NamedTuple):
    """How far the rewards of N stored groups are from today's baseline, in units of the reward, float64 [N] each."""

    largest: np.ndarray  # |r - b - middle| of an episode; nan without a baseline or a reward
    mean_square: np.ndarray  # of r - b - middle over the episodes


def past_of(
    today: Today,
    by: str,
    half_life: float | None,
    statistics: DomainStatistics,
    domains: Sequence[str],
    items_N: np.ndarray,
    groups_N: np.ndarray,
    domain_N: np.ndarray,
    reward_sum_N: np.ndarray | None = None,
) -> Past:
    """Return the histories of stored groups.

    Args:
        today: the policy that finds them.
        by: setting `history_by`.
        half_life: setting `history_half_life`.
        statistics: of the domains.
        domains: their names, by number.
        items_N: row of each group's item.
        groups_N: row of each group.
        domain_N: number of each group's domain.
        reward_sum_N: exact sum of each group's rewards; None takes it from the rows, in single precision.
    """
    num_N = groups_N["num_rewarded"].astype(np.float64)
    own_N = groups_N["reward"] * num_N if reward_sum_N is None else reward_sum_N
    is_part_N = groups_N["history_clock"] >= 0
    rho_N = discounts(by, half_life, items_N, np.full(len(items_N), today.version), today.policy_kl)
    weight_N = is_part_N * discount(by, half_life, items_N["history_clock"] - groups_N["history_clock"])
    count_N = items_N["history_count"] - weight_N * num_N
    is_left_N = count_N > _ROUNDING
    sum_N = np.where(is_left_N, items_N["history_sum"] - weight_N * own_N, 0.0)
    mean_N = statistics.means_without(domains, domain_N, groups_N["domain_place"], own_N / np.maximum(1.0, num_N))
    return Past(rho_N * sum_N, rho_N * np.where(is_left_N, count_N, 0.0), mean_N)


_ROUNDING = 1e-9  # episodes


def judged(today: Today, past: Past, groups_N: np.ndarray) -> Judged:
    """Compare the rewards of stored groups with today's baseline.

    Args:
        today: the baseline.
        past: of the groups, by `past_of`.
        groups_N: rows of the groups.
    """
    num_N, reward_N = groups_N["num_rewarded"].astype(np.float64), groups_N["reward"].astype(np.float64)
    weight_N = today.prior_weight + past.num_episodes + num_N - 1
    is_known_N = (weight_N > 0) & (num_N > 0)
    weight_N = np.where(is_known_N, weight_N, np.nan)
    known_N = today.prior_weight * past.domain_mean + past.reward_sum + num_N * reward_N

    def surprise_N(own_N: np.ndarray) -> np.ndarray:
        value_N: np.ndarray = own_N - (known_N - own_N) / weight_N - today.middle
        return value_N

    # r - b is linear in r: its extremes are those of the rewards, and its mean is that of their mean.
    ends_2N = np.stack([surprise_N(groups_N[name].astype(np.float64)) for name in ("lowest", "highest")])
    mean_square_N = (1 + 1 / weight_N) ** 2 * groups_N["variance"] + surprise_N(reward_N) ** 2
    return Judged(np.abs(ends_2N).max(axis=0), mean_square_N)


def trains_again(today: Today, found: Judged) -> np.ndarray:
    """Return which stored groups would be trained on if they had been played today."""
    with np.errstate(invalid="ignore"):
        trains_N: np.ndarray = (found.largest >= today.least) & (found.largest > 0)
    return trains_N
