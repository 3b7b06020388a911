"""What can be read off the answers themselves: format or content lost, how unlike they are, what answering again adds.

    accuracy = parse rate x accuracy given parsed            an answer that cannot be read counts as wrong

pass@k and pass^k are in `rllib_srl.statistics`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np


class ForgettingParts(NamedTuple):
    """Two parts of a drop in accuracy, each in [-1, 1]; they sum to it exactly."""

    superficial: float  # the format was lost: answers can no longer be read
    essential: float  # the content was lost: answers that can be read are wrong


class Corrections(NamedTuple):
    """Chains of K self-iterations, by what became of the first answer."""

    corrected: int  # wrong at first, right at last
    spoiled: int  # right at first, wrong at last

    @property
    def net(self) -> int:
        """Return corrected - spoiled."""
        return self.corrected - self.spoiled


def accuracy_given_parsed(accuracy: float, parse_rate: float) -> float:
    """Return accuracy / parse rate, the accuracy among answers that can be read; NaN where none can.

    Args:
        accuracy: of all answers, in [0, parse_rate].
        parse_rate: share of answers that can be read, in [0, 1].

    Raises:
        ValueError: more answers are right than can be read, or a share is out of range.

    Source: the definition of a conditional share.
    """
    if not 0 <= accuracy <= parse_rate + 1e-9 <= 1 + 2e-9:
        raise ValueError(f"accuracy = {accuracy}, parse_rate = {parse_rate}; expected 0 <= accuracy <= parse_rate <= 1")
    return min(1.0, accuracy / parse_rate) if parse_rate > 0 else float("nan")


def forgetting_parts(accuracy: Sequence[float], parse_rate: Sequence[float]) -> ForgettingParts:
    """Split a drop in accuracy into lost format and lost content.

    With a = p c (p parse rate, c accuracy given parsed), before 0 and after 1:
    a0 - a1 = (p0 - p1) (c0 + c1) / 2  +  (c0 - c1) (p0 + p1) / 2 = superficial + essential.
    Where no answer can be read c is unknown; it is taken as unchanged, so that the whole drop is superficial.

    Args:
        accuracy: before and after, of all answers.
        parse_rate: before and after.

    Raises:
        ValueError: shares that do not fit together.

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
    """Return the chance that two different episodes of a prompt gave different answers, in [0, 1].

    D = 1 - sum_a n_a (n_a - 1) / (n (n - 1)), unbiased in the number of episodes n; NaN for fewer than two.

    Args:
        answers: of the episodes of one prompt, in the form in which they are compared.

    Source: Simpson 1949, Nature 163, "Measurement of diversity".
    """
    n = len(answers)
    same = sum(count * (count - 1) for count in Counter(answers).values())
    return 1.0 - same / (n * (n - 1)) if n > 1 else float("nan")


def iteration_gain(reward_AK: np.ndarray) -> np.ndarray:
    """Return the mean gain over the first answer after each of K self-iterations: element k is mean(r_k - r_0).

    Args:
        reward_AK: rewards in [0, 1] of chains, the first answer in column 0; K + 1 columns. Element 0 is 0.

    Raises:
        ValueError: there is no chain, or no first answer.

    Source: Jiang, Lupu and Bachrach 2025, arXiv 2509.04575v1, section 5 (gain after K steps).
    """
    _check_chains(reward_AK)
    return np.asarray((reward_AK - reward_AK[:, :1]).mean(axis=0))


def corrections(is_right_AK: np.ndarray) -> Corrections:
    """Count chains of K self-iterations that turned a wrong first answer right, and the reverse.

    The net number telescopes: summed over every step of the chains it is the same.

    Args:
        is_right_AK: booleans, the first answer in column 0; K + 1 columns.

    Raises:
        ValueError: there is no chain, or no first answer.

    Source: net corrections of Jiang, Lupu and Bachrach 2025, arXiv 2509.04575v1, section 5.
    """
    _check_chains(is_right_AK)
    first_A, last_A = is_right_AK[:, 0].astype(bool), is_right_AK[:, -1].astype(bool)
    return Corrections(int((~first_A & last_A).sum()), int((first_A & ~last_A).sum()))


def _check_chains(values_AK: np.ndarray) -> None:
    if values_AK.ndim != 2 or not values_AK.size:
        raise ValueError(f"chains have shape {values_AK.shape}; expected [A, K + 1], neither of them 0")
