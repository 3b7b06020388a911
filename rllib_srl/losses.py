"""Policy-gradient loss per token, its corrections for who wrote the token, and KL estimators: torch in, torch out.

    ratio      = exp(logp - anchor_logp)
    loss       = -correction * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

                 anchor_logp       correction, with rho = exp(prox_logp - behaviour_logp)
    played       prox_logp         min(rho, is_truncation)
    "clip"       behaviour_logp    1
    "truncate"   prox_logp         min(rho, upper)                   reused tokens, one of three
    "mask"       prox_logp         rho inside [lower, upper], else 0

prox = the learner at the start of the update, behaviour = the engine that wrote the token.
All in fp32 log space, one value per policy-written token; the caller divides the sum by the global
token count (DAPO's token mean), so that any sharding and any micro-batches give the same gradient.

Sources: Schulman et al. 2017, arXiv 1707.06347 eq. 7;
Yu et al. 2025 (DAPO), arXiv 2503.14476 sections 3.1 and 3.3;
Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (truncation);
Li et al. 2025 (RePO), arXiv 2506.09340 (clip around stored log-probs);
Fu et al. 2025 (AReaL), arXiv 2505.24298 section 5.2 (decoupled objective);
Ling Team 2025 (IcePop), arXiv 2510.18855 (mask);
Schulman 2020, "Approximating KL divergence" (k1, k2, k3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MAX_LOG_RATIO = 20.0  # exp stays finite in fp32; verl's bound


def importance_correction(prox_logp_N: torch.Tensor, behaviour_logp_N: torch.Tensor, truncation: float) -> torch.Tensor:
    """Return min(exp(prox_logp - behaviour_logp), truncation), without gradient.

    Args:
        prox_logp_N: log-probs under the learner at the start of the update, nats.
        behaviour_logp_N: log-probs the engine reported, nats.
        truncation: upper bound, > 0; infinity leaves the ratio alone.
    """
    log_ratio_N = (prox_logp_N - behaviour_logp_N).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_N.exp().clamp(max=truncation)


def clip_around_behaviour(
    prox_logp_N: torch.Tensor, behaviour_logp_N: torch.Tensor, window: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return behaviour_logp and 1: the clip alone restrains how far a reused token has drifted.

    Args:
        prox_logp_N: log-probs under the learner at the start of the update, nats.
        behaviour_logp_N: the stored log-probs of the engine that wrote the tokens, nats.
        window: not used here.

    Source: Li et al. 2025 (RePO), arXiv 2506.09340.
    """
    return behaviour_logp_N, torch.ones_like(prox_logp_N)


def truncated_weight(
    prox_logp_N: torch.Tensor, behaviour_logp_N: torch.Tensor, window: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prox_logp and min(exp(prox_logp - behaviour_logp), upper end of the window), without gradient.

    Arguments as of `clip_around_behaviour`.

    Source: Fu et al. 2025 (AReaL), arXiv 2505.24298 section 5.2.
    """
    return prox_logp_N, importance_correction(prox_logp_N, behaviour_logp_N, window[1])


def masked_weight(
    prox_logp_N: torch.Tensor, behaviour_logp_N: torch.Tensor, window: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prox_logp and exp(prox_logp - behaviour_logp), 0 where that lies outside the window, without gradient.

    Arguments as of `clip_around_behaviour`; both ends of the window belong to it.

    Source: Ling Team 2025 (IcePop), arXiv 2510.18855.
    """
    rho_N = importance_correction(prox_logp_N, behaviour_logp_N, float("inf"))
    return prox_logp_N, torch.where((rho_N >= window[0]) & (rho_N <= window[1]), rho_N, 0.0)


REUSE_CORRECTIONS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "clip": clip_around_behaviour,
    "truncate": truncated_weight,
    "mask": masked_weight,
}


def clipped_policy_loss(
    logp_N: torch.Tensor,
    anchor_logp_N: torch.Tensor,
    advantage_N: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the clipped surrogate of each token and whether the clip took its gradient away.

    Args:
        logp_N: log-probs under the policy in training, with gradient, nats.
        anchor_logp_N: log-probs the ratio is taken against (see the module), nats.
        advantage_N: advantage of the token's episode.
        clip_low: the ratio may fall to 1 - clip_low, in (0, 1].
        clip_high: the ratio may rise to 1 + clip_high, > 0.

    Source: Yu et al. 2025, arXiv 2503.14476 section 3.1.
    """
    ratio_N = (logp_N - anchor_logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_N = ratio_N * advantage_N
    held_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantage_N
    return -torch.minimum(free_N, held_N), held_N < free_N


def k1(logp_N: torch.Tensor, ref_logp_N: torch.Tensor) -> torch.Tensor:
    """Return log(pi / ref): unbiased, may be negative; for rewards only (as a loss its expected gradient is 0)."""
    return logp_N - ref_logp_N


def k2(logp_N: torch.Tensor, ref_logp_N: torch.Tensor) -> torch.Tensor:
    """Return half the squared log ratio: on-policy its gradient is that of the reverse KL."""
    return 0.5 * (logp_N - ref_logp_N).square()


def k3(logp_N: torch.Tensor, ref_logp_N: torch.Tensor) -> torch.Tensor:
    """Return exp(-d) + d - 1 with d = log(pi / ref): unbiased and >= 0."""
    d_N = (logp_N - ref_logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (-d_N).exp() + d_N - 1


KL_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k2": k2, "k3": k3}
KL_ESTIMATORS = ("k1", *KL_LOSSES)  # k1 goes into the reward
