"""SPO's prioritised prompts: draw in proportion to the deviation of a reward, plus a floor.

    replay_selection = "contrib.spo"; parameters in replay_selection_config = {"floor": 0.1}

The rest of SPO is in the core: `advantage="posterior", surprise_scale="centred", min_surprise=0`, `group_size=1`
(docs/losses.md). Differences from the source: the pass rate is v = (1 + s) / (2 + n), s and n the discounted sum and
number of the prompt's rewards; the source starts each prompt from eight samples of its first policy, and discounts the
counts by the KL since the last visit.

Source: Xu and Ding 2025, arXiv 2509.13232 (SPO), prioritised prompt sampling.
"""

from __future__ import annotations

import numpy as np

from rllib_srl.common.setting_model import Settings, setting
from rllib_srl.replay.selection.rules import Candidates, weighted


class SPO(Settings):
    """Draw in proportion to sqrt(v (1 - v)) + floor."""

    floor: float = setting(0.05, "added to sqrt(v(1 - v)), above 0", gt=0)

    def __call__(self, candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
        """Draw `num` of the candidates."""
        value_N = (1 + candidates.history_sum) / (2 + candidates.history_count)
        weight_N = np.sqrt(np.clip(value_N * (1 - value_N), 0, None)) + self.floor
        return weighted(np.log(weight_N), num, generator)


spo = SPO
