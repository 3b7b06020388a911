"""The importance ratio of policy and anchor at three levels, in fp32 log space.

    d_t = logp_t - anchor_logp_t                                value at token t          gradient at token t
    token         each token's own ratio                        exp(d_t)                  exp(d_t)
    sequence      that of the whole episode                     exp(sum_t d_t)            the same
    geometric     its geometric mean over the episode's tokens  exp(mean_t d_t)           the same

An episode's ratio is carried by each of its tokens with the gradient of that token's log-prob alone, so that the mean
over its tokens has the gradient of the geometric ratio, and a sum over them that of the product.
A user's own level is one registered function: `RATIO_LEVELS["mine"] = level`.

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
    """Return the ratio at a level, one value a token, with the gradient of `logp_N` if it has one.

    Args:
        level: a key of `RATIO_LEVELS`.
        logp_N: log-probs under the policy in training, nats.
        anchor_logp_N: log-probs the ratio is taken against, nats.
        episode_N: which episode a token belongs to; all tokens of an episode are here.
    """
    log_ratio_N = RATIO_LEVELS[level](logp_N.float() - anchor_logp_N.float(), episode_N)
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
