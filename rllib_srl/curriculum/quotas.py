"""Divide slots among domains in exact proportions.

    weights 3 : 1, 8 slots             -> 6, 2
    weights 9 : 1, 4 slots, 10 times   -> 36, 4       rounding errors are carried
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Quotas(NamedTuple):
    """Slots by domain, and the rounding errors for the next call: below 0 where a domain got too much."""

    num: dict[int, int]
    carry: dict[int, float]


def quotas(
    num: int, weights: Mapping[int, float], generator: np.random.Generator, carry: Mapping[int, float]
) -> Quotas:
    """Divide `num` slots among domains by their weights, at least one above 0; `carry` is of the previous call.

    The slots are given one by one, each to the domain that is furthest below its part, ties broken by the generator.
    Only the rounding errors of domains that share the slots with others are carried.
    """
    domains = sorted(weights)
    weight_K = np.array([weights[domain] for domain in domains], float)
    is_in_K = weight_K > 0
    target_K = num * (weight_K / weight_K.sum()) + np.array([carry.get(domain, 0.0) for domain in domains])
    num_K = np.zeros(len(domains), np.int64)
    for _ in range(num):
        # Rounded, so that equal remainders tie despite floating-point errors.
        below_K = np.where(is_in_K, np.round(target_K - num_K, 9), -np.inf)
        ties = np.flatnonzero(below_K == below_K.max())
        num_K[ties[0] if len(ties) == 1 else generator.choice(ties)] += 1
    left_K = np.where(is_in_K & (is_in_K.sum() > 1), np.clip(target_K - num_K, -1.0, 1.0), 0.0)
    listed = [dict(zip(domains, values_K.tolist(), strict=True)) for values_K in (num_K, left_K)]
    return Quotas(listed[0], {**carry, **listed[1]})
