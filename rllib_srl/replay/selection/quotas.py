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


class Quotas(NamedTuple):
    """Slots by domain, and the rounding error carried for each domain (below 0: it got too much)."""

    num: dict[int, int]
    carry: dict[int, float]


def quotas(
    num: int,
    weights: Mapping[int, float],
    available: Mapping[int, int],
    generator: np.random.Generator,
    carry: Mapping[int, float] | None = None,
) -> Quotas:
    """Divide `num` slots among domains.

    A domain with fewer candidates than its share takes all of them and lends its other slots to the other domains, in
    proportion to their weights; lent slots are not carried. Domains of weight 0 get the slots that all others together
    cannot fill.

    Args:
        num: slots; if there are fewer candidates, all of them are taken.
        weights: domain -> weight >= 0; a domain without a weight has weight 0.
        available: domain -> number of candidates.
        generator: breaks ties.
        carry: `Quotas.carry` of the previous call.

    Raises:
        ValueError: a weight below 0 or not finite, a negative number of slots or candidates.
    """
    _check(num, weights, available)
    domains = sorted(available)
    have_K = np.array([available[domain] for domain in domains], np.int64)
    weight_K = np.array([weights.get(domain, 0.0) for domain in domains], float)
    owed_K = np.array([(carry or {}).get(domain, 0.0) for domain in domains], float)
    num = min(num, int(have_K.sum()))
    share_K, is_short_K = _fill_up(num, weight_K, have_K)
    # Only rounding errors are carried: the carry of a domain that lent slots or had no share is reset.
    rounds_K = ~is_short_K & (share_K > 0)
    target_K = np.where(rounds_K, share_K + owed_K, share_K)
    num_K = np.where(is_short_K, have_K, 0)
    _settle(num - int(num_K.sum()), num_K, np.where(rounds_K, target_K, -np.inf), have_K, generator)
    left_K = np.where(rounds_K, np.clip(target_K - num_K, -1.0, 1.0), 0.0)
    return Quotas(
        {domain: int(count) for domain, count in zip(domains, num_K)},
        {**(carry or {}), **{domain: float(left) for domain, left in zip(domains, left_K)}},
    )


def _check(num: int, weights: Mapping[int, float], available: Mapping[int, int]) -> None:
    faults = [] if num >= 0 else [f"num = {num}; expected at least 0"]
    for domain, weight in weights.items():
        if not np.isfinite(weight) or weight < 0:
            faults.append(f"weight of domain {domain} = {weight!r}; expected a number of at least 0")
    for domain, count in available.items():
        if count < 0:
            faults.append(f"candidates of domain {domain} = {count}; expected at least 0")
    if faults:
        raise ValueError("; ".join(faults))


def _fill_up(num: int, weight_K: np.ndarray, have_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each domain's unrounded share, and which domains have too few candidates for theirs."""
    share_K = np.zeros(len(have_K))
    is_short_K = have_K == 0
    while not is_short_K.all():
        weight = np.where(is_short_K, 0.0, weight_K)
        if weight.sum() == 0:
            weight = np.where(is_short_K, 0.0, 1.0)
        share = (num - share_K[is_short_K].sum()) * (weight / weight.sum())
        over_K = ~is_short_K & (weight > 0) & (share >= have_K)
        if not over_K.any():
            share_K[~is_short_K] = share[~is_short_K]
            break
        share_K[over_K] = have_K[over_K]
        is_short_K = is_short_K | over_K
    return share_K, is_short_K


def _settle(
    num: int, num_K: np.ndarray, target_K: np.ndarray, have_K: np.ndarray, generator: np.random.Generator
) -> None:
    """Add `num` slots to `num_K` in place, one by one, each to the domain furthest below its target.

    This is the largest-remainder method.
    """
    for _ in range(num):
        # Rounded, so that equal remainders tie despite floating-point errors.
        below_K = np.where(num_K < have_K, np.round(target_K - num_K, 9), -np.inf)
        ties = np.flatnonzero(below_K == below_K.max())
        num_K[ties[0] if len(ties) == 1 else generator.choice(ties)] += 1
