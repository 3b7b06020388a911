"""A trial as arrays over its evaluations, and its accuracy matrix over stages.

    evaluation I     0     1     2     3     4          accuracy_SC[i] = last evaluation of stage i
    stage_I         -1     0     0     1     1          before_C       = last evaluation of stage -1
                  before         R[0]        R[1]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rllib_srl.studies.accuracy import NEVER


@dataclass(frozen=True)
class Curve:
    """A trial over its evaluations; counts are cumulative and cover training only.

    Invariant: every stage has an evaluation, so the accuracy matrix is complete.
    """

    accuracy_IC: np.ndarray
    stage_I: np.ndarray
    num_generated_tokens_I: np.ndarray
    num_trained_tokens_I: np.ndarray
    num_probe_tokens_I: np.ndarray
    seconds_I: np.ndarray
    peak_bytes: int
    learned_at_C: np.ndarray
    extras: dict[str, float]  # other measures of the last evaluation, averaged over the domains that have them

    @property
    def accuracy_SC(self) -> np.ndarray:
        """Return the accuracy matrix [S, C]: row i is the last evaluation of stage i."""
        accuracy_SC: np.ndarray = self.accuracy_IC[self.ends_S()]
        return accuracy_SC

    @property
    def before_C(self) -> np.ndarray:
        """Return the accuracies before any training [C]; NaN if they were not measured."""
        untrained = np.flatnonzero(self.stage_I < 0)
        return self.accuracy_IC[untrained[-1]] if len(untrained) else np.full(self.accuracy_IC.shape[1], np.nan)

    def ends_S(self) -> np.ndarray:
        """Return the index of the last evaluation of each stage."""
        return np.array([np.flatnonzero(self.stage_I == stage)[-1] for stage in range(self.stage_I[-1] + 1)])

    def average_I(self) -> np.ndarray:
        """Return the mean accuracy over the taught domains at each evaluation [I]."""
        return np.asarray(self.accuracy_IC[:, self.learned_at_C != NEVER].mean(axis=1))

    def remembered_from(self) -> dict[int, int]:
        """Return domain -> evaluation at the end of its training, for domains taught before the last stage."""
        ends_S = self.ends_S()
        old = [j for j, stage in enumerate(self.learned_at_C.tolist()) if NEVER < stage < len(ends_S) - 1]
        return {j: int(ends_S[self.learned_at_C[j]]) for j in old}
