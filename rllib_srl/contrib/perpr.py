"""PerpR: draw in proportion to the perplexity of the stored answers.

    replay_reuse_selection = "contrib.perpr"        or {"name": "contrib.perpr", "temperature": 0.5}

Our reading of a paper whose formula could not be read; perplexity is also high for garbled text.

Source: Jeong et al. 2024, arXiv 2403.15049 (perplexity replay).
"""

from __future__ import annotations

import numpy as np

from rllib_srl.common.setting_model import Settings, setting
from rllib_srl.replay.selection.rules import Candidates, tempered


class PerpR(Settings):
    """Draw in proportion to exp(mean -log-prob) ** (1 / temperature)."""

    temperature: float = setting(1.0, "of the draws; 0 takes the highest perplexity first", ge=0)

    def __call__(self, candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
        """Draw `num` of the candidates."""
        return tempered(candidates.nll, num, generator, self.temperature)


perpr = PerpR
