"""Shape the token advantages of silent groups by the policy's entropy (RL-ZVP): pure torch.

    all right    A_t =  alpha H_t                     uncertain tokens are strengthened most
    all wrong    A_t = -alpha (max_k H_k - H_t)       certain tokens are weakened most, the most uncertain not at all

H_t is the entropy of the policy's distribution at token t in nats, at the sampling temperature and without gradient;
the maximum is over the trained tokens of the episode. Groups with signal keep the advantages of their rule.

Differences from the paper:
1. An episode is right by the pass mark of its environment, or by `replay_pass_reward`: rewards need not be 0 and 1.
2. H_t is computed once, under the weights at the start of the update, and fixed for all epochs.
3. Stored groups without signal are not trained on again.

Source: Le et al. 2025 (RL-ZVP), arXiv 2509.21880 eq. 5.
"""

from __future__ import annotations

import torch

from rllib_srl.losses.episodes import episode_max


def entropy_shaped(advantage_N: torch.Tensor, entropy_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    """Return the advantages of the tokens of silent groups, without gradient.

    Args:
        advantage_N: alpha for a right episode, -alpha for a wrong one, at each of its tokens.
        entropy_N: entropy of the policy at each token, nats.
        episode_N: episode of each token; episodes must be whole.
    """
    entropy_N = entropy_N.detach()
    distance_N = episode_max(entropy_N, episode_N) - entropy_N
    return advantage_N * torch.where(advantage_N > 0, entropy_N, distance_N)
