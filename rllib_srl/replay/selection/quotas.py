"""Divides slots among domains in proportion to weights, exact in total; short domains lend slots to the others.

    weights 3 : 1, 8 slots            -> 6, 2
    the same, only 4 of the first     -> 4, 4          borrowed
    weights 9 : 1, 4 slots, 10 times  -> 36, 4         rounding errors are carried, never floored away

Fractions are rounded by largest remainder, ties broken by the generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

Carry = Mapping[int, float]  # rounding error of each domain, in [-1, 1]; below 0: it got too much


class Quotas(NamedTuple):
    """Slots by domain, and the carry for the next call."""

    num: dict[int, int]
    carry: Carry


def quotas(
    num: int,
    weights: Mapping[int, float],
    available: Mapping[int, int],
    generator: np.random.Generator,
    carry: Carry | None = None,
) -> Quotas:
    """Divide `num` slots among domains.

    A domain with fewer candidates than slots takes all of them and lends its other slots to the other domains, in
    proportion to their weights; lent slots are not carried. Domains of weight 0 get the slots that all others together
    cannot fill.

    Args:
        num: slots; if there are fewer candidates, all of them are taken.
        weights: domain -> weight >= 0; a domain without a weight has weight 0.
        available: domain -> number of candidates.
        generator: breaks ties.
        carry: of the previous call.

    Raises:
        ValueError: naming every weight below 0 or not finite, and every negative number of slots or candidates.
    """
    errors = [] if num >= 0 else [f"num = {num}; expected at least 0"]
    errors += [
        f"weight of domain {domain} = {weight!r}; expected a number of at least 0"
        for domain, weight in weights.items()
        if not np.isfinite(weight) or weight < 0
    ]
    negative = {domain: count for domain, count in available.items() if count < 0}
    errors += [f"candidates of domain {domain} = {count}; expected at least 0" for domain, count in negative.items()]
    if errors:
        raise ValueError("; ".join(errors))
    domains = sorted(available)
    available_K = np.array([available[domain] for domain in domains], np.int64)
    weight_K = np.array([weights.get(domain, 0.0) for domain in domains], float)
    carry_K = np.array([(carry or {}).get(domain, 0.0) for domain in domains], float)
    num = min(num, int(available_K.sum()))
    exact_K, is_short_K = _fill_up(num, weight_K, available_K)
    # Only rounding errors are carried: the carry of a domain that lent slots or had none is reset.
    is_rounded_K = ~is_short_K & (exact_K > 0)
    target_K = np.where(is_rounded_K, exact_K + carry_K, -np.inf)
    num_K = np.where(is_short_K, available_K, 0)
    for _ in range(num - int(num_K.sum())):  # one by one, each to the domain furthest below its target
        # Rounded, so that equal remainders tie despite floating-point errors.
        below_K = np.where(num_K < available_K, np.round(target_K - num_K, 9), -np.inf)
        ties = np.flatnonzero(below_K == below_K.max())
        num_K[ties[0] if len(ties) == 1 else generator.choice(ties)] += 1
    left_K = np.where(is_rounded_K, np.clip(target_K - num_K, -1.0, 1.0), 0.0)
    carried = dict(zip(domains, left_K.tolist(), strict=True))
    return Quotas(dict(zip(domains, num_K.tolist(), strict=True)), {**(carry or {}), **carried})


def _fill_up(num: int, weight_K: np.ndarray, available_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each domain's slots before rounding, and which domains have too few candidates for theirs."""
    exact_K, is_short_K = np.zeros(len(available_K)), available_K == 0
    while not is_short_K.all():
        weight = np.where(is_short_K, 0.0, weight_K)
        if weight.sum() == 0:
            weight = np.where(is_short_K, 0.0, 1.0)
        slots = (num - exact_K[is_short_K].sum()) * (weight / weight.sum())
        over_K = ~is_short_K & (weight > 0) & (slots >= available_K)
        if not over_K.any():
            exact_K[~is_short_K] = slots[~is_short_K]
            break
        exact_K[over_K] = available_K[over_K]
        is_short_K = is_short_K | over_K
    return exact_K, is_short_K
