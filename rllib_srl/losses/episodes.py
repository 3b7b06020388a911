"""Token values over episodes (sum, mean), and values against a window without hiding NaN: pure torch.

    value_N, episode_N  ->  one value per episode, broadcast to each of its tokens

A micro-batch holds whole episodes only, so sums and means cover the whole episode.
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
    """Return which values lie in the closed window; NaN counts as inside.

    A masked NaN would get weight 0 and pass unnoticed. Kept, it makes the gradient NaN, so the step is skipped and
    counted.
    """
    return ~((value_N < window[0]) | (value_N > window[1]))
