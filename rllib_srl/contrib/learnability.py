"""Learnability: draw in proportion to p (1 - p), p the pass rate of the last visit.

    replay_selection = "contrib.learnability"

Source: Foster, Sims, Forkel, Fellows and Foerster 2025, arXiv 2502.12272 (sampling for learnability).
"""

from __future__ import annotations

import numpy as np

from rllib_srl.replay.selection.rules import Candidates, safe_log, weighted


def learnability(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Draw `num` of the candidates; those that were always or never solved only fill a short batch."""
    return weighted(safe_log(candidates.pass_rate * (1 - candidates.pass_rate)), num, generator)
