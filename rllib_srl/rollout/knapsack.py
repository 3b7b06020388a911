"""Group sizes by expected signal (Knapsack RL): the episodes of a batch go to the prompts where they are worth most.

    value of n episodes of a prompt with pass rate p      p (1 - p)^2 (1 - p^n - (1 - p)^n)
                                                          gain of an update * probability of different rewards

    maximise the sum of the expected values, p ~ Beta(alpha, beta) from the memory,
    with smallest <= n_i <= largest and a sum of exactly num_prompts_per_batch * group_size

The gain is, to first order, the growth of the pass rate by one step on a success: hard prompts gain more than easy
ones. The value is concave in n, so giving each episode in turn to the prompt where it adds most is optimal.
Equal increments go to the smaller group, then to the first prompt.

Differences from the paper:
1. The pass rate is a Beta distribution and the value its expectation: one visit of 0 or 8 of 8 does not make it 0 or 1.
   The paper takes the pass rate of the last visit, and needs rules of its own for 0 and 1.
2. A prompt without a visit is estimated by its domain. In the paper all prompts of the first epoch get equally many.
3. The optimum comes from sorting increments, not from dynamic programming. It is the same.
4. `largest` is 4 `group_size` by default; the paper reports groups of up to 93 episodes.
5. A prompt weighs in the loss by its episodes, or by their tokens with `aggregation="token_mean"`, as in the paper.

Source: Li et al. 2025 (Knapsack RL), arXiv 2509.25849.
"""

from __future__ import annotations

import numpy as np


def increments(beta_P2: np.ndarray, largest: int) -> np.ndarray:
    """Return what the episode n + 1 of each prompt adds to its expected value, float64 [P, largest].

    It is E[p (1 - p)^2 (p^n (1 - p) + (1 - p)^n p)], which falls with n.

    Args:
        beta_P2: alpha and beta of each prompt's pass rate, above 0.
        largest: maximum number of episodes.
    """
    a_P1, b_P1 = np.asarray(beta_P2, np.float64)[:, :1], np.asarray(beta_P2, np.float64)[:, 1:]
    n_N, total_P1 = np.arange(largest - 1), a_P1 + b_P1
    norm_P1 = total_P1 * (total_P1 + 1) * (total_P1 + 2) * (total_P1 + 3)
    # E[p^(n + 1) (1 - p)^3] and E[p^2 (1 - p)^(n + 2)] at n = 0, then by the ratio to the one before.
    failed_P1 = a_P1 * b_P1 * (b_P1 + 1) * (b_P1 + 2) / norm_P1
    solved_P1 = a_P1 * (a_P1 + 1) * b_P1 * (b_P1 + 1) / norm_P1
    after_failed_PN = np.cumprod(np.hstack([failed_P1, (a_P1 + n_N + 1) / (total_P1 + n_N + 4)]), axis=1)
    after_solved_PN = np.cumprod(np.hstack([solved_P1, (b_P1 + n_N + 2) / (total_P1 + n_N + 4)]), axis=1)
    return after_failed_PN + after_solved_PN


def group_sizes(beta_P2: np.ndarray, budget: int, smallest: int, largest: int) -> np.ndarray:
    """Return the number of episodes of each prompt, int64 [P], whose sum is `budget`.

    Args:
        beta_P2: alpha and beta of each prompt's pass rate, above 0.
        budget: episodes of all prompts, from P * smallest to P * largest.
        smallest: minimum of a prompt, at least 2: a group of one has no signal.
        largest: maximum of a prompt.

    Raises:
        ValueError: no allocation has this sum.
    """
    num_prompts = len(beta_P2)
    if not num_prompts * smallest <= budget <= num_prompts * largest:
        raise ValueError(
            f"budget = {budget} for {num_prompts} prompts; expected {num_prompts * smallest} to {num_prompts * largest}"
        )
    gain_PN = increments(beta_P2, largest)[:, smallest:]
    gain_PN = np.minimum.accumulate(gain_PN, axis=1)  # rounding must not make a later episode worth more
    prompt_PN, place_PN = np.indices(gain_PN.shape)
    order = np.lexsort((prompt_PN.ravel(), place_PN.ravel(), -gain_PN.ravel()))
    chosen = prompt_PN.ravel()[order[: budget - num_prompts * smallest]]
    sizes_P: np.ndarray = smallest + np.bincount(chosen, minlength=num_prompts)
    return sizes_P
