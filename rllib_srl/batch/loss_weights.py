"""Compute the loss weight (scale) of each token, fixed for the whole batch before any sharding: pure NumPy.

    rule             scale of a token in an episode with n loss tokens   symbols, for one side (played or reused)
    token_mean       1 / N                                               N: loss tokens of all its episodes
    sequence_mean    1 / (B n)                                           B: its episodes with a loss token
    constant         1 / (B longest)                                     Dr.GRPO: no length bias

    loss = L_played + reuse_coeff * L_reused      each side by its own N or B (RePO)

So more reused groups do not lower the weight of played groups.

Sources: Yu et al. 2025 (DAPO), arXiv 2503.14476 section 3.3; Shao et al. 2024 (GRPO), arXiv 2402.03300 eq. 3;
Liu et al. 2025 (Dr.GRPO), arXiv 2503.20783 section 3.2; Li et al. 2025 (RePO), arXiv 2506.09340.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Scale = float | np.ndarray  # of a group: one number for all its tokens, or [G], one per episode


def token_scales(
    num_tokens_PG: Sequence[np.ndarray],
    is_reused_P: Sequence[bool],
    rule: str = "token_mean",
    longest: int = 1,
    reuse_coeff: float = 1.0,
) -> list[Scale]:
    """Return the scale of each group.

    Args:
        num_tokens_PG: number of policy-written tokens of each episode, [G] per group.
        is_reused_P: whether a group belongs to the reused side.
        rule: "token_mean", "sequence_mean" or "constant".
        longest: maximum tokens an episode may write, for "constant".
        reuse_coeff: weight of the reused side, at least 0.
    """
    sides = {
        side: [n for n, is_reused in zip(num_tokens_PG, is_reused_P, strict=True) if is_reused == side]
        for side in (False, True)
    }
    num_tokens, num_episodes = (
        {side: max(1, int(sum(of(n) for n in groups))) for side, groups in sides.items()}
        for of in (np.sum, np.count_nonzero)
    )
    scales: list[Scale] = []
    for num_tokens_G, is_reused in zip(num_tokens_PG, is_reused_P, strict=True):
        weight = reuse_coeff if is_reused else 1.0
        if rule == "token_mean":
            scales.append(weight / num_tokens[is_reused])
        elif rule == "constant":
            scales.append(weight / (num_episodes[is_reused] * longest))
        else:
            scales.append(weight / (num_episodes[is_reused] * np.maximum(1, np.asarray(num_tokens_G, np.float64))))
    return scales
