"""Statistics of an accuracy and of answers: Wilson interval, pass@k and pass^k, diversity. Pure Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

Z_95 = 1.959963984540054


def wilson_interval(num_right: float, num_tried: int, z: float = Z_95) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion, (low, high) within [0, 1].

    Args:
        num_right: successes, in [0, num_tried].
        num_tried: at least 1.
        z: standard normal quantile; the default gives 95 %.

    Raises:
        ValueError: the counts are out of range.

    Source: Wilson 1927, J. Am. Stat. Assoc. 22, "Probable inference, the law of succession, and statistical inference".
    """
    if num_tried < 1 or not 0 <= num_right <= num_tried:
        raise ValueError(f"num_right = {num_right}, num_tried = {num_tried}; expected 0 <= num_right <= num_tried >= 1")
    p, n = num_right / num_tried, num_tried
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the probability that k of n answers, drawn without replacement, include a right one: 1 - C(n-c,k)/C(n,k).

    Args:
        num_samples: n, at least k.
        num_right: c, in [0, n].
        k: at least 1.

    Raises:
        ValueError: an argument is out of range.

    Source: Chen et al. 2021, arXiv 2107.03374 section 2.1.
    """
    _check_counts(num_samples, num_right, k)
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def pass_hat_k(num_samples: int, num_right: int, k: int) -> float:
    """Return pass^k, the probability that k of n answers, drawn without replacement, are all right: C(c,k)/C(n,k).

    Args:
        num_samples: n, at least k.
        num_right: c, in [0, n].
        k: at least 1; pass^1 = pass@1.

    Raises:
        ValueError: an argument is out of range.

    Source: Yao et al. 2024, arXiv 2406.12045 (tau-bench), section 4.
    """
    _check_counts(num_samples, num_right, k)
    return math.comb(num_right, k) / math.comb(num_samples, k)


def _check_counts(num_samples: int, num_right: int, k: int) -> None:
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"n = {num_samples}, c = {num_right}, k = {k}; expected 1 <= k <= n and 0 <= c <= n")


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
