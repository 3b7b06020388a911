"""Replay fractions that follow forgetting: they rise while domains are being forgotten, and fall otherwise.

    config.callbacks("contrib.forgetting")

    forgetting > threshold   up by rate (high - low)
    otherwise                down by the same step

The step is a share of the range, not of the value, so that a fraction of 0 can rise again. Forgetting is the mean over
domains of best minus present accuracy. Accuracy is the recall that `contrib.probe` measures, else a faded mean of pass
rates; that mean says nothing of the best until it has moved away from its start.

Source: experience replay for continual learning (threshold 0.1, rate 0.1, bounds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rllib_srl.common.callbacks import SRLCallback
from rllib_srl.curriculum.curriculum import Plan
from rllib_srl.types import GroupMeta


@dataclass
class Accuracy:
    """What is known of a domain. Invariant: all but `num_groups` are in [0, 1]."""

    mean: float = 0.5  # faded mean of pass rates
    num_groups: int = 0
    best: float | None = None  # of `recall` if it was ever measured, else of `mean`
    recall: float | None = None  # measured last

    @property
    def lost(self) -> float:
        """Return best minus present accuracy, at least 0; 0 without a best."""
        known = self.mean if self.recall is None else self.recall
        return 0.0 if self.best is None else max(0.0, self.best - known)


class Forgetting(SRLCallback):
    """The rule; subclass it to change its parameters. Invariant: `get_state` holds its whole state."""

    names: tuple[str, ...] = ("revisit",)  # fractions that adapt: "revisit", "reuse"
    bounds = (0.05, 0.5)  # lowest and highest fraction
    threshold = 0.1
    rate = 0.1  # step of a fraction in an iteration, as a share of its range
    fade = 0.05  # weight of a group in the mean of its domain

    def __init__(self) -> None:
        """Start without domains; the fractions are those of the settings."""
        super().__init__()
        self.domains: dict[str, Accuracy] = {}
        self.fractions: dict[str, float] = {}

    def change_plan(self, *, algorithm: Any, plan: Plan, now: int, metrics_logger: Any, **kwargs: Any) -> Plan:
        """Set the fractions of the iteration."""
        start = {"revisit": algorithm.memory.revisit_fraction, "reuse": algorithm.memory.reuse_fraction}
        self.fractions = {name: self.fractions.get(name, start[name]) for name in self.names}
        revisit, reuse = (self.fractions.get(name) for name in ("revisit", "reuse"))
        return replace(plan, revisit_fraction=revisit, reuse_fraction=reuse)

    def post_step(self, *, algorithm: Any, groups: Sequence[GroupMeta], metrics_logger: Any, **kwargs: Any) -> None:
        """Note the pass rates of played groups, adapt the fractions, and log both."""
        rates: dict[str, list[float]] = {}
        for group in groups:
            passed = float(np.mean(group.is_success_G(algorithm.config.replay_pass_reward)))
            rates.setdefault(group.prompt.domain, []).append(passed)
        self.observe(rates)
        self.fractions = {name: self.adapted(value) for name, value in self.fractions.items()}
        values = {f"acc_ema/{name}": domain.mean for name, domain in self.domains.items()}
        values |= {f"{name}_fraction": value for name, value in self.fractions.items()}
        for name, value in ({"forgetting": self.forgetting()} | values).items():
            metrics_logger.log_value(("planner", *name.split("/", 1)), value, reduce="mean", window=1)

    def observe(self, rates: Mapping[str, Sequence[float]]) -> None:
        """Note the pass rates of the groups of each domain."""
        for name, of_domain in rates.items():
            domain = self.domains.setdefault(name, Accuracy())
            for rate in of_domain:
                domain.mean += self.fade * (rate - domain.mean)
            domain.num_groups += len(of_domain)
            if domain.recall is None and domain.num_groups * self.fade >= 1:
                domain.best = max(domain.mean, domain.best or 0.0)

    def recalled(self, name: str, recall: float) -> None:
        """Use a measured recall of a domain in place of its mean; `contrib.probe` calls it."""
        domain = self.domains.setdefault(name, Accuracy())
        domain.best = recall if domain.best is None or domain.recall is None else max(domain.best, recall)
        domain.recall = recall

    def forgetting(self) -> float:
        """Return the mean of `Accuracy.lost` over the domains with a best; 0 without any."""
        lost = [domain.lost for domain in self.domains.values() if domain.best is not None]
        return float(np.mean(lost)) if lost else 0.0

    def adapted(self, fraction: float) -> float:
        """Return the fraction of the next iteration."""
        low, high = self.bounds
        step = self.rate * (high - low) * (1 if self.forgetting() > self.threshold else -1)
        return min(high, max(low, fraction + step))

    def get_state(self) -> dict[str, Any]:
        """Return domains and fractions."""
        domains = {name: asdict(domain) for name, domain in self.domains.items()}
        return {"domains": domains, "fractions": dict(self.fractions)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue with those of a checkpoint."""
        self.domains = {name: Accuracy(**values) for name, values in state["domains"].items()}
        self.fractions = dict(state["fractions"])


forgetting = Forgetting
