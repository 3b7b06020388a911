"""Schedule and apply updates of the reference policy, the anchor of the KL.

    base         never moves
    ema          every `every` iterations  reference <- rate * policy + (1 - rate) * reference
    last_good    every `every` iterations  reference <- policy, if the mean reward since the last check is the best

With "last_good", a policy that has collapsed is pulled back to the last good one.

Sources: Jiang et al. 2025 (ExIt), arXiv 2509.04575 (refresh every M iterations with rate alpha; TRL: 0.6 every 512);
Liu et al. 2025 (ProRL), arXiv 2505.24864 section 3.3 (reference reset to a good checkpoint).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch


class ReferenceClock:
    """Schedule of the reference's updates. Invariant: `get_state` holds its whole state."""

    def __init__(self, kind: str, every: int, rate: float) -> None:
        """Set rule `kind` ("base", "ema" or "last_good"), the period in iterations and the rate of "ema"."""
        self._kind, self._every, self._rate = kind, every, rate
        self._sum, self._num, self._best = 0.0, 0, -np.inf

    def rate_at(self, now: int, rewards: Iterable[float]) -> float:
        """Return the policy's share in the next reference, in [0, 1]; 0 keeps the reference. Call every iteration.

        Args:
            now: training iteration.
            rewards: rewards of this iteration's episodes.
        """
        values = list(rewards)
        self._sum, self._num = self._sum + float(np.sum(values)), self._num + len(values)
        if self._kind == "base" or now % self._every:
            return 0.0
        if self._kind == "ema":
            return self._rate
        mean = self._sum / self._num if self._num else -np.inf
        self._sum, self._num = 0.0, 0
        is_good = mean >= self._best and mean > -np.inf
        self._best = max(self._best, mean)
        return 1.0 if is_good else 0.0

    def get_state(self) -> dict[str, float]:
        """Return the reward sum, the count and the best mean."""
        return {"sum": self._sum, "num": self._num, "best": self._best}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self._sum, self._num, self._best = state["sum"], state["num"], state["best"]


def follow(reference: torch.nn.Module, policy: torch.nn.Module, rate: float) -> None:
    """Update the reference in place: rate * policy + (1 - rate) * reference, parameter by parameter.

    Args:
        reference: reference model, of the policy's architecture.
        policy: policy in training.
        rate: share of the policy, in [0, 1].

    Raises:
        ValueError: the two models differ in parameter names.
    """
    ours, theirs = dict(reference.named_parameters()), dict(policy.named_parameters())
    if set(ours) != set(theirs):
        names = ", ".join(sorted(set(ours) ^ set(theirs))[:4])
        raise ValueError(f"reference and policy differ in parameters: {names}")
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.lerp_(theirs[name].to(parameter), rate)


def weights_of(reference: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return a copy of the reference's weights by name, fp32."""
    return {name: p.detach().float().cpu().numpy().copy() for name, p in reference.named_parameters()}


def set_weights(reference: torch.nn.Module, weights: Mapping[str, np.ndarray]) -> None:
    """Load what `weights_of` returned."""
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(torch.as_tensor(np.asarray(weights[name])))
