"""The log of all reviews: what was predicted, what was observed, under which policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.replay.calibration import ReviewLog
from rllib_srl.replay.journal import REVIEW
from rllib_srl.replay.ledger import Change
from rllib_srl.replay.recall import Graded

RECENT = 4096  # reviews that gauges look at


@dataclass
class Reviews:
    """The newest reviews, for gauges; the journal has all of them.

    Invariant: `rows` are the last `RECENT` reviews committed, oldest first.
    """

    iterations_per_day: float
    temperature: float
    rows: np.ndarray

    def note(
        self, change: Change, item: np.void, graded: Graded, now: int, num_success: int, n: int, tokens: int = 0
    ) -> None:
        """Add one review to a transaction.

        Args:
            change: of the transaction.
            item: the row after the review.
            graded: what grading found.
            now: the training iteration.
            num_success: episodes that recalled.
            n: valid episodes.
            tokens: that are trained on; 0 where the visit was a test only.
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
        """Take the reviews of a transaction that has been committed."""
        if change.reviews:
            self.rows = np.concatenate([self.rows, np.array(change.reviews, REVIEW)])[-RECENT:]

    def log(self) -> ReviewLog:
        """Return the newest reviews as a log for calibration."""
        return as_log(self.rows, self.iterations_per_day)


def as_log(rows: np.ndarray, iterations_per_day: float) -> ReviewLog:
    """Return rows of the journal as a log, iterations turned into the spacing rule's days."""
    columns: dict[str, Any] = {name: rows[name] for name in rows.dtype.names or () if name != "elapsed"}
    return ReviewLog(**columns, elapsed_days=rows["elapsed"] / iterations_per_day)
