"""SEC: fresh prompts go to the domains whose advantages are large, by a bandit over domains.

    config.callbacks("contrib.sec")

    r = mean |advantage| of the domain's played episodes in an iteration
    Q' = Q + rate (r - Q)                              TD(0), Q = 0 at first
    share = softmax(Q / temperature + log weight)

1. The source draws the domain of each prompt; here the shares are exact in the long run.
2. The weight is that of the mixture; equal weights, the default, are the source's.
3. Revisits count in r as well. The memory draws them by its own rule, except in a finite pool without a revisit
   fraction, where the shares divide the whole batch.

Source: Self-evolving curriculum (SEC), Chen et al. 2025, arXiv 2505.14970.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rllib_srl.batch.advantages import GROUP_NORMALISED, group_relative, has_variance
from rllib_srl.common.callbacks import SRLCallback
from rllib_srl.curriculum.curriculum import Plan
from rllib_srl.types import GroupMeta


class SEC(SRLCallback):
    """The bandit; subclass it to change its parameters. Invariant: `get_state` holds its whole state."""

    rate = 0.5  # weight of an iteration in the value of its domain, in (0, 1]
    temperature = 1.0  # of the softmax over values, > 0

    def __init__(self) -> None:
        """Start with value 0 for every domain."""
        super().__init__()
        self.values: dict[str, float] = {}

    def change_plan(self, *, algorithm: Any, plan: Plan, now: int, metrics_logger: Any, **kwargs: Any) -> Plan:
        """Set the shares of fresh prompts."""
        active = {name: weight for name, weight in algorithm.source.domain_weights().items() if weight > 0}
        score_K = np.array([self.values.get(name, 0.0) / self.temperature + np.log(active[name]) for name in active])
        weight_K = np.exp(score_K - score_K.max())
        return replace(plan, fresh=dict(zip(active, (weight_K / weight_K.sum()).tolist(), strict=True)))

    def post_step(
        self, *, algorithm: Any, groups: Sequence[GroupMeta], metrics_logger: Any, **kwargs: Any
    ) -> None:
        """Move the values towards the mean |advantage| of this iteration, and log them.

        Raises:
            ValueError: an advantage that is not relative to the group.
        """
        rule = algorithm.config.loss_settings().advantage
        if rule not in GROUP_NORMALISED:
            raise ValueError(f"contrib.sec with advantage = {rule!r}; expected one of {', '.join(GROUP_NORMALISED)}")
        advantages = group_relative([group.rewards_G for group in groups], rule)
        by_domain: dict[str, list[float]] = {}
        for group, advantage_G in zip(groups, advantages, strict=True):
            size = float(np.mean(np.abs(advantage_G))) if has_variance(group.rewards_G) else 0.0
            by_domain.setdefault(group.prompt.domain, []).append(size)
        for name, sizes in by_domain.items():
            value = self.values.get(name, 0.0)
            self.values[name] = value + self.rate * (float(np.mean(sizes)) - value)
        for name, value in self.values.items():
            metrics_logger.log_value(("planner", "bandit_value", name), value, reduce="mean", window=1)

    def get_state(self) -> dict[str, Any]:
        """Return the values by domain."""
        return dict(self.values)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue with the values of a checkpoint."""
        self.values = dict(state)


sec = SEC
