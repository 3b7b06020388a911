"""Shape rewards before advantage estimation: the length penalty, pure NumPy.

Source: Yu et al. 2025 (DAPO), arXiv 2503.14476 eq. 13.
"""

from __future__ import annotations

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
