"""Published rules that choose among all prompts of a pool, played or not, under their published names.

    greso    the longest since its last visit, silent prompts skipped for a random number of passes
    mopps    Thompson sampling of the pass rate, the nearest to the target
    spo      in proportion to the deviation of a reward, plus a floor

They read the history of each prompt that the memory keeps: silent groups in a row c, and the discounted sum s and
number n of its rewards.

Differences from the sources:
1. greso skips while it walks through an epoch and moves on when its batch is full. Here each prompt draws once, at its
   visit, how many passes it will skip, which has the same distribution; its pass lasts as long as a walk over the
   prompts that are not skipped. The source adapts the probabilities to a target share of silent prompts, apart for
   solved and hopeless ones; here they are fixed.
2. mopps reads the history as Beta(1 + s, 1 + n - s). Its decay of the counts, .5 a visit in the source, is that of the
   history, a setting of the memory.
3. spo starts its tracker from the domain's mean m with the weight w0 of the posterior baseline, which does not fade;
   with other baselines, from Beta(1, 1). The source starts each prompt from eight samples of its first policy and keeps
   the factor by which a visit discounts the counts within .875 and .96.
"""

from __future__ import annotations

import numpy as np

from rllib_srl.replay.selection.candidates import Candidates, SelectionSettings, first
from rllib_srl.replay.selection.literature import Proportional
from rllib_srl.replay.selection.lottery import lottery
from rllib_srl.replay.selection.signal import highest

GRESO_BASE = 0.5  # share of the epochs in which a prompt is played after one silent group


def greso(candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings) -> np.ndarray:
    """Take what is most overdue in passes: elapsed / pass length - 1 - passes to skip.

    A pass plays each prompt with probability q = max(.5 ** c, greso_least), so it lasts sum q / num iterations, and
    P(at least k passes are skipped) = (1 - q) ** k.

    Source: Zheng et al. 2025, arXiv 2506.02177 (GRESO); github.com/Infini-AI-Lab/GRESO.
    """
    if not len(candidates):
        return np.empty(0, np.int64)
    chance_N = np.maximum(GRESO_BASE**candidates.num_silent, settings.greso_least)
    length = max(1.0, chance_N.sum() / max(1, num))
    # One lottery number for each visit: it stays the same until the next one.
    lot_N = lottery(candidates.seq.astype(np.uint64) << np.uint64(24) | candidates.visits.astype(np.uint64), 0)
    skipped_N = skipped_passes((lot_N >> np.uint64(11)) * 2.0**-53 + 2.0**-54, chance_N)
    late_N = candidates.elapsed / length - 1 - skipped_N
    return highest(late_N, min(num, len(candidates)), generator, candidates.visits)


def skipped_passes(lot_N: np.ndarray, chance_N: np.ndarray) -> np.ndarray:
    """Return the k with (1 - q) ** (k + 1) <= lot < (1 - q) ** k, geometric for a uniform lot; 0 where q is 1.

    Args:
        lot_N: in (0, 1).
        chance_N: q, probability that a pass plays the prompt, in (0, 1].
    """
    skip_N = np.where(chance_N < 1, 1 - chance_N, 0.5)
    return np.where(chance_N < 1, np.ceil(np.log(lot_N) / np.log(skip_N)) - 1, 0.0)


def mopps(candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings) -> np.ndarray:
    """Draw a pass rate from Beta(1 + s, 1 + n - s) for each prompt; take the nearest to `mopps_target`.

    Source: Qu et al. 2025, arXiv 2507.04632 (MoPPS).
    """
    failed_N = np.maximum(candidates.history_count - candidates.history_sum, 0.0)
    rate_N = generator.beta(1 + candidates.history_sum, 1 + failed_N)
    return first(num, generator, np.abs(rate_N - settings.mopps_target))


def spo_log_weight(candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
    """Return log(sqrt(v (1 - v)) + spo_floor), v the expected pass rate.

    v = (1 + s) / (2 + n); with the posterior baseline its own prediction, (w0 m + s) / (w0 + n), so that one tracker
    gives baseline and draws, as in the source.

    Source: Xu and Ding 2025, arXiv 2509.13232 (SPO), prioritised prompt sampling.
    """
    prior, mean_N, context = 2.0, np.full(len(candidates), 0.5), candidates.context
    if context.group_size:
        prior = context.prior_weight
        mean_N = context.of_domains(int(candidates.domain.max(initial=-1)) + 1).mean_D[candidates.domain]
    weight_N = prior + candidates.history_count
    known_N = prior * mean_N + candidates.history_sum
    value_N = np.divide(known_N, weight_N, out=mean_N, where=weight_N > 0)
    log_weight_N: np.ndarray = np.log(np.sqrt(np.clip(value_N * (1 - value_N), 0, None)) + settings.spo_floor)
    return log_weight_N


spo = Proportional(spo_log_weight)
