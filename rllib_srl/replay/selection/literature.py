"""Selection rules from the literature, under their published names.

    per, fresh_per, exit, nll_surprise, pier, difficulty_pool, rlep    draw in proportion to a weight
    exgrpo                                                             draws a bucket, then inside it
    repo                                                               takes by one of four strategies

A candidate takes the place of the unit that each paper replays: a transition (per), a trajectory (fresh_per, repo,
rlep), a task (exit, exgrpo, difficulty_pool) or a demonstration (pier).

Differences from the sources:
1. All draw without replacement; per and fresh_per do not stratify over a sum tree.
2. exit draws among the candidates, not the whole buffer.
3. exgrpo cannot pick the trajectory of lowest entropy within a question: a group is drawn whole.
4. repo has no strategy "all": every strategy takes all candidates if `num` is at least their number.
5. pier uses the policy's mean -log-prob as uncertainty and 2 pass_rate - 1 as the novice's reward (-1 or +1 for a
   single episode), and counts age from the oldest candidate, because `seq` is unbounded.
6. nll_surprise is our reading of PerpR, whose formula could not be read; perplexity is also high for garbled text.
7. Candidates that a method never draws (exgrpo, rlep, weights of 0) still fill a batch that would be short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rllib_srl.replay.selection.candidates import Candidates, SelectionSettings, first, safe_log, tempered, weighted

PER_EPSILON = 1e-6  # added to a priority, so that candidates of priority 0 can be drawn
DECAY_FLOOR = 1e-8  # fresh_per: lower bound of the decay, against underflow
LogWeight = Callable[[Candidates, SelectionSettings], np.ndarray]


@dataclass(frozen=True)
class Proportional:
    """A rule that draws candidate i with probability (1 - f) w_i / sum w + f / N, f = `uniform_floor`.

    Invariant: `beta` names the setting that is the exponent of the importance weights, or is empty.
    """

    log_weight: LogWeight
    beta: str = ""

    def __call__(
        self, candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
    ) -> np.ndarray:
        """Draw `num` of the candidates, without replacement."""
        if settings.uniform_floor == 0:
            return weighted(self.log_weight(candidates, settings), num, generator)
        return weighted(safe_log(self.probabilities(candidates, settings)), num, generator)

    def probabilities(self, candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
        """Return each candidate's probability of being drawn first; uniform where all weights are 0."""
        log_weight_N = self.log_weight(candidates, settings)
        highest = log_weight_N.max(initial=-np.inf)
        weight_N = np.exp(log_weight_N - highest) if np.isfinite(highest) else np.ones(len(candidates))
        floor = settings.uniform_floor
        probability_N: np.ndarray = (1 - floor) * weight_N / weight_N.sum() + floor / len(candidates)
        return probability_N


def importance_weights(
    rule: Proportional, candidates: Candidates, indices: np.ndarray, settings: SelectionSettings
) -> np.ndarray:
    """Return the importance weights (N P_i) ** -beta / max_j (N P_j) ** -beta of drawn candidates, in (0, 1].

    The maximum is over all candidates of positive probability; a candidate of probability 0, drawn to fill a batch,
    has weight 1. Difference from the source: beta is constant, not annealed.

    Args:
        rule: per, fresh_per or pier; P is computed from its current, decayed priorities.
        candidates: the pool that was drawn from.
        indices: the drawn candidates.
        settings: of the rule.

    Raises:
        ValueError: a rule without importance weights.

    Source: Schaul et al. 2016, arXiv 1511.05952 section 3.4.
    """
    if not rule.beta:
        raise ValueError(
            "the rule has no importance weights; expected one that names its exponent (per, fresh_per, pier)"
        )
    probability_N = rule.probabilities(candidates, settings)
    least = probability_N[probability_N > 0].min()
    weight_K: np.ndarray = (np.maximum(probability_N[indices], least) / least) ** -getattr(settings, rule.beta)
    return weight_K


