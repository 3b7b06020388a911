"""Rewards of a group -> advantages: pure numpy, computed on the driver before any sharding.

    rewards_G -> rule -> advantage_G            every rule sums to 0 over its group, up to rounding

A user's own rule is one registered function: `ADVANTAGES["mine"] = rule`.

Sources: Shao et al. 2024, arXiv 2402.03300 section 4.1 (group);
Liu et al. 2025, arXiv 2503.20783 section 3.2 (mean_only).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

EPSILON = 1e-4  # TRL's value; verl uses 1e-6


def group(rewards_G: np.ndarray) -> np.ndarray:
    """Return (r - mean) / (std + 1e-4), with the unbiased standard deviation of the group.

    Source: Shao et al. 2024, arXiv 2402.03300 section 4.1.2.
    """
    centred = rewards_G - rewards_G.mean()
    return centred / (rewards_G.std(ddof=1) + EPSILON)


def mean_only(rewards_G: np.ndarray) -> np.ndarray:
    """Return r - mean: no division, so easy and hard prompts weigh by their spread.

    Source: Liu et al. 2025, arXiv 2503.20783 section 3.2 (Dr.GRPO).
    """
    return rewards_G - rewards_G.mean()


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"group": group, "mean_only": mean_only}


def has_signal(rewards_G: np.ndarray) -> bool:
    """Say whether the rewards of a group differ: equal ones give zero advantage and no gradient."""
    return bool(np.ptp(rewards_G) > 1e-8)


def group_relative(rewards_PG: Sequence[np.ndarray], rule: str = "group") -> list[np.ndarray]:
    """Apply a rule to each group on its own.

    Args:
        rewards_PG: the rewards of each group; groups may differ in size, each has at least 2.
        rule: a key of `ADVANTAGES`.

    Raises:
        ValueError: an unknown rule, or a group of fewer than two episodes.
    """
    if rule not in ADVANTAGES:
        raise ValueError(f"advantage = {rule!r}; expected one of {sorted(ADVANTAGES)}")
    for rewards_G in rewards_PG:
        if len(rewards_G) < 2:
            raise ValueError(f"a group of {len(rewards_G)} episode has no baseline; expected at least 2")
    return [ADVANTAGES[rule](np.asarray(rewards_G, np.float64)) for rewards_G in rewards_PG]
