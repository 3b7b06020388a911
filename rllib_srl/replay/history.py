"""Discount and update the history of items: discounted rewards, and groups of equal rewards in a row.

    before a visit   s, n *= rho,  rho = 0.5 ** (elapsed / half_life)       what `Visit.history` returns
    after it         s += sum of raw rewards,  n += episodes                what the item's row stores
    of a stored group   rho (s - w S),  rho (n - w n_g)                     `histories_without` the group itself
                     clock += elapsed                                       ... so that a group of the past has the
                                                                            weight 0.5 ** (its ago / half_life) in s

    discount by      elapsed since the last visit                           half-life by default
    "versions"       policy versions, that is updates                       11
    "visits"         1                                                      1
    "kl"             nats per token by which the policy has moved           0.06

The defaults agree: a factor of .5 a visit for groups of 8 that come back every 10 updates, and of .85 for groups of 2
that come back every 2.6 updates, are both .94 an update, a half-life of 11. SPO halves after 0.06 nats.

Pure NumPy over rows of `store.records.ITEM`.

Sources: `docs/design/0003-memory.md`; SPO, arXiv 2509.13232 (tracker of a prompt, discounted by the policy's KL).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rllib_srl.replay.domain_statistics import DomainStatistics
from rllib_srl.replay.visits import GroupFacts
from rllib_srl.types import History

HALF_LIVES = {"versions": 11.0, "visits": 1.0, "kl": 0.06}
TOLD_BY = {"versions": "version", "visits": "visits", "kl": "history_clock"}  # field with the time of an item's visit
MAX_SILENT = 8
_ROUNDING = 1e-9  # episodes


class Policy(NamedTuple):
    """The policy that finds a history."""

    version: int
    kl: float  # nats per token by which it has moved since the start of the run


def discounts(
    by: str, half_life: float | None, rows_N: np.ndarray, version_N: np.ndarray, policy_kl: float
) -> np.ndarray:
    """Return rho = 0.5 ** (elapsed / half_life) of each item, in [0, 1].

    Args:
        by: a key of `HALF_LIVES`.
        half_life: in units of `by`; None: the default.
        rows_N: items before the visit.
        version_N: policy version that plays each.
        policy_kl: nats per token by which the policy has moved since the start of the run.
    """
    return discount(by, half_life, elapsed(by, rows_N, version_N, policy_kl))


def elapsed(by: str, rows_N: np.ndarray, version_N: np.ndarray, policy_kl: float) -> np.ndarray:
    """Return the units of `by` since the last visit of each item, at least 0; arguments as in `discounts`."""
    if by == "versions":
        elapsed_N = version_N - rows_N["version"].astype(np.float64)
    elif by == "kl":
        elapsed_N = policy_kl - rows_N["history_clock"]
    else:
        elapsed_N = np.ones(len(rows_N))
    at_least_0_N: np.ndarray = np.maximum(0.0, elapsed_N)
    return at_least_0_N


def discount(by: str, half_life: float | None, elapsed_N: np.ndarray) -> np.ndarray:
    """Return rho of visits that lie back by `elapsed_N`, in units of `by`; other arguments as in `discounts`."""
    rho_N: np.ndarray = 0.5 ** (np.maximum(0.0, elapsed_N) / (half_life or HALF_LIVES[by]))
    return rho_N


def after_visit(
    rows_N: np.ndarray, facts: Sequence[GroupFacts], by: str, half_life: float | None, policy_kl: float
) -> dict[str, np.ndarray]:
    """Return the fields of the items' history after a visit.

    Args:
        rows_N: items before the visit.
        facts: summary of the group played for each.
        by: as in `discounts`, like `half_life` and `policy_kl`.
    """
    elapsed_N = elapsed(by, rows_N, np.array([one.version for one in facts], np.float64), policy_kl)
    rho_N = discount(by, half_life, elapsed_N)
    size_N, reward_sum_N, variance_N = (
        np.array([getattr(one, name) for one in facts], np.float64) for name in ("size", "reward_sum", "variance")
    )
    is_right_N = np.array([one.num_success == one.size for one in facts], bool)
    return {
        "history_sum": rho_N * rows_N["history_sum"] + reward_sum_N,
        "history_count": rho_N * rows_N["history_count"] + size_N,
        # The policy's KL only grows, so its sum of elapsed KL is the KL itself, without rounding.
        "history_clock": np.full(len(rows_N), policy_kl) if by == "kl" else rows_N["history_clock"] + elapsed_N,
        "num_silent": np.where(variance_N > 0, 0, np.minimum(MAX_SILENT, rows_N["num_silent"] + 1)),
        "is_solved": rows_N["is_solved"] | is_right_N,
    }


def histories_without(
    policy: Policy,
    by: str,
    half_life: float | None,
    statistics: DomainStatistics,
    domains: Sequence[str],
    items_N: np.ndarray,
    groups_N: np.ndarray,
    reward_sum_N: np.ndarray,
) -> list[History]:
    """Return the history of each stored group's prompt as a policy finds it now, without the group itself.

    No reward of a group is part of its own baseline: its sum S and its episodes n_g leave the prompt's history with the
    weight w that they have in it by now, and the mean of the domain is that of its other groups.

    Args:
        policy: that finds them.
        by: as in `discounts`, like `half_life`.
        statistics: of the domains.
        domains: name of the domain of each group.
        items_N: row of each group's item; zeros without one.
        groups_N: row of each group.
        reward_sum_N: exact sum of each group's rewards.
    """
    num_N = groups_N["num_rewarded"].astype(np.float64)
    is_part_N = groups_N["history_clock"] >= 0
    rho_N = discounts(by, half_life, items_N, np.full(len(items_N), policy.version), policy.kl)
    weight_N = is_part_N * discount(by, half_life, items_N["history_clock"] - groups_N["history_clock"])
    count_N = items_N["history_count"] - weight_N * num_N
    is_left_N = count_N > _ROUNDING
    sum_N = np.where(is_left_N, items_N["history_sum"] - weight_N * reward_sum_N, 0.0)
    names = list(dict.fromkeys(domains))
    domain_N = np.array([names.index(name) for name in domains], np.int64)
    mean_reward_N = reward_sum_N / np.maximum(1.0, num_N)
    mean_N = statistics.means_without(names, domain_N, groups_N["domain_place"], mean_reward_N)
    columns = (rho_N * sum_N, rho_N * np.where(is_left_N, count_N, 0.0), mean_N)
    return [History(*row) for row in zip(*(column_N.tolist() for column_N in columns), strict=True)]
