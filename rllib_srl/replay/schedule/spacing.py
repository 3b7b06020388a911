"""Spacing rules: compute when an item is due again.

    rule = make_spacing("fsrs", desired_retention=0.9)
    items --review(grade, elapsed)--> their new columns     pure, vectorised: items are independent
    items --retrievability(elapsed)--> recall in [0, 1]     non-increasing in time; desired_retention at the interval

Rules read and give columns of the item table, all 0 for an item never reviewed:
    stability    days after which recall has fallen to .9 (fixed: the interval)
    difficulty   the rule's second number, such as the difficulty of fsrs, 1 to 10; else 0
    interval     days from the last review to the next: the *base* interval, before diversity
    reps         reviews          lapses   failures that followed a success
    streak       successes in a row; below 0: failures in a row

Time is a float number of days; the caller converts iterations to days. A grade of 1 (Again) is a failure, 2 (Hard),
3 (Good) and 4 (Easy) are successes. A success never shortens the interval.

A rule is a subclass of `SpacingRule`, whose fields are its parameters, or any callable that takes keyword arguments and
returns an object with its methods.

A rule that models no forgetting has the simplest curve that agrees with its intervals, the exponential:
R = desired_retention^(elapsed / interval). Its own interval is the stability S, the days until recall is 0.9; another
retention stretches it, interval = S ln(desired_retention) / ln(0.9). More rules: rllib_srl/contrib/spacings.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from rllib_srl.common.rules import Rules
from rllib_srl.common.setting_model import Settings, setting

MIN_STABILITY, MAX_STABILITY = 1e-3, 1e12  # days; the upper bound keeps products finite
MAXIMUM_INTERVAL = 36_500.0  # days
HARD, EASY = 2, 4  # grades
Array = np.ndarray


class SpacingRule(Settings, ABC):
    """A rule that sets intervals. Invariant: immutable; every parameter is within its range."""

    desired_retention: float = setting(0.9, "recall at which an item becomes due", gt=0, lt=1)

    def review(self, items_N: Array, grade_N: Any, elapsed_N: Any) -> dict[str, Array]:
        """Return the new columns of items after one visit of each.

        Grades are 1 to 4; the days since the last review are at least 0, and ignored for new items.
        """
        grade_N, elapsed_N, before_N = np.asarray(grade_N), np.asarray(elapsed_N, np.float64), items_N["streak"]
        is_success_N = grade_N >= 2
        streak_N = np.where(is_success_N, np.maximum(before_N, 0) + 1, np.minimum(before_N, 0) - 1)
        elapsed_N = np.where(items_N["reps"] == 0, 0.0, elapsed_N)
        stability_N, difficulty_N = self.next_state(items_N, grade_N, elapsed_N, streak_N)
        stability_N = np.minimum(stability_N, MAX_STABILITY)
        return {
            "stability": stability_N,
            "difficulty": difficulty_N,
            "interval": np.minimum(self.days_until_due(stability_N), MAXIMUM_INTERVAL),
            "reps": items_N["reps"] + 1,
            "lapses": items_N["lapses"] + (~is_success_N & (before_N > 0)),
            "streak": streak_N,
        }

    def retrievability(self, items_N: Array, elapsed_N: Array) -> Array:
        """Return the probability of recall after `elapsed_N` days, in [0, 1]; 0 for items never reviewed."""
        is_new_N = items_N["reps"] == 0
        stability_N = np.where(is_new_N, 1.0, items_N["stability"])
        recall_N = self.recall_after(stability_N, np.where(is_new_N, 0.0, np.maximum(elapsed_N, 0.0)))
        return np.where(is_new_N, 0.0, recall_N)

    @abstractmethod
    def next_state(self, items_N: Array, grade_N: Array, elapsed_N: Array, streak_N: Array) -> tuple[Array, Array]:
        """Return stability and difficulty after a visit; days are 0 for new items, `streak_N` is after the visit."""

    def recall_after(self, stability_N: np.ndarray, elapsed_N: np.ndarray) -> np.ndarray:
        """Return the probability of recall; stability is positive."""
        recall_N: np.ndarray = self.desired_retention ** (elapsed_N / self.days_until_due(stability_N))
        return recall_N

    def days_until_due(self, stability_N: np.ndarray) -> np.ndarray:
        """Return the days after which recall is `desired_retention`."""
        return stability_N * (math.log(self.desired_retention) / math.log(0.9))


# fmt: off
W = (0.212, 1.2931, 2.3065, 8.2956, 6.4133, 0.8334, 3.0194, 0.001, 1.8722, 0.1666, 0.796,
             1.4835, 0.0614, 0.2629, 1.6483, 0.6014, 1.8729, 0.5425, 0.0912, 0.0658, 0.1542)
# fmt: on


class FSRS(SpacingRule):
    """FSRS-6: a power-law forgetting curve over stability S and difficulty D, fitted to human learners.

        R(t, S) = (1 + F t / S)^-w20,  F = 0.9^(-1/w20) - 1, so that R(S, S) = 0.9
        I(S, r) = S / F (r^(-1/w20) - 1)
        first review   S = w[G-1]                         D = D0(G) = w4 - e^(w5 (G-1)) + 1, in [1, 10]
        success        S (1 + e^w8 (11-D) S^-w9 (e^(w10 (1-R)) - 1) (w15 if Hard) (w16 if Easy))
        failure        min(w11 D^-w12 ((S+1)^w13 - 1) e^(w14 (1-R)), S / e^(w17 w18))
        within a day   S f, f = e^(w17 (G-3+w18)) S^-w19, at least 1 on success
        difficulty     w7 D0(4) + (1-w7) (D - w6 (G-3) (10-D) / 9), in [1, 10]; stability is updated with the old D

    Differences from py-fsrs 6.3.2 without learning steps and fuzz:
    1. Time is a float: elapsed days are not truncated, intervals are not rounded and may be shorter than a day. After
       whole days stability and difficulty are the same.
    2. "Within a day" is less than 1.0 days: R changes smoothly up to there and S jumps.
    3. Stability is at most 1e12 days; py-fsrs has no bound.

    Source: Ye et al., "FSRS-6", github.com/open-spaced-repetition/py-fsrs, fsrs/scheduler.py, version 6.3.2;
    Ye, Su and Cao 2022, KDD, "A stochastic shortest path algorithm for optimizing spaced repetition scheduling".
    """

    def recall_after(self, stability_N: np.ndarray, elapsed_N: np.ndarray) -> np.ndarray:
        recall_N: np.ndarray = (1 + self._decay_of(0.9) * elapsed_N / stability_N) ** -W[20]
        return recall_N

    def days_until_due(self, stability_N: np.ndarray) -> np.ndarray:
        return stability_N / self._decay_of(0.9) * self._decay_of(self.desired_retention)

    def _decay_of(self, recall: float) -> float:
        return float(recall ** (-1 / W[20]) - 1)

    def next_state(self, items_N: Array, grade_N: Array, elapsed_N: Array, streak_N: Array) -> tuple[Array, Array]:
        w, is_new_N, is_success_N = W, items_N["reps"] == 0, grade_N >= 2
        s_N = np.where(is_new_N, 1.0, items_N["stability"])  # avoids division by the zeros of new items
        d_N = np.where(is_new_N, 1.0, items_N["difficulty"])
        forgotten_N = 1 - self.recall_after(s_N, elapsed_N)

        bonus_N = np.where(grade_N == HARD, w[15], np.where(grade_N == EASY, w[16], 1.0))
        gain_N = np.exp(w[8]) * (11 - d_N) * s_N ** -w[9] * np.expm1(forgotten_N * w[10]) * bonus_N
        failed_N = w[11] * d_N ** -w[12] * ((s_N + 1) ** w[13] - 1) * np.exp(forgotten_N * w[14])
        failed_N = np.minimum(failed_N, s_N / np.exp(w[17] * w[18]))
        later_N = np.where(is_success_N, s_N * (1 + gain_N), failed_N)

        factor_N = np.exp(w[17] * (grade_N - 3 + w[18])) * s_N ** -w[19]
        within_a_day_N = s_N * np.where(is_success_N, np.maximum(factor_N, 1.0), factor_N)
        old_N = np.where(elapsed_N < 1, within_a_day_N, later_N)
        stability_N = np.where(is_new_N, np.array(w)[grade_N - 1], old_N)

        moved_N = d_N - w[6] * (grade_N - 3) * (10 - d_N) / 9
        harder_N = w[7] * self._first_difficulty(EASY) + (1 - w[7]) * moved_N
        difficulty_N = np.clip(np.where(is_new_N, self._first_difficulty(grade_N), harder_N), 1.0, 10.0)
        return np.maximum(stability_N, MIN_STABILITY), difficulty_N

    def _first_difficulty(self, grade_N: np.ndarray | int) -> Any:
        return W[4] - np.exp(W[5] * (np.asarray(grade_N) - 1)) + 1


class Fixed(SpacingRule):
    """The same interval after every review; `desired_retention` sets only the predicted recall after it."""

    interval: float = setting(4.0, "days", ge=1e-3, le=1e6)

    def days_until_due(self, stability_N: np.ndarray) -> np.ndarray:
        return stability_N

    def next_state(self, items_N: Array, grade_N: Array, elapsed_N: Array, streak_N: Array) -> tuple[Array, Array]:
        return np.full(len(items_N), self.interval), np.zeros(len(items_N))


class NoSpacing(SpacingRule):
    """Items are always due; recall is `desired_retention` at any time."""

    def recall_after(self, stability_N: np.ndarray, elapsed_N: np.ndarray) -> np.ndarray:
        return np.full(len(stability_N), self.desired_retention)

    def days_until_due(self, stability_N: np.ndarray) -> np.ndarray:
        return np.zeros(len(stability_N))

    def next_state(self, items_N: Array, grade_N: Array, elapsed_N: Array, streak_N: Array) -> tuple[Array, Array]:
        return np.ones(len(items_N)), np.zeros(len(items_N))


SPACINGS: Rules[Callable[..., SpacingRule]] = Rules("spacing", {"fsrs": FSRS, "fixed": Fixed, "none": NoSpacing})


def make_spacing(name: str, desired_retention: float = 0.9, **parameters: Any) -> SpacingRule:
    """Build a spacing rule by its name or import path; raise a ValueError if its parameters are wrong."""
    rule = SPACINGS.named(name)
    all_parameters = {"desired_retention": desired_retention, **parameters}
    made: SpacingRule = SPACINGS.make(name, all_parameters) if isinstance(rule, type) else rule(**all_parameters)
    return made
