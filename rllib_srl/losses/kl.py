"""Estimate the KL of policy and reference on policy-written tokens: pure torch.

    d = logp - ref_logp         value              gradient as a loss
    k1                          d                  0 in expectation: for rewards only
    k2                          d^2 / 2            that of the reverse KL, on-policy
    k3                          exp(-d) + d - 1    not that of the reverse KL
    k3_k2                       as k3              as k2

    in the reward               r - coeff * sum over an episode's tokens of k(d), d = behaviour_logp - ref_logp

k1, k2 and k3 can be used in the reward, where only the value counts; k3_k2 differs from k3 only in its gradient.

Source: Schulman 2020, "Approximating KL divergence"; the straight-through k3_k2 is verl's "k3+".
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rllib_srl.losses.policy import MAX_LOG_RATIO


def k1(logp_N: torch.Tensor, ref_logp_N: torch.Tensor) -> torch.Tensor:
    """Return log(pi / ref): unbiased, may be negative. For rewards only: as a loss its expected gradient is 0."""
    return logp_N - ref_logp_N


def k2(logp_N: torch.Tensor, ref_logp_N: torch.Tensor) -> torch.Tensor:
    """Return half the squared log ratio; on-policy its gradient is that of the reverse KL."""
    return 0.5 * (logp_N - ref_logp_N).square()


def k3(logp_N: torch.Tensor, ref_logp_N: torch.Tensor) -> torch.Tensor:
    """Return exp(-d) + d - 1 with d = log(pi / ref): unbiased and >= 0."""
    d_N = (logp_N - ref_logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (-d_N).exp() + d_N - 1


def k3_k2(logp_N: torch.Tensor, ref_logp_N: torch.Tensor) -> torch.Tensor:
    """Return the value of k3 with the gradient of k2."""
    square_N = k2(logp_N, ref_logp_N)
    return k3(logp_N, ref_logp_N).detach() + square_N - square_N.detach()


Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
KL_LOSSES: dict[str, Estimator] = {"k2": k2, "k3": k3, "k3_k2": k3_k2}
KL_REWARDS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}
KL_ESTIMATORS: dict[str, Estimator] = {"k1": k1, **KL_LOSSES}
