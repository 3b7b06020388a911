"""The diversity of answers; pass@k and pass^k are in `rllib_srl.common.statistics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def answer_diversity(answers: Sequence[Hashable]) -> float:
    """Return the probability that two different episodes of a prompt gave different answers, in [0, 1].

    D = 1 - sum_a n_a (n_a - 1) / (n (n - 1)), unbiased in the number of episodes n; NaN for fewer than two.

    Args:
        answers: answers of the episodes of one prompt, normalised for comparison.

    Source: Simpson 1949, Nature 163, "Measurement of diversity".
    """
    n = len(answers)
    same = sum(count * (count - 1) for count in Counter(answers).values())
    return 1.0 - same / (n * (n - 1)) if n > 1 else float("nan")
