"""Whether counts of draws fit exact probabilities: one bar for every rule's test."""

import numpy as np


def fits(count_N: np.ndarray, probability_N: np.ndarray) -> bool:
    """Say whether chi-square is below its 99.99 % point, and what is impossible was never drawn.

    Source of the point: Wilson and Hilferty 1931, PNAS 17 (cube-root approximation).
    """
    possible = probability_N > 0
    expected_N = count_N.sum() * probability_N[possible]
    statistic = ((count_N[possible] - expected_N) ** 2 / expected_N).sum()
    freedom = len(expected_N) - 1
    point = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
    return bool(statistic < point) and not count_N[~possible].any()
