"""Statistics of an accuracy and of answers: Wilson interval, pass@k and pass^k, diversity. Pure Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

Z_95 = 1.959963984540054


def wilson_interval(num_right: int, num_tried: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion, (low, high) within [0, 1]; `num_tried` is at least 1.

    Source: Wilson 1927, J. Am. Stat. Assoc. 22, "Probable inference, the law of succession, and statistical inference".
    """
    p, n, z = num_right / num_tried, num_tried, Z_95
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the probability that k of n answers, drawn without replacement, include a right one: 1 - C(n-c,k)/C(n,k).

    Source: Chen et al. 2021, arXiv 2107.03374 section 2.1.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def pass_hat_k(num_samples: int, num_right: int, k: int) -> float:
    """Return pass^k, the probability that k of n answers, drawn without replacement, are all right: C(c,k)/C(n,k).

    Source: Yao et al. 2024, arXiv 2406.12045 (tau-bench), section 4.
    """
    return math.comb(num_right, k) / math.comb(num_samples, k)


def answer_diversity(answers: Sequence[Hashable]) -> float:
    """Return the probability that two different episodes of a prompt gave different answers, in [0, 1].

    D = 1 - sum_a n_a (n_a - 1) / (n (n - 1)), unbiased in the number of episodes n; NaN for fewer than two.

    Source: Simpson 1949, Nature 163, "Measurement of diversity".
    """
    n = len(answers)
    same = sum(count * (count - 1) for count in Counter(answers).values())
    return 1.0 - same / (n * (n - 1)) if n > 1 else float("nan")
