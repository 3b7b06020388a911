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
from rllib_srl.replay.selection.quotas import quotas
from rllib_srl.replay.selection.rules import Candidates, Rule, apply, first, num_by_domain


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

    The places that remain are divided among domains by weight, as slots are (`quotas.quotas`).

    Args:
        name: of the rule, for messages.
        rule: as `EVICTIONS.make` returns it.
        candidates: N items.
        num: items to evict.
        generator: of this eviction.
        domain_weights: domain -> weight in the division of the memory; None leaves domains to the rule.

    Raises:
        ValueError: a rule that breaks its contract.
    """
    num, nums = min(num, len(candidates)), None
    if domain_weights is not None:
        available = num_by_domain(candidates)
        places = quotas(len(candidates) - num, domain_weights, available, generator).num
        nums = {domain: count - places[domain] for domain, count in available.items()}
    return apply(f"eviction {name!r}", rule, candidates, num, generator, nums)
