"""Spacing rules without a forgetting curve: SM-2, Leitner's boxes, and an expanding gap.

    replay_spacing = "contrib.spacings:SM2"        or ":Leitner", ":Expanding"

Sources: Wozniak 1990, "Optimization of learning", master's thesis, section 3.2 (SM-2); Leitner 1972, "So lernt man
lernen"; Bhattacharya et al. 2025, arXiv 2507.21109 ("TFC-SR"), and the notebook of github.com/pritalb/tfc-sr.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rllib_srl.replay.schedule.spacing import SpacingRule

Array = np.ndarray


class SM2(SpacingRule):
    """The rule of 1987: intervals of 1 day, 6 days, then the last interval times the item's easiness factor EF.

        I(1) = 1, I(2) = 6, I(n) = I(n-1) EF      n: successes in a row; a failure starts again at I(1), EF unchanged
        EF' = EF + 0.1 - (5-q) (0.08 + 0.02 (5-q)), at least 1.3; EF = 2.5 at first; q = grade + 1

    I(n) uses the EF from before the update. Differences from the source: intervals are not rounded up; items graded
    below q = 4 are not repeated at the end of a session; qualities 0 and 1 do not occur.

    Invariant: difficulty holds EF, at least 1.3; stability holds I(n).
    """

    def next_state(self, items_N: Array, grade_N: Array, elapsed_N: Array, streak_N: Array) -> tuple[Array, Array]:
        easiness_N = np.where(items_N["reps"] == 0, 2.5, items_N["difficulty"])
        grown_N = np.where(streak_N == 2, 6.0, items_N["stability"] * easiness_N)
        missed_N = 4 - grade_N  # 5 - q
        eased_N = np.maximum(1.3, easiness_N + 0.1 - missed_N * (0.08 + 0.02 * missed_N))
        return np.where(streak_N > 1, grown_N, 1.0), np.where(grade_N >= 2, eased_N, easiness_N)


class Leitner(SpacingRule):
    """Boxes of growing intervals: a success moves an item to the next box, a failure back to the first.

    New items are in the first box.
    """

    BOXES: ClassVar[tuple[float, ...]] = (1.0, 2.0, 4.0, 8.0, 16.0)  # days

    def next_state(self, items_N: Array, grade_N: Array, elapsed_N: Array, streak_N: Array) -> tuple[Array, Array]:
        boxes = np.array(self.BOXES)
        old_N = np.where(items_N["reps"] == 0, boxes[0], items_N["stability"])
        next_N = boxes[np.minimum(np.searchsorted(boxes, old_N, side="right"), len(boxes) - 1)]
        return np.where(grade_N >= 2, next_N, boxes[0]), np.zeros(len(items_N))


class Expanding(SpacingRule):
    """A gap that grows by `FACTOR` with each success and is reset to `FIRST` after a failure.

    Differences from the source:
    1. Gaps and intervals are not rounded.
    2. A failure resets the gap. The source's code waits one epoch and keeps the gap, and resets it with each new task.
    3. An item is one prompt; the source has one gap for the whole buffer.
    """

    FIRST: ClassVar[float] = 1.0  # days
    FACTOR: ClassVar[float] = 1.5  # of the gap after a success

    def next_state(self, items_N: Array, grade_N: Array, elapsed_N: Array, streak_N: Array) -> tuple[Array, Array]:
        old_N = np.where(items_N["reps"] == 0, self.FIRST, items_N["stability"])
        return np.where(grade_N >= 2, old_N * self.FACTOR, self.FIRST), np.zeros(len(items_N))
