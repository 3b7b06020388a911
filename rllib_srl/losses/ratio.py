"""Compute the importance ratio of policy to anchor per token, sequence or geometric mean, in fp32 log space.

    d_t = logp_t - anchor_logp_t                                value at token t          factor of grad(logp_t)
    token         ratio of the token                            exp(d_t)                  exp(d_t)
    sequence      product over the episode's tokens             exp(sum_t d_t)            the same
    geometric     geometric mean over the episode's tokens      exp(mean_t d_t)           the same

With "sequence" and "geometric" each token carries the episode's ratio with the gradient of its own log-prob only. The
mean over the tokens then has the gradient of the geometric ratio, and the sum that of the product.
To add a level, register a function: `RATIO_LEVELS["mine"] = level`.

Sources: Zheng et al. 2025 (GSPO), arXiv 2507.18071 section 4 (geometric, and its token form GSPO-token);
Ahmadian et al. 2024 (RLOO), arXiv 2402.14740 section 2 (the whole answer as one action).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rllib_srl.losses.episodes import episode_mean, episode_sum

MAX_LOG_RATIO = 20.0  # exp stays finite in fp32; verl's bound


def _token(difference_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    return difference_N


def _sequence(difference_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    return episode_sum(difference_N, episode_N) + (difference_N - difference_N.detach())


def _geometric(difference_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    return episode_mean(difference_N, episode_N) + (difference_N - difference_N.detach())


RATIO_LEVELS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "token": _token,
    "sequence": _sequence,
    "geometric": _geometric,
}


def ratio_of(
    level: str, logp_N: torch.Tensor, anchor_logp_N: torch.Tensor, episode_N: torch.Tensor
) -> torch.Tensor:
    """Return the ratio of each token [N], with gradient if `logp_N` has one.

    The log ratio is clamped to +-`MAX_LOG_RATIO`.

    Args:
        level: a key of `RATIO_LEVELS`.
        logp_N: log-probs under the policy in training, nats.
        anchor_logp_N: log-probs in the denominator, nats.
        episode_N: episode of each token; episodes must be whole.
    """
    log_ratio_N = RATIO_LEVELS[level](logp_N.float() - anchor_logp_N.float(), episode_N)
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
