"""Compare predicted with observed rewards of played groups, by decile of the prediction.

    prediction before the visit, mean reward of the group ──note──> faded sums by decile ──> pairs, expected error
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

NUM_BINS = 10
FADE = 0.995  # an iteration: the sums are about those of the last 200


class RewardCalibration:
    """Faded sums of predictions and results by decile. Invariant: `get_state` holds all of it, as JSON types."""

    def __init__(self) -> None:
        """Start without predictions."""
        self._sums_D3 = np.zeros((NUM_BINS, 3))  # by decile: groups, predictions, mean rewards

    def note(self, predicted_P: Sequence[float], observed_P: Sequence[float]) -> None:
        """Add the groups of one iteration; predictions outside [0, 1] belong to the nearest decile."""
        self._sums_D3 *= FADE
        bins_P = np.clip((np.asarray(predicted_P, np.float64) * NUM_BINS).astype(int), 0, NUM_BINS - 1)
        columns = np.column_stack([np.ones(len(bins_P)), predicted_P, observed_P])
        np.add.at(self._sums_D3, bins_P, columns)

    def metrics(self) -> dict[str, float]:
        """Return each decile's mean prediction and mean result (nan: no group), and their expected difference.

        The expected calibration error is the mean over groups of |mean prediction - mean result| of their decile.
        """
        num_D, predicted_D, observed_D = self._sums_D3.T
        values = {"reward_calibration_error": float("nan")}
        if num_D.sum() > 0:
            values["reward_calibration_error"] = float(np.abs(predicted_D - observed_D).sum() / num_D.sum())
        for at in range(NUM_BINS):
            is_known = num_D[at] > 0
            values[f"reward_predicted_{at}"] = float(predicted_D[at] / num_D[at]) if is_known else float("nan")
            values[f"reward_observed_{at}"] = float(observed_D[at] / num_D[at]) if is_known else float("nan")
        return values

    def get_state(self) -> dict[str, Any]:
        """Return the sums."""
        return {"sums": self._sums_D3.tolist()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._sums_D3 = np.array(state["sums"])
