"""FSRS-6 spacing rule: a power-law forgetting curve over stability and difficulty.

The default parameters were fitted to human learners.

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

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rllib_srl.common.setting_tables import setting
from rllib_srl.replay.schedule.spacing.rule import MIN_STABILITY, SpacingRule, SpacingState, Visit

# fmt: off
DEFAULT_W = (0.212, 1.2931, 2.3065, 8.2956, 6.4133, 0.8334, 3.0194, 0.001, 1.8722, 0.1666, 0.796,
             1.4835, 0.0614, 0.2629, 1.6483, 0.6014, 1.8729, 0.5425, 0.0912, 0.0658, 0.1542)
LOWEST_W = (0.001, 0.001, 0.001, 0.001, 1.0, 0.001, 0.001, 0.001, 0.0, 0.0, 0.001,
            0.001, 0.001, 0.001, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.1)
HIGHEST_W = (100.0, 100.0, 100.0, 100.0, 10.0, 4.0, 4.0, 0.75, 4.5, 0.8, 3.5,
             5.0, 0.25, 0.9, 4.0, 1.0, 6.0, 2.0, 2.0, 0.8, 0.8)
# fmt: on
HARD, EASY = 2, 4


@dataclass(frozen=True, kw_only=True)
class FSRS(SpacingRule):
    """FSRS-6 with its 21 parameters `w`. Invariant: each is within the bounds of py-fsrs."""

    w: tuple[float, ...] = setting(DEFAULT_W, "the 21 weights")

    name: ClassVar[str] = "fsrs"

    def __post_init__(self) -> None:
        """Convert `w` from any sequence to a tuple, and check all parameters."""
        object.__setattr__(self, "w", tuple(float(x) for x in self.w))
        super().__post_init__()

    @property
    def _factor(self) -> float:
        factor: float = 0.9 ** (-1 / self.w[20]) - 1
        return factor

    def _faults(self) -> list[str]:
        if len(self.w) != len(DEFAULT_W):
            return [*super()._faults(), f"w has {len(self.w)} entries; expected {len(DEFAULT_W)}"]
        bounds = enumerate(zip(self.w, LOWEST_W, HIGHEST_W))
        own = [f"w{i} = {x}; expected {low:g} to {high:g}" for i, (x, low, high) in bounds if not low <= x <= high]
        return super()._faults() + own

    def _recall(self, stability_N: np.ndarray, elapsed_N: np.ndarray) -> np.ndarray:
        recall_N: np.ndarray = (1 + self._factor * elapsed_N / stability_N) ** -self.w[20]
        return recall_N

    def _days(self, stability_N: np.ndarray) -> np.ndarray:
        days_N: np.ndarray = stability_N / self._factor * (self.desired_retention ** (-1 / self.w[20]) - 1)
        return days_N

    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        is_new_N, grade_N = visit.is_new_N, visit.grade_N
        s_N = np.where(is_new_N, 1.0, state.stability_N)  # avoids division by the zeros of new items
        d_N = np.where(is_new_N, 1.0, state.difficulty_N)
        forgotten_N = 1 - self._recall(s_N, visit.elapsed_N)
        later_N = np.where(
            visit.is_success_N,
            self._after_success(s_N, d_N, forgotten_N, grade_N),
            self._after_failure(s_N, d_N, forgotten_N),
        )
        old_N = np.where(visit.elapsed_N < 1, self._within_a_day(s_N, visit), later_N)
        stability_N = np.where(is_new_N, np.array(self.w)[grade_N - 1], old_N)
        first_N = np.clip(self._first_difficulty(grade_N), 1.0, 10.0)
        return np.maximum(stability_N, MIN_STABILITY), np.where(is_new_N, first_N, self._harder(d_N, grade_N))

    def _after_success(
        self, s_N: np.ndarray, d_N: np.ndarray, forgotten_N: np.ndarray, grade_N: np.ndarray
    ) -> np.ndarray:
        w = self.w
        bonus_N = np.where(grade_N == HARD, w[15], np.where(grade_N == EASY, w[16], 1.0))
        gain_N = np.exp(w[8]) * (11 - d_N) * s_N ** -w[9] * np.expm1(forgotten_N * w[10]) * bonus_N
        after_N: np.ndarray = s_N * (1 + gain_N)
        return after_N

    def _after_failure(self, s_N: np.ndarray, d_N: np.ndarray, forgotten_N: np.ndarray) -> np.ndarray:
        w = self.w
        long_N = w[11] * d_N ** -w[12] * ((s_N + 1) ** w[13] - 1) * np.exp(forgotten_N * w[14])
        after_N: np.ndarray = np.minimum(long_N, s_N / np.exp(w[17] * w[18]))
        return after_N

    def _within_a_day(self, s_N: np.ndarray, visit: Visit) -> np.ndarray:
        w = self.w
        factor_N = np.exp(w[17] * (visit.grade_N - 3 + w[18])) * s_N ** -w[19]
        after_N: np.ndarray = s_N * np.where(visit.is_success_N, np.maximum(factor_N, 1.0), factor_N)
        return after_N

    def _first_difficulty(self, grade_N: np.ndarray | int) -> Any:
        return self.w[4] - np.exp(self.w[5] * (np.asarray(grade_N) - 1)) + 1

    def _harder(self, d_N: np.ndarray, grade_N: np.ndarray) -> np.ndarray:
        moved_N = d_N - self.w[6] * (grade_N - 3) * (10 - d_N) / 9
        harder_N: np.ndarray = np.clip(self.w[7] * self._first_difficulty(EASY) + (1 - self.w[7]) * moved_N, 1.0, 10.0)
        return harder_N
