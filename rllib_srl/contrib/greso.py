"""GRESO: take the longest since the last visit; a prompt of zero variance is skipped for a random number of passes.

    replay_selection = "contrib.greso"; parameters in replay_selection_config = {"least": 0.05}

Differences from the source: it skips while it walks through an epoch and moves on when its batch is full. Here each
prompt draws once, at its visit, how many passes it will skip, which has the same distribution; a pass lasts as long as
a walk over the prompts that are not skipped. The source adapts the probabilities to a target share of
zero-variance prompts, apart for solved and hopeless ones; here they are fixed. Candidates are prompts in the memory.

Sources: Zheng et al. 2025, arXiv 2506.02177, github.com/Infini-AI-Lab/GRESO; Steele, Lea and Flood 2014, OOPSLA
(SplitMix64, the lottery numbers).
"""

from __future__ import annotations

import numpy as np

from rllib_srl.common.setting_model import Settings, setting
from rllib_srl.replay.selection.rules import Candidates, first

BASE = 0.5  # share of the epochs in which a prompt is played after one zero-variance group


class GRESO(Settings):
    """The most overdue in passes first: elapsed / pass length - 1 - passes to skip.

    A pass plays each prompt with probability q = max(.5 ** c, least), c its zero-variance groups in a row, so it lasts
    sum q / num iterations, and P(at least k passes are skipped) = (1 - q) ** k.
    """

    least: float = setting(0.01, "least probability that a pass plays a prompt, in (0, 1]", gt=0, le=1)

    def __call__(self, candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
        """Take `num` of the candidates."""
        chance_N = np.maximum(BASE**candidates.num_zero_variance, self.least)
        length = max(1.0, chance_N.sum() / max(1, num))
        # One lottery number for each visit: it stays the same until the next one.
        lot_N = lottery(candidates.seq.astype(np.uint64) << np.uint64(24) | candidates.visits.astype(np.uint64))
        late_N = candidates.elapsed / length - 1 - skipped_passes(lot_N, chance_N)
        return first(num, generator, -late_N, candidates.visits)


greso = GRESO


def skipped_passes(lot_N: np.ndarray, chance_N: np.ndarray) -> np.ndarray:
    """Return the k with (1 - q) ** (k + 1) <= lot < (1 - q) ** k, geometric for a uniform lot; 0 where q is 1.

    Args:
        lot_N: in (0, 1).
        chance_N: q, probability that a pass plays the prompt, in (0, 1].
    """
    skip_N = np.where(chance_N < 1, 1 - chance_N, 0.5)
    return np.where(chance_N < 1, np.ceil(np.log(lot_N) / np.log(skip_N)) - 1, 0.0)


def lottery(number_N: np.ndarray) -> np.ndarray:
    """Return a number in (0, 1) for each integer; equal integers give equal numbers in every process."""
    z_N = (number_N + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z_N = (z_N ^ (z_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_N = (z_N ^ (z_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    lot_N: np.ndarray = ((z_N ^ (z_N >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53 + 2.0**-54
    return lot_N