def per_log_weight(candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
    """Return alpha log(|A| + 1e-6): prioritised replay, with the mean |advantage| for the TD error.

    Source: Schaul et al. 2016, arXiv 1511.05952 section 3.3; with |A|: Wang et al. 2025, arXiv 2504.08837.
    """
    return settings.per_alpha * np.log(candidates.abs_advantage + PER_EPSILON)


def fresh_per_log_weight(candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
    """Return alpha log((|r| + 1e-6) exp(-age / tau)): prioritised replay with decaying priorities.

    For two candidates of equal reward, one `a` iterations older, the odds of a draw are exp(-alpha a / tau) : 1.

    Source: FreshPER, arXiv 2604.16918.
    """
    log_decay_N = np.maximum(-candidates.age / settings.fresh_tau, np.log(DECAY_FLOOR))
    log_weight_N: np.ndarray = settings.per_alpha * (np.log(np.abs(candidates.reward) + PER_EPSILON) + log_decay_N)
    return log_weight_N


def exit_log_weight(candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
    """Return kappa S: softmax over the score, the group variance of the final reward.

    Source: Jiang, Lupu and Bachrach 2025, arXiv 2509.04575 section 3.
    """
    return settings.kappa * candidates.score


def pier_log_weight(candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
    """Return alpha log p, p = 1 - r (b ** (1 - c) - 1) / (b - 1): failures first, old certain successes last.

    c = lambda u / max u + (1 - lambda) (1 - k / max k), u the uncertainty, k the order of insertion,
    r in [-1, 1] the reward, 0 where nothing was measured; p is in [0, 2].

    Source: Luijkx et al. 2025, arXiv 2508.05310 (PIER).
    """
    if len(candidates) == 0:
        return np.empty(0)
    order_N = candidates.seq - candidates.seq.min()
    uncertainty_N = candidates.nll / max(candidates.nll.max(), 1e-12)
    age_N = 1 - order_N / max(order_N.max(), 1)
    c_N = settings.pier_lambda * uncertainty_N + (1 - settings.pier_lambda) * age_N
    reward_N = np.where(candidates.visits > 0, 2 * candidates.pass_rate - 1, 0.0)
    base = settings.pier_base
    priority_N = 1 - reward_N * (base ** (1 - c_N) - 1) / (base - 1)
    return settings.pier_alpha * safe_log(priority_N)


def difficulty_pool_log_weight(candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
    """Return the log weight of each candidate's pool, by its last mean reward: hard, normal (weight 1) or easy.

    A candidate that was never visited counts as normal.

    Source: the difficulty pools of prime-rl (PrimeIntellect), thresholds and weights as there.
    """
    weight_N = np.ones(len(candidates))
    weight_N[candidates.reward <= settings.pool_hard] = settings.pool_hard_weight
    weight_N[candidates.reward > settings.pool_easy] = settings.pool_easy_weight
    weight_N[candidates.visits == 0] = 1.0
    return safe_log(weight_N)


def rlep_log_weight(candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
    """Return 0 for candidates with at least `rlep_min_success` successes, -inf for others: uniform over the solved.

    Source: Zhang et al. 2025, arXiv 2507.07451 (RLEP; requires 2).
    """
    return np.where(candidates.num_success >= settings.rlep_min_success, 0.0, -np.inf)


per = Proportional(per_log_weight, beta="per_beta")
fresh_per = Proportional(fresh_per_log_weight, beta="per_beta")
exit = Proportional(exit_log_weight)
pier = Proportional(pier_log_weight, beta="pier_beta")
difficulty_pool = Proportional(difficulty_pool_log_weight)
rlep = Proportional(rlep_log_weight)


def nll_surprise(
    candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
) -> np.ndarray:
    """Draw in proportion to perplexity ** (1 / temperature); perplexity is exp(mean -log-prob). At 0, highest first.

    Source: our reading of perplexity replay, Jeong et al. 2024, arXiv 2403.15049.
    """
    return tempered(candidates.nll, num, generator, settings.temperature)


def repo(candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings) -> np.ndarray:
    """Draw by `repo_strategy`: highest reward, highest reward variance, most recent, or random.

    Source: Li et al. 2025, arXiv 2506.09340 (RePO).
    """
    if settings.repo_strategy == "random":
        return generator.permutation(len(candidates))[:num]
    columns = {"highest": candidates.reward, "max_variance": candidates.variance, "recent": candidates.seq}
    return first(num, generator, -columns[settings.repo_strategy])


def exgrpo(candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings) -> np.ndarray:
    """Draw from buckets of k successes in n, with bucket weight N(k; n / 2, sigma) regardless of bucket size.

    Candidates that were always or never solved are retired. The count of each bucket comes from a multinomial draw;
    the shortfall of a bucket is drawn from the others, with the same weights.

    Source: Zhan et al. 2025, arXiv 2510.02245 (ExGRPO).
    """
    solved_N, size_N = candidates.num_success, candidates.group_size
    is_live_N = (solved_N > 0) & (solved_N < size_N)
    live, retired = np.flatnonzero(is_live_N), np.flatnonzero(~is_live_N)
    # One bucket for each pair (k, n), because groups may differ in size.
    _, example_K, bucket_of = np.unique(solved_N[live] << 32 | size_N[live], return_index=True, return_inverse=True)
    distance_K = (solved_N - size_N / 2)[live[example_K]] / settings.exgrpo_sigma
    have_K = np.bincount(bucket_of, minlength=len(example_K))
    count_K = _bucket_counts(min(num, len(live)), -0.5 * distance_K**2, have_K, generator)
    drawn = [
        generator.choice(live[bucket_of == bucket], count_K[bucket], replace=False)
        for bucket in np.flatnonzero(count_K)
    ]
    fill = generator.permutation(retired)[: num - len(live)] if num > len(live) else retired[:0]
    return np.concatenate([*drawn, fill])


def _bucket_counts(
    num: int, log_weight_K: np.ndarray, have_K: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    count_K = np.zeros(len(have_K), np.int64)
    while num > 0:
        is_open_K = count_K < have_K
        weight_K = np.where(is_open_K, np.exp(log_weight_K - log_weight_K[is_open_K].max()), 0.0)
        count_K += generator.multinomial(num, weight_K / weight_K.sum())
        num = int(np.maximum(count_K - have_K, 0).sum())
        count_K = np.minimum(count_K, have_K)
    return count_K
