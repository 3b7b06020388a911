"""Shape rewards before advantage estimation (length penalty, tool reward), and ramp weights: pure NumPy.

    overlong   0 up to longest - cache tokens, then falling linearly to -factor at longest      cache = share * longest
    tools      coeff per call, in total at most 1, times a cosine from 1 to 0
    ramp       a cosine from 0 to 1

Sources: Yu et al. 2025 (DAPO), arXiv 2503.14476 eq. 13 (overlong); SPEAR, arXiv 2509.22601 (tools, ramp).
"""

from __future__ import annotations

import math

import numpy as np


def overlong(num_tokens_G: np.ndarray, longest: int, share: float, factor: float) -> np.ndarray:
    """Return min(0, (longest - cache - n) / cache) * factor for n written tokens, cache = share * longest.

    The penalty does not grow beyond `longest`.

    Args:
        num_tokens_G: number of tokens the policy wrote in each episode.
        longest: maximum tokens an episode may write.
        share: share of `longest` over which the penalty rises, in (0, 1].
        factor: penalty at `longest`, at least 0.
    """
    cache = share * longest
    return factor * np.clip((longest - cache - np.asarray(num_tokens_G, np.float64)) / cache, -1.0, 0.0)


def tool_reward(num_calls_G: np.ndarray, coeff: float, now: int, num_iterations: int) -> np.ndarray:
    """Return min(coeff * calls, 1) * (1 + cos(pi * t / T)) / 2, and 0 from T on; t = 0 at the first iteration.

    Args:
        num_calls_G: number of tool calls (turns that got a reply) of each episode.
        coeff: reward per call, at least 0.
        now: training iteration, from 1.
        num_iterations: T, iterations until the reward has decayed to 0.
    """
    return np.minimum(coeff * np.asarray(num_calls_G, np.float64), 1.0) * (1 - ramp(now, num_iterations))


def ramp(now: int, num_iterations: int) -> float:
    """Return (1 - cos(pi * t / T)) / 2, which rises from 0 at the first iteration (t = 0) to 1 from T on; 1 if T = 0.

    Args:
        now: training iteration, from 1.
        num_iterations: T, iterations of the ramp.
    """
    return 0.5 * (1 - math.cos(math.pi * min(1.0, (now - 1) / num_iterations))) if num_iterations else 1.0
