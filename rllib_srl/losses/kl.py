"""Estimate the KL of policy and reference on policy-written tokens: pure torch.

    d = logp - ref_logp         value              gradient as a loss
    k1                          d                  0 in expectation: for rewards only
    k2                          d^2 / 2            that of the reverse KL, on-policy
    k3                          exp(-d) + d - 1    not that of the reverse KL
    k3_k2                       as k3              as k2

    in the reward               r - coeff * sum over an episode's tokens of k(d), d = behaviour_logp - ref_logp

k1, k2 and k3 can be used in the reward, where only the value counts; k3_k2 differs from k3 only in its gradient.

Sources: Schulman 2020, "Approximating KL divergence"; the straight-through k3_k2 is verl's "k3+"; arXiv 2503.16870 (the
k likeliest tokens and the rest as one class).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rllib_srl.losses.policy import MAX_LOG_RATIO

LEAST_REST = 1e-6  # probability of all other tokens below which they are ignored: the limit of fp32


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


def top_kl(logp_Nk: torch.Tensor, other_Nk: torch.Tensor) -> torch.Tensor:
    """Return sum_k p_k (log p_k - log q_k) + p_rest (log p_rest - log q_rest) [N], nats.

    p_rest and q_rest are the probabilities of all other tokens together. So this is the KL between the two
    distributions after all other tokens were merged into one, at most the KL over the whole vocabulary.

    Args:
        logp_Nk: log p_k of k tokens under the first distribution.
        other_Nk: log q_k of the same tokens under the second.
    """
    p_rest, q_rest = (1 - each.exp().sum(-1) for each in (logp_Nk, other_Nk))
    log_p, log_q = (rest.clamp(min=LEAST_REST).log() for rest in (p_rest, q_rest))
    over_top = (logp_Nk.exp() * (logp_Nk - other_Nk)).sum(-1)
    return over_top + torch.where(p_rest > LEAST_REST, p_rest, 0.0) * (log_p - log_q)


Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
KL_LOSSES: dict[str, Estimator] = {"k2": k2, "k3": k3, "k3_k2": k3_k2}
KL_REWARDS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}
KL_ESTIMATORS: dict[str, Estimator] = {"k1": k1, **KL_LOSSES}
