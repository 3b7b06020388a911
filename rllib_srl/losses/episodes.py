"""Sums and means over the tokens of each episode, and windows that let no bad number through: torch in, torch out.

    value_N, episode_N  ->  one value an episode, given back at each of its tokens

An episode of a micro-batch is always whole, so what is summed here is the whole episode.
"""

from __future__ import annotations

import torch


def episode_sum(value_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    """Return for each token the sum over the tokens of its episode, without gradient."""
    value_N = value_N.detach()
    episode_B, at_N = torch.unique(episode_N, return_inverse=True)
    sum_B = torch.zeros(len(episode_B), dtype=value_N.dtype, device=value_N.device).index_add_(0, at_N, value_N)
    return sum_B[at_N]


def episode_mean(value_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    """Return for each token the mean over the tokens of its episode, without gradient."""
    return episode_sum(value_N, episode_N) / episode_sum(torch.ones_like(value_N), episode_N)


def inside(value_N: torch.Tensor, window: tuple[float, float]) -> torch.Tensor:
    """Say which values lie in a window, its ends included; one that is not a number counts as inside.

    Left out it would weigh zero, and nobody would hear of it; inside it spoils the gradient, whose step is skipped
    and counted.
    """
    return ~((value_N < window[0]) | (value_N > window[1]))
