"""Selects the items to evict when the memory is full: named rules, applied within domain quotas.

    rule(candidates, num, generator) -> the `num` indices to evict      user-defined: EVICTIONS["mine"] = rule

Ties are broken by the generator. New items are among the candidates, so a rule may evict them at once.

Source: Jiang, Lupu and Bachrach 2025, arXiv 2509.04575 section 3 (ExIt's minimum replacement).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rllib_srl.common.rules import Rules
from rllib_srl.replay.selection.candidates import Candidates, first
from rllib_srl.replay.selection.quotas import quotas
from rllib_srl.replay.selection.rules import Rule


def fifo(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Evict the first inserted."""
    return first(num, generator, candidates.seq)


def mastered_first(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Evict the highest posterior mean of recall, then the highest retrievability."""
    return first(num, generator, -candidates.posterior_mean, -candidates.retrievability)


def least_diverse(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Evict the lowest diversity."""
    return first(num, generator, candidates.diversity)


_OWN: dict[str, Any] = {"fifo": fifo, "mastered_first": mastered_first, "least_diverse": least_diverse}
EVICTIONS: Rules[Any] = Rules("eviction", _OWN)


def evict(
    name: str,
    rule: Rule,
    candidates: Candidates,
    num: int,
    generator: np.random.Generator,
    domain_weights: Mapping[int, float] | None = None,
) -> np.ndarray:
    """Return exactly min(num, N) distinct indices to evict, by a rule, from the domains over their quota.

    The N - num places that remain are divided among domains by weight, as slots are (`quotas.quotas`); a domain that
    cannot fill its places lends them to the others.

    Args:
        name: of the rule, for messages.
        rule: as `EVICTIONS.make` returns it.
        candidates: N items.
        num: items to evict.
        generator: of this eviction.
        domain_weights: domain -> weight of its share of the memory; None leaves domains to the rule.

    Raises:
        ValueError: a rule that breaks its contract.
    """
    num = min(num, len(candidates))
    parts = [np.empty(0, np.int64)]
    for inside, count in _per_domain(candidates, num, generator, domain_weights):
        evicted = np.asarray(rule(candidates.take(inside), count, generator))
        distinct = np.unique(evicted)
        if len(evicted) != count or len(distinct) != count or distinct[0] < 0 or distinct[-1] >= len(inside):
            raise ValueError(
                f"eviction {name!r} returned {len(evicted)} indices, {len(distinct)} of them distinct; "
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
