"""Shares of domains among fresh prompts by their accuracy: by band, staleness and uncertainty, or by failure rate.

    config.callbacks("contrib.bands")             priority = band weight + staleness + uncertainty + base weight
    config.callbacks("contrib.bands:failing")     priority = sharpness (1 - accuracy) + log base weight

    accuracy  0 ── low ── 0.4 ── medium ── 0.8 ── high ── 1         share = floor + (1 - K floor) softmax(priority)

The accuracy of a domain is a moving average of its groups' pass rates; the base weight is that of the mixture.
Staleness is the time since the domain was played over `horizon`, at most 1; uncertainty is the standard error of the
average, in standard deviations of one observation. The design that this follows was never built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rllib_srl.common.callbacks import SRLCallback
from rllib_srl.curriculum.planner import Plan
from rllib_srl.types import GroupMeta


class Bands(SRLCallback):
    """Shares by accuracy band; subclass it to change its parameters. Invariant: `get_state` holds its whole state."""

    ema_rate = 0.05  # weight of a group's pass rate in the average accuracy of its domain, in (0, 1]
    first_accuracy = 0.5  # of a domain without results
    bounds = (0.4, 0.8)  # lower bounds of the medium and the high band
    weights = (0.6, 0.3, 0.1)  # priority of the low, medium and high band
    staleness, horizon = 0.1, 50  # added priority of a domain that was not played for so many iterations
    uncertainty = 0.05  # added priority of a domain without results
    floor = 0.02  # least share of a domain

    def __init__(self) -> None:
        """Start without results."""
        super().__init__()
        self.domains: dict[str, list[float]] = {}  # accuracy, sum of squared weights of the average, iteration

    def priorities(self, acc_K: np.ndarray, error_K: np.ndarray, since_K: np.ndarray, base_K: np.ndarray) -> np.ndarray:
        """Return the priority of each domain from accuracy, standard error, iterations since play and base weight."""
        band_K = np.where(acc_K < self.bounds[0], 0, np.where(acc_K > self.bounds[1], 2, 1))
        stale_K = np.minimum(1.0, since_K / self.horizon)
        weight_K = np.array(self.weights)[band_K] + base_K
        priority_K: np.ndarray = weight_K + self.staleness * stale_K + self.uncertainty * error_K
        return priority_K

    def change_plan(self, *, algorithm: Any, plan: Plan, now: int, metrics_logger: Any, **kwargs: Any) -> Plan:
        """Set the shares of fresh prompts."""
        active = {name: weight for name, weight in algorithm.source.domain_weights().items() if weight > 0}
        rows = [self.domains.setdefault(name, [self.first_accuracy, 1.0, now]) for name in active]
        acc_K, variance_K, seen_K = np.array(rows, float).T
        score_K = self.priorities(acc_K, np.sqrt(variance_K), now - seen_K, np.array(list(active.values())))
        weight_K = np.exp(score_K - score_K.max())
        left = max(0.0, 1.0 - len(active) * self.floor)
        share_K = (1.0 - left) / len(active) + left * weight_K / weight_K.sum()
        return replace(plan, fresh=dict(zip(active, share_K.tolist(), strict=True)))

    def post_step(
        self, *, algorithm: Any, groups: Sequence[GroupMeta], now: int, metrics_logger: Any, **kwargs: Any
    ) -> None:
        """Update the accuracies with the pass rates of the groups, and log them."""
        keep = 1 - self.ema_rate
        for group in groups:
            passed = float(np.mean(group.is_success_G(algorithm.config.replay_pass_reward)))
            acc, variance, _ = self.domains.get(group.prompt.domain, [self.first_accuracy, 1.0, now])
            row = [keep * acc + self.ema_rate * passed, keep**2 * variance + self.ema_rate**2, now]
            self.domains[group.prompt.domain] = row
        for name, (acc, *_) in self.domains.items():
            metrics_logger.log_value(("planner", "accuracy", name), acc, reduce="mean", window=1)

    def get_state(self) -> dict[str, Any]:
        """Return the statistics by domain."""
        return {name: list(row) for name, row in self.domains.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue with the statistics of a checkpoint."""
        self.domains = {name: list(row) for name, row in state.items()}


class Failing(Bands):
    """Shares by failure rate: share ~ base weight * exp(sharpness * (1 - accuracy))."""

    sharpness = 3.0
    floor = 0.001

    def priorities(self, acc_K: np.ndarray, error_K: np.ndarray, since_K: np.ndarray, base_K: np.ndarray) -> np.ndarray:
        """Return sharpness * (1 - accuracy) + log base weight."""
        priority_K: np.ndarray = self.sharpness * (1 - acc_K) + np.log(base_K)
        return priority_K


bands, failing = Bands, Failing
