"""SM-2 spacing rule: intervals of 1 day, 6 days, then the last interval times the item's easiness factor EF.

    I(1) = 1, I(2) = 6, I(n) = I(n-1) EF      n: successes in a row; a failure starts again at I(1), EF unchanged
    EF' = EF + 0.1 - (5-q) (0.08 + 0.02 (5-q)), at least 1.3; EF = 2.5 at first; q = grade + 1, so Again is 2, Easy 5

I(n) uses the EF from before the update. Differences from the source:
1. Intervals are not rounded up; `whole_days=True` does so.
2. Items graded below q = 4 are not repeated at the end of a session: a run has no sessions.
3. Qualities 0 and 1 do not occur; they would be scheduled like 2.
4. `desired_retention` other than 0.9 stretches the intervals (rllib_srl/replay/schedule/spacing/simple.py).

Source: Wozniak 1990, "Optimization of learning", master's thesis, section 3.2 (algorithm SM-2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rllib_srl.common.setting_tables import setting
from rllib_srl.replay.schedule.spacing.rule import Visit
from rllib_srl.replay.schedule.spacing.simple import ExponentialRule
from rllib_srl.replay.schedule.spacing.state import SpacingState

FIRST, SECOND = 1.0, 6.0  # days
FIRST_EASINESS, LEAST_EASINESS = 2.5, 1.3


@dataclass(frozen=True, kw_only=True)
class SM2(ExponentialRule):
    """The original rule of 1987. Invariant: difficulty holds EF, at least 1.3; stability holds I(n)."""

    whole_days: bool = setting(False, "round intervals to whole days")

    name: ClassVar[str] = "sm2"

    def _next(self, state: SpacingState, visit: Visit, streak_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        easiness_N = np.where(visit.is_new_N, FIRST_EASINESS, state.difficulty_N)
        grown_N = state.stability_N * easiness_N
        if self.whole_days:
            grown_N = np.ceil(grown_N - 1e-9)  # absorbs rounding errors: 10 * 1.4 must give 14
        success_N = np.where(streak_N == 1, FIRST, np.where(streak_N == 2, SECOND, grown_N))
        missed_N = 4 - visit.grade_N  # 5 - q
        eased_N = easiness_N + 0.1 - missed_N * (0.08 + 0.02 * missed_N)
        return (
            np.where(visit.is_success_N, success_N, FIRST),
            np.where(visit.is_success_N, np.maximum(eased_N, LEAST_EASINESS), easiness_N),
        )
