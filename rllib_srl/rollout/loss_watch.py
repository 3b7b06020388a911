"""End a run whose environments lose every episode: nothing would be learned, however long it went on."""

from __future__ import annotations

from collections.abc import Sequence

from rllib_srl.rollout.batches import RunnerBatch

MOST_LOST_ITERATIONS = 5  # in a row


class EpisodesLost(ValueError):
    """Every episode of several iterations was lost."""


class LossWatch:
    """Counts iterations in a row of which no group is left. Invariant: `num_lost` < `MOST_LOST_ITERATIONS`."""

    def __init__(self) -> None:
        """Start with none."""
        self.num_lost = 0

    def check(self, batches: Sequence[RunnerBatch]) -> None:
        """Count an iteration by what was played in it.

        Raises:
            EpisodesLost: every episode of this and the iterations before was lost; the message has the last reason.
        """
        errors = [line for batch in batches for line in batch.errors]
        if not errors or any(batch.groups for batch in batches):
            self.num_lost = 0
            return
        self.num_lost += 1
        if self.num_lost >= MOST_LOST_ITERATIONS:
            raise EpisodesLost(
                f"every episode of the last {self.num_lost} iterations was lost; the last one: {errors[-1]}"
            )
