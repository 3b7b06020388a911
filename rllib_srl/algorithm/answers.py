"""Metrics of answers: superficial and essential forgetting, and diversity.

    accuracy = parse rate x accuracy given parsed            an unparsable answer counts as wrong

pass@k and pass^k are in `rllib_srl.common.statistics`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np


class ForgettingParts(NamedTuple):
    """Two parts of a drop in accuracy, each in [-1, 1]; they sum to the drop exactly."""

    superficial: float  # format: answers can no longer be parsed
    essential: float  # content: parsed answers are wrong


def accuracy_given_parsed(accuracy: float, parse_rate: float) -> float:
    """Return accuracy / parse rate, the accuracy among parsed answers; NaN if no answer could be parsed.

    Args:
        accuracy: accuracy over all answers, in [0, parse_rate].
        parse_rate: share of answers that could be parsed, in [0, 1].

    Raises:
        ValueError: accuracy exceeds the parse rate, or a share is out of range.

    Source: the definition of a conditional share.
    """
    if not 0 <= accuracy <= parse_rate + 1e-9 <= 1 + 2e-9:
        raise ValueError(f"accuracy = {accuracy}, parse_rate = {parse_rate}; expected 0 <= accuracy <= parse_rate <= 1")
    return min(1.0, accuracy / parse_rate) if parse_rate > 0 else float("nan")


def forgetting_parts(accuracy: Sequence[float], parse_rate: Sequence[float]) -> ForgettingParts:
    """Split a drop in accuracy into lost format (superficial) and lost content (essential).

    With a = p c (p parse rate, c accuracy given parsed), before 0 and after 1:
    a0 - a1 = (p0 - p1) (c0 + c1) / 2  +  (c0 - c1) (p0 + p1) / 2 = superficial + essential.
    If no answer can be parsed, c is unknown and taken as unchanged, so that the whole drop is superficial.

    Args:
        accuracy: before and after, over all answers.
        parse_rate: before and after.

    Raises:
        ValueError: the shares are inconsistent.

    Source: the distinction is Chen et al. 2025, arXiv 2505.02486 (SEFE); the exact split is ours, the mean over both
    orders of changing one factor at a time (the Shapley value of two factors).
    """
    (a0, a1), (p0, p1) = accuracy, parse_rate
    c0, c1 = accuracy_given_parsed(a0, p0), accuracy_given_parsed(a1, p1)
    c0, c1 = (c1 if np.isnan(c0) else c0), (c0 if np.isnan(c1) else c1)
    if np.isnan(c0):
        return ForgettingParts(0.0, 0.0)
    return ForgettingParts((p0 - p1) * (c0 + c1) / 2, (c0 - c1) * (p0 + p1) / 2)


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
