"""Compute terms that keep a policy near what it has learned: pure torch.

    l2     1/2 sum_i (theta_i - theta0_i)^2                      gradient  theta - theta0
    ewc    1/2 sum_i F_i (theta_i - theta*_i)^2                  gradient  F (theta - theta*)
           F_i = mean over episodes of (d log pi(y|x) / d theta_i)^2,  F <- decay F + F_new at the end of a stage
    lwf    KL of the policy and a frozen policy on the policy's own tokens: `losses/kl.py`

Each is multiplied by its `coeff` elsewhere (`learner/regularisers/`).

Sources: Kirkpatrick et al. 2017 (EWC), arXiv 1612.00796 eq. 3; Schwarz et al. 2018 (online EWC), arXiv 1805.06370
section 3; Li and Hoiem 2016 (LwF), arXiv 1606.09282.
"""

from __future__ import annotations

import torch


def pull(
    value: torch.Tensor, anchor: torch.Tensor, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of 1/2 sum importance (value - anchor)^2, and that sum, fp64.

    Args:
        value: a weight.
        anchor: the weight that it is pulled towards, of the same shape.
        importance: at least 0, of the same shape; None: 1 everywhere.
    """
    gap = value.detach() - anchor
    gradient = gap if importance is None else importance * gap
    return gradient, 0.5 * torch.linalg.vecdot(gap.flatten().double(), gradient.flatten().double())


def decayed(before: torch.Tensor | None, squares: torch.Tensor, num: int, decay: float) -> torch.Tensor:
    """Return the importance of a weight after a stage: decay * before + squares / num.

    Args:
        before: importance so far; None: 0.
        squares: sum over episodes of the squared gradient of the episode's log-prob.
        num: number of episodes, at least 1.
        decay: in [0, 1].
    """
    fresh = squares / num
    return fresh if before is None else decay * before + fresh
