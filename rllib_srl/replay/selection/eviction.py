"""Selects the items to evict when the memory is full: named rules, applied within domain quotas.

    rule(candidates, num, generator, settings) -> the `num` indices to evict      user-defined: EVICTIONS["mine"] = rule

    fifo            the first inserted                  oldest          visited longest ago
    mastered_first  the highest recall                  least_diverse   the lowest diversity
    lowest_value    the lowest value of a revisit       reservoir       random; keeps a uniform sample

`lowest_value` alone would evict recently learned items first, so the sampler protects scheduled items while many
others wait (`sampler.Draws.evicted`).

Ties are broken by the generator. New items are among the candidates, so a rule may evict them at once.

Sources: Vitter 1985, ACM TOMS 11(1) (reservoirs); Efraimidis and Spirakis 2006, IPL 97(5) (by random keys);
Jiang, Lupu and Bachrach 2025, arXiv 2509.04575 section 3 (ExIt's minimum replacement).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rllib_srl.common.rules import Rules
from rllib_srl.replay.selection.candidates import Candidates, SelectionSettings, first
from rllib_srl.replay.selection.lottery import lottery
from rllib_srl.replay.selection.quotas import quotas

Eviction = Callable[[Candidates, int, np.random.Generator, SelectionSettings], np.ndarray]


def fifo(candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings) -> np.ndarray:
    """Evict the first inserted."""
    return first(num, generator, candidates.seq)


def oldest(candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings) -> np.ndarray:
    """Evict the items with the longest time since their last visit."""
    return first(num, generator, -candidates.elapsed)


def reservoir(
    candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
) -> np.ndarray:
    """Evict the lowest lottery numbers; the number of each `seq` is fixed by `reservoir_seed`.

    The remaining items have the highest numbers of all items ever inserted: a uniform sample over the order of
    insertion, as with Algorithm R. This holds within a domain too, and for any number of items evicted at once.
    A new uniform draw at each eviction would instead forget old items exponentially.

    Source: Efraimidis and Spirakis 2006, IPL 97(5), with equal weights.
    """
    return first(num, generator, lottery(candidates.seq, settings.reservoir_seed))


def lowest_value(
    candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
) -> np.ndarray:
    """Evict the lowest `value_of`."""
    return first(num, generator, value_of(candidates, settings))


def value_of(candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
    """Return the value of another visit, (signal_floor + 4 p (1 - p)) (2 - R) (1 + c_d diversity).

    The first factor is learnability, p the posterior mean of recall: an item that is always or never solved gives no
    gradient. The second is in [1, 2] and favours items of low retrievability R, which are about to be forgotten. The
    third favours diverse items.
    """
    recall_N = candidates.posterior_mean
    learnability_N = settings.signal_floor + 4 * recall_N * (1 - recall_N)
    urgent_N = learnability_N * (2 - candidates.retrievability)
    value_N: np.ndarray = urgent_N * (1 + settings.diversity_coeff * candidates.diversity)
    return value_N


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


_OWN: dict[str, Eviction] = {
    "fifo": fifo,
    "reservoir": reservoir,
    "lowest_value": lowest_value,
    "mastered_first": mastered_first,
    "least_diverse": least_diverse,
    "oldest": oldest,
}
EVICTIONS: Rules[Eviction] = Rules("eviction", _OWN)


def evict(
    rule: str,
    candidates: Candidates,
    num: int,
    generator: np.random.Generator,
    settings: SelectionSettings,
    domain_weights: Mapping[int, float] | None = None,
) -> np.ndarray:
    """Return exactly min(num, N) distinct indices to evict, by a rule, from the domains over their quota.

    The N - num places that remain are divided among domains by weight, as slots are (`quotas.quotas`); a domain that
    cannot fill its places lends them to the others.

    Args:
        rule: a key of `EVICTIONS` or an import path.
        domain_weights: domain -> weight of its share of the memory; None leaves domains to the rule.

    Raises:
        ValueError: an unknown rule, or one that breaks its contract.
    """
    found = EVICTIONS.named(rule)
    num = min(num, len(candidates))
    parts = [np.empty(0, np.int64)]
    for inside, count in _per_domain(candidates, num, generator, domain_weights):
        evicted = np.asarray(found(candidates.take(inside), count, generator, settings))
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
    """Return for each domain the indices of its candidates, and how many of them to evict."""
    if weights is None:
        return [(np.arange(len(candidates)), num)] if num else []
    domains, counts = np.unique(candidates.domain, return_counts=True)
    have = dict(zip(domains.tolist(), counts.tolist()))
    places = quotas(len(candidates) - num, weights, have, generator).num
    over = {domain: have[domain] - places[domain] for domain in have}
    return [(np.flatnonzero(candidates.domain == domain), count) for domain, count in over.items() if count]
