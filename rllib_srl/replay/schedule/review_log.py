"""Log of reviews: predicted and observed recall, with the policy version that played."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.replay.journal.journal import REVIEW
from rllib_srl.replay.journal.transaction import Change
from rllib_srl.replay.schedule.calibration import ReviewLog
from rllib_srl.replay.schedule.recall import Graded

RECENT = 4096  # reviews that gauges are computed from


@dataclass
class Reviews:
    """The newest reviews, for gauges; the journal stores all reviews.

    Invariant: `rows` are the last `RECENT` committed reviews, oldest first.
    """

    iterations_per_day: float
    temperature: float
    rows: np.ndarray

    def note(
        self, change: Change, item: np.void, graded: Graded, now: int, num_success: int, n: int, tokens: int = 0
    ) -> None:
        """Add one review to a transaction.

        Args:
            change: the open transaction.
            item: the item's row after the review.
            graded: the result of grading.
            now: the training iteration.
            num_success: successful episodes.
            n: valid episodes.
            tokens: loss tokens of a visit whose rewards differ; 0 for one that counts as a test only.
        """
        change.reviews.append(
            (
                int(item["key"]),
                now,
                float(graded.elapsed),
                graded.grade,
                int(num_success),
                n,
                graded.predicted,
                tokens > 0,
                int(item["version"]),
                self.temperature,
                tokens,
            )
        )

    def commit(self, change: Change) -> None:
        """Append the reviews of a committed transaction."""
        if change.reviews:
            self.rows = np.concatenate([self.rows, np.array(change.reviews, REVIEW)])[-RECENT:]

    def log(self) -> ReviewLog:
        """Return the newest reviews as a log for calibration."""
        return as_log(self.rows, self.iterations_per_day)


def as_log(rows: np.ndarray, iterations_per_day: float) -> ReviewLog:
    """Return journal rows as a log, with elapsed iterations converted to the spacing rule's days."""
    columns: dict[str, Any] = {name: rows[name] for name in rows.dtype.names or () if name != "elapsed"}
    return ReviewLog(**columns, elapsed_days=rows["elapsed"] / iterations_per_day)
