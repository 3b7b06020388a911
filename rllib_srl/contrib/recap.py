"""RECAP: domains with slow or unstable progress weigh more in the loss.

    config.callbacks("contrib.recap")

    loss of a domain, one value per iteration in which it was played: 1 - mean reward
    c = mean of the newer half / mean of the older half        convergence: 1 is a flat loss, above 1 a rising one
    i = std of all / (sum of the two means)                    instability
    weight = K softmax((mix c + (1 - mix) i) / T)              the sum is K; 1 until 2W values are known

1. The weight multiplies advantages after normalisation: applied before, a group's own normalisation cancels it.
2. The formula is the published one, softmax of the mixed score; the released code mixes two softmaxes.
3. At the published T = 5 weights stay within about 0.93 to 1.2.

Source: Dynamic objective reweighting (RECAP) 2025, arXiv 2510.21978; github.com/VietHoang1512/recap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rllib_srl.common.callbacks import SRLCallback
from rllib_srl.curriculum.curriculum import Plan
from rllib_srl.types import GroupMeta

LEAST_MEAN = 1e-6  # added to means, so that two losses near 0 count as equal


class Recap(SRLCallback):
    """The weights; subclass it to change its parameters. Invariant: `get_state` holds its whole state."""

    window = 10  # W, losses of a domain in each of the two halves
    temperature = 5.0  # T
    mix = 0.5  # weight of convergence; 1 ignores instability

    def __init__(self) -> None:
        """Start without losses."""
        super().__init__()
        self.losses: dict[str, list[float]] = {}

    def change_plan(self, *, algorithm: Any, plan: Plan, now: int, metrics_logger: Any, **kwargs: Any) -> Plan:
        """Set the weights of the iteration."""
        return replace(plan, weights=recap_weights(self.losses, self.window, self.temperature, self.mix))

    def post_step(self, *, algorithm: Any, groups: Sequence[GroupMeta], metrics_logger: Any, **kwargs: Any) -> None:
        """Add the losses of this iteration, and log the next weights."""
        rewards: dict[str, list[float]] = {}
        for group in groups:
            rewards.setdefault(group.prompt.domain, []).append(float(np.mean(group.rewards_G)))
        for name, of_domain in rewards.items():
            losses = [*self.losses.get(name, []), 1.0 - float(np.mean(of_domain))]
            self.losses[name] = losses[-2 * self.window :]
        for name, weight in recap_weights(self.losses, self.window, self.temperature, self.mix).items():
            metrics_logger.log_value(("planner", "loss_weight", name), weight, reduce="mean", window=1)

    def get_state(self) -> dict[str, Any]:
        """Return the losses by domain."""
        return {name: list(losses) for name, losses in self.losses.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue with the losses of a checkpoint."""
        self.losses = {name: list(losses) for name, losses in state.items()}


recap = Recap


def recap_weights(
    losses: Mapping[str, Sequence[float]], window: int, temperature: float, mix: float
) -> dict[str, float]:
    """Return domain -> weight; 1 for a domain with fewer than 2 `window` losses, the sum is the number of domains.

    Args:
        losses: of each domain, oldest first, >= 0; only the last 2 `window` are used.
        window: W, number of losses in each half.
        temperature: of the softmax, > 0.
        mix: weight of convergence in the score, in [0, 1].
    """
    known = {domain: list(loss_N)[-2 * window :] for domain, loss_N in losses.items() if len(loss_N) >= 2 * window}
    weights = dict.fromkeys(losses, 1.0)
    if not known:
        return weights
    score_K = np.array([mix * convergence(loss_N) + (1 - mix) * instability(loss_N) for loss_N in known.values()])
    return weights | dict(zip(known, scaled_softmax(score_K, temperature).tolist(), strict=True))


def convergence(loss_N: Sequence[float]) -> float:
    """Return mean(newer half) / mean(older half); 1 if both are nearly 0."""
    half = len(loss_N) // 2
    old, new = float(np.mean(loss_N[:half])), float(np.mean(loss_N[half:]))
    return (new + LEAST_MEAN) / (old + LEAST_MEAN)


def instability(loss_N: Sequence[float]) -> float:
    """Return std(all) / (sum of the means of the two halves); 0 if all losses are nearly 0."""
    half = len(loss_N) // 2
    return float(np.std(loss_N) / (np.mean(loss_N[:half]) + np.mean(loss_N[half:]) + LEAST_MEAN))


def scaled_softmax(score_K: np.ndarray, temperature: float) -> np.ndarray:
    """Return K softmax(score / temperature): weights whose mean is 1."""
    weight_K = np.exp((score_K - score_K.max()) / temperature)
    scaled_K: np.ndarray = len(score_K) * weight_K / weight_K.sum()
    return scaled_K
