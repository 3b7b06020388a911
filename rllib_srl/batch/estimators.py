"""Compute advantages from the rewards of groups: pure NumPy, on the driver before any sharding.

    rule             advantage                                       sums to 0 over the group
    group            (r - mean) / (std + 1e-4), unbiased std         yes
    mean_only        r - mean                                        yes
    batch            (r - mean) / (std of the whole batch + 1e-4)    yes
    leave_one_out    r - mean of the others                          yes
    posterior        r - mean of history, domain and the others      no: see `posterior.py`
    gae              r; the learner computes token advantages        no, see `learner/critic.py`
    none             0: rewards do not count                         yes; for distillation

To add a rule that needs one group only, register a function, `ADVANTAGES["mine"] = rule`, or name its import path,
`advantage="module:rule"`; it is called with the rewards of a group, float64 [G], and returns as many advantages.

Sources: Shao et al. 2024, arXiv 2402.03300 section 4.1 (group);
Liu et al. 2025, arXiv 2503.20783 section 3.2 (mean_only);
Liu et al. 2025 (Lite-PPO), arXiv 2508.08221 (batch);
Ahmadian et al. 2024, arXiv 2402.14740 section 3 (leave_one_out).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rllib_srl.common.rules import Rules

EPSILON = 1e-4  # TRL's value; verl uses 1e-6


def group(rewards_G: np.ndarray) -> np.ndarray:
    """Return (r - mean) / (std + 1e-4), with the unbiased standard deviation of the group.

    Source: Shao et al. 2024, arXiv 2402.03300 section 4.1.2.
    """
    advantage_G: np.ndarray = (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + EPSILON)
    return advantage_G


def mean_only(rewards_G: np.ndarray) -> np.ndarray:
    """Return r - mean, without division: a prompt weighs by the spread of its rewards.

    Source: Liu et al. 2025, arXiv 2503.20783 section 3.2 (Dr.GRPO).
    """
    advantage_G: np.ndarray = rewards_G - rewards_G.mean()
    return advantage_G


def leave_one_out(rewards_G: np.ndarray) -> np.ndarray:
    """Return r - mean of the other episodes = (r - mean) G / (G - 1): the baseline excludes the episode itself.

    Source: Ahmadian et al. 2024, arXiv 2402.14740 section 3.
    """
    return mean_only(rewards_G) * (len(rewards_G) / (len(rewards_G) - 1))


def as_it_is(rewards_G: np.ndarray) -> np.ndarray:
    """Return r."""
    return rewards_G


def nothing(rewards_G: np.ndarray) -> np.ndarray:
    """Return 0 for each episode."""
    return np.zeros(len(rewards_G))


# "batch" needs more than the group; `group_relative` adds that part. So does "posterior", which `posterior.py`
# computes; without history and scale it is "leave_one_out".
ADVANTAGES: Rules[Callable[[np.ndarray], np.ndarray]] = Rules(
    "advantage",
    {
        "group": group,
        "mean_only": mean_only,
        "batch": mean_only,
        "leave_one_out": leave_one_out,
        "posterior": leave_one_out,
        "gae": as_it_is,
        "none": nothing,
    },
)
GROUP_NORMALISED = ("group", "batch", "mean_only", "leave_one_out")


def has_signal(rewards_G: np.ndarray) -> bool:
    """Return whether the rewards of a group differ; equal rewards give zero advantages and no gradient."""
    return bool(np.ptp(rewards_G) > 1e-8)


def trains(rewards_G: np.ndarray, rule: str) -> bool:
    """Return whether a group is trained on; with "gae" equal rewards are a signal too."""
    return rule == "gae" or has_signal(rewards_G)


def group_relative(
    rewards_PG: Sequence[np.ndarray],
    rule: str = "group",
    *,
    batch_rewards: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Return the advantages of each group.

    Args:
        rewards_PG: rewards of each group; groups may differ in size, each has at least 2 episodes.
        rule: a name of `ADVANTAGES`.
        batch_rewards: rewards whose standard deviation "batch" divides by; None: `rewards_PG`.

    Raises:
        ValueError: an unknown rule, a user's rule that raises an exception, or a group of fewer than two episodes.
    """
    for rewards_G in rewards_PG:
        if len(rewards_G) < 2 and rule != "none":
            raise ValueError(f"a group of {len(rewards_G)} episode has no baseline; expected at least 2")
    rewards_PG = [np.asarray(rewards_G, np.float64) for rewards_G in rewards_PG]
    advantages = [ADVANTAGES.call(rule, rewards_G) for rewards_G in rewards_PG]
    if not rewards_PG:
        return []
    if rule == "batch":
        spread = np.concatenate([np.asarray(one, np.float64) for one in batch_rewards or rewards_PG]).std(ddof=1)
        return [advantage_G / (spread + EPSILON) for advantage_G in advantages]
    return advantages
