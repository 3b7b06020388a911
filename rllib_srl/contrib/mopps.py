"""MoPPS: sample each prompt's pass rate from its history, and take the nearest to a target.

    replay_selection = "contrib.mopps"; parameters in replay_selection_config = {"target": 0.4}

Differences from the source: the rate is drawn from Beta(1 + s, 1 + n - s), s and n the discounted sum and number of the
prompt's rewards; the counts decay by `replay_history_half_life`, in the source by .5 a visit. Candidates are the
prompts in the memory.

Source: Qu et al. 2025, arXiv 2507.04632 (MoPPS).
"""

from __future__ import annotations

import numpy as np

from rllib_srl.common.setting_model import Settings, setting
from rllib_srl.replay.selection.rules import Candidates, first


class MoPPS(Settings):
    """Thompson sampling of pass rates."""

    target: float = setting(0.5, "pass rate that is preferred, in [0, 1]", ge=0, le=1)

    def __call__(self, candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
        """Take `num` of the candidates."""
        failed_N = np.maximum(candidates.history_count - candidates.history_sum, 0.0)
        rate_N = generator.beta(1 + np.maximum(candidates.history_sum, 0.0), 1 + failed_N)
        return first(num, generator, np.abs(rate_N - self.target))


mopps = MoPPS
