"""Discount and update the history of items: rewards, silence, groups until the first solution, and cost.

    before a visit   s, n *= rho,  rho = 0.5 ** (elapsed / half_life)       what `Visit.history` returns
    after it         s += sum of raw rewards,  n += episodes                what the item's row stores
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

import math
from collections.abc import Sequence

import numpy as np

from rllib_srl.replay.visits import GroupFacts

HALF_LIVES = {"versions": 11.0, "visits": 1.0, "kl": 0.06}
TOLD_BY = {"versions": "version", "visits": "visits", "kl": "history_clock"}  # field with the time of an item's visit
MAX_SILENT = 8.0
SMALL_GROUP = 4  # episodes below which equal rewards are weak evidence of silence and of a solution
COST_VISITS = 8  # the mean cost of an item is of about so many visits


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
    rows_N: np.ndarray,
    facts: Sequence[GroupFacts],
    by: str,
    half_life: float | None,
    policy_kl: float,
    compares_singles: bool = True,
) -> dict[str, np.ndarray]:
    """Return the fields of the items' history after a visit.

    Args:
        rows_N: items before the visit.
        facts: summary of the group played for each.
        by: as in `discounts`, like `half_life` and `policy_kl`.
        compares_singles: as in `varies`.
    """
    elapsed_N = elapsed(by, rows_N, np.array([one.version for one in facts], np.float64), policy_kl)
    rho_N = discount(by, half_life, elapsed_N)
    size_N, reward_sum_N, num_success_N, tokens_N = (
        np.array([getattr(one, name) for one in facts], np.float64)
        for name in ("size", "reward_sum", "num_success", "num_loss_tokens")
    )
    has_signal_N = np.array([one.variance > 0 for one in facts], bool)
    pairs = zip(facts, rows_N, strict=True)
    varies_N = np.array([varies(one, before, compares_singles) for one, before in pairs], bool)
    silence_N = np.array([chance_of_silence(one.num_success, one.size) for one in facts])
    is_solved_N = rows_N["is_solved"] | solves(rows_N, num_success_N, size_N)
    weight_N = np.where(rows_N["cost"] > 0, 1 / np.minimum(rows_N["visits"] + 1, COST_VISITS), 1.0)
    return {
        "history_sum": rho_N * rows_N["history_sum"] + reward_sum_N,
        "history_count": rho_N * rows_N["history_count"] + size_N,
        # The policy's KL only grows, so its sum of elapsed KL is the KL itself, without rounding.
        "history_clock": np.full(len(rows_N), policy_kl) if by == "kl" else rows_N["history_clock"] + elapsed_N,
        "num_silent": np.where(has_signal_N, 0.0, np.minimum(MAX_SILENT, rows_N["num_silent"] + silence_N)),
        "num_unsolved": np.where(is_solved_N, 0, rows_N["num_unsolved"] + varies_N),
        "is_solved": is_solved_N,
        "cost": rows_N["cost"] + weight_N * (tokens_N - rows_N["cost"]),
    }


def varies(facts: GroupFacts, before: np.void | None, compares_singles: bool = True) -> bool:
    """Return whether rewards differ within a group, or a single episode ended otherwise than the visit before.

    A visit ends in one of two ways: all of its episodes pass, or not.

    Args:
        facts: summary of the group.
        before: row of its item before the visit; None: it has no item.
        compares_singles: False: the variance decides, also of a single episode.
    """
    if not compares_singles or facts.size > 1 or before is None or not before["group_size"]:
        return facts.variance > 0
    return bool((facts.num_success == facts.size) != (before["num_success"] == before["group_size"]))


def solves(rows_N: np.ndarray, num_success_N: np.ndarray, size_N: np.ndarray) -> np.ndarray:
    """Return whether a visit solves each item: all episodes right; in small groups, also at the visit before."""
    is_right_N = num_success_N == size_N
    was_right_N = (rows_N["group_size"] > 0) & (rows_N["num_success"] == rows_N["group_size"])
    is_solution_N: np.ndarray = is_right_N & ((size_N >= SMALL_GROUP) | was_right_N)
    return is_solution_N


def chance_of_silence(num_success: int, size: int) -> float:
    """Return how far a group of equal rewards counts as a silent one.

    1 from `SMALL_GROUP` episodes. Below, P(p < .1 or p > .9) for p ~ Beta(k + 1, n - k + 1), with k of n right.
    """
    if size >= SMALL_GROUP:
        return 1.0
    num = size + 1  # P(p < x) is that of more than k successes in n + 1 trials of probability x
    below = sum(math.comb(num, j) * 0.1**j * 0.9 ** (num - j) for j in range(num_success + 1, num + 1))
    above = sum(math.comb(num, j) * 0.9**j * 0.1 ** (num - j) for j in range(num_success + 1))
    return below + above
