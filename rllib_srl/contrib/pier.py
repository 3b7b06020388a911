"""PIER: failures first, old certain successes last.

    replay_reuse_selection = "contrib.pier"; parameters in replay_reuse_selection_config = {"alpha": 1.0}

Draws with probability p ** alpha, p = 1 - r (b ** (1 - c) - 1) / (b - 1) in [0, 2], where
c = weight u / max u + (1 - weight) (1 - k / max k), u the uncertainty and k the order of insertion from the oldest.
Differences from the source: the policy's mean -log-prob is the uncertainty, 2 pass_rate - 1 the novice's reward r
(0 before the first visit), and the loss has no importance weights.

Source: Luijkx et al. 2025, arXiv 2508.05310 (PIER).
"""

from __future__ import annotations

import numpy as np

from rllib_srl.common.setting_model import Settings, setting
from rllib_srl.replay.selection.rules import Candidates, weighted


class PIER(Settings):
    """Prioritised replay of demonstrations."""

    weight: float = setting(0.5, "of uncertainty against age, in [0, 1]", ge=0, le=1)
    base: float = setting(10.0, "base b of the priority, above 1", gt=1)
    alpha: float = setting(1.5, "exponent of the priority", ge=0)

    def __call__(self, candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
        """Draw `num` of the candidates."""
        return weighted(self.log_weight(candidates), num, generator)

    def log_weight(self, candidates: Candidates) -> np.ndarray:
        """Return alpha log p of each candidate."""
        if not len(candidates):
            return np.empty(0)
        order_N = candidates.seq - candidates.seq.min()
        uncertainty_N = candidates.nll / max(candidates.nll.max(), 1e-12)
        age_N = 1 - order_N / max(order_N.max(), 1)
        c_N = self.weight * uncertainty_N + (1 - self.weight) * age_N
        reward_N = np.where(candidates.visits > 0, 2 * candidates.pass_rate - 1, 0.0)
        priority_N = 1 - reward_N * (self.base ** (1 - c_N) - 1) / (self.base - 1)
        with np.errstate(divide="ignore"):  # a priority of 0 is drawn last
            log_weight_N: np.ndarray = self.alpha * np.log(np.maximum(priority_N, 0.0))
        return log_weight_N


pier = PIER
