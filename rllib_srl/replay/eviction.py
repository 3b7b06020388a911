"""Which items go when the memory is full: named rules, and domain quotas over them.

    rule(candidates, num, generator, settings) -> the `num` indices to evict      a user's own: EVICTIONS["mine"] = rule

    fifo            the first inserted                  oldest          visited longest ago
    mastered_first  the best remembered                 least_diverse   the most like the rest
    lowest_value    what a revisit would teach least    reservoir       by lot: a uniform sample stays

`lowest_value` alone would send away what has just been learned, so the buffer spares scheduled items while many others
wait (`draws.evicted`).

Ties are broken by the generator. The newcomer is among the candidates, so a rule may send it away again.

Sources: Vitter 1985, ACM TOMS 11(1) (reservoirs); Efraimidis and Spirakis 2006, IPL 97(5) (by random keys);
Jiang, Lupu and Bachrach 2025, arXiv 2509.04575 section 3 (ExIt's minimum replacement).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rllib_srl.replay.candidates import Candidates, SelectionSettings, first
from rllib_srl.replay.quotas import quotas

Eviction = Callable[[Candidates, int, np.random.Generator, SelectionSettings], np.ndarray]


def fifo(candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings) -> np.ndarray:
    """Evict the first inserted."""
    return first(num, generator, candidates.seq)


def oldest(candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings) -> np.ndarray:
    """Evict what was visited longest ago."""
    return first(num, generator, -candidates.elapsed)


def reservoir(
    candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
) -> np.ndarray:
    """Evict the lowest lottery numbers, one number for each `seq`, drawn once and for all from `reservoir_seed`.

    What stays are the highest numbers among everything that ever came: a uniform sample over the order of
    insertion, as with Algorithm R, also inside a domain and whatever number of items goes at once.
    A fresh uniform draw at each eviction would not be: it forgets old items exponentially.

    Source: Efraimidis and Spirakis 2006, IPL 97(5), with equal weights.
    """
    return first(num, generator, _lottery(candidates.seq, settings.reservoir_seed))


def lowest_value(
    candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
) -> np.ndarray:
    """Evict the lowest `value_of`."""
    return first(num, generator, value_of(candidates, settings))


def value_of(candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
    """Return (signal_floor + 4 p (1 - p)) (2 - R) (1 + c_d diversity): what another visit is worth.

    The first factor is learnability, p the posterior mean of recall: an item always or never solved
    gives no gradient. The second lies in [1, 2]: what is about to be forgotten (low retrievability R) is
    worth up to twice what is safe. The third keeps the rare.
    """
    recall_N = candidates.posterior_mean
    learnability_N = settings.signal_floor + 4 * recall_N * (1 - recall_N)
    return learnability_N * (2 - candidates.retrievability) * (1 + settings.diversity_coeff * candidates.diversity)


def mastered_first(
    candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
) -> np.ndarray:
    """Evict the highest posterior mean of recall, then the highest retrievability."""
    return first(num, generator, -candidates.posterior_mean, -candidates.retrievability)


def least_diverse(
    candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
) -> np.ndarray:
    """Evict the lowest diversity."""
    return first(num, generator, candidates.diversity)


EVICTIONS: dict[str, Eviction] = {
    "fifo": fifo,
    "reservoir": reservoir,
    "lowest_value": lowest_value,
    "mastered_first": mastered_first,
    "least_diverse": least_diverse,
    "oldest": oldest,
}


def evict(
    rule: str,
    candidates: Candidates,
    num: int,
    generator: np.random.Generator,
    settings: SelectionSettings,
    domain_weights: Mapping[int, float] | None = None,
) -> np.ndarray:
    """Return exactly min(num, N) distinct indices to evict, by a rule, from the domains most over their quota.

    The places that are left are divided by weight, as slots are; a domain keeps at most its places, and
    one that does not fill its own lends them.

    Args:
        rule: a key of `EVICTIONS`.
        domain_weights: domain -> weight of its share of the memory; None leaves domains to the rule.

    Raises:
        ValueError: an unknown rule, or one that breaks its contract.
    """
    if rule not in EVICTIONS:
        raise ValueError(f"eviction = {rule!r}; expected one of {sorted(EVICTIONS)}")
    num = min(num, len(candidates))
    parts = [np.empty(0, np.int64)]
    for inside, count in _per_domain(candidates, num, generator, domain_weights):
        evicted = np.asarray(EVICTIONS[rule](candidates.take(inside), count, generator, settings))
        distinct = np.unique(evicted)
        if len(evicted) != count or len(distinct) != count or distinct[0] < 0 or distinct[-1] >= len(inside):
            raise ValueError(
                f"eviction {rule!r} returned {len(evicted)} indices, {len(distinct)} of them distinct; "
                f"expected {count} distinct ones below {len(inside)}"
            )
        parts.append(inside[evicted])
    return np.concatenate(parts)


def _per_domain(
    candidates: Candidates, num: int, generator: np.random.Generator, weights: Mapping[int, float] | None
) -> list[tuple[np.ndarray, int]]:
    """Return who is in each domain, and how many of them go."""
    if weights is None:
        return [(np.arange(len(candidates)), num)] if num else []
    domains, counts = np.unique(candidates.domain, return_counts=True)
    have = dict(zip(domains.tolist(), counts.tolist()))
    places = quotas(len(candidates) - num, weights, have, generator).num
    over = {domain: have[domain] - places[domain] for domain in have}
    return [(np.flatnonzero(candidates.domain == domain), count) for domain, count in over.items() if count]


def replaced_by(score: float, score_N: np.ndarray, generator: np.random.Generator) -> int | None:
    """Return which stored item a new one of this score replaces: the lowest; None if its score is lower still.

    Equal scores replace; ties among the lowest are broken by the generator.

    Source: Jiang, Lupu and Bachrach 2025, arXiv 2509.04575 section 3.
    """
    lowest = score_N.min(initial=np.inf)
    return int(generator.choice(np.flatnonzero(score_N == lowest))) if score >= lowest and len(score_N) else None


def _lottery(seq_N: np.ndarray, seed: int) -> np.ndarray:
    """Return a pseudo-random number for each `seq`, by SplitMix64 (Steele, Lea and Flood 2014, OOPSLA)."""
    salt = np.random.SeedSequence([seed]).generate_state(1, np.uint64)[0]
    z_N = (seq_N.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + salt
    z_N = (z_N ^ (z_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_N = (z_N ^ (z_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z_N ^ (z_N >> np.uint64(31))
