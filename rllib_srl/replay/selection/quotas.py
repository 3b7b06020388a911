"""Divide slots in exact proportions: of batches to the memory (`Slots`), and among domains (`quotas`).

    fraction .2, batches of 4 prompts  -> 0 1 1 1 1, 0 1 1 1 1, ...     fractions of a slot are carried
    weights 3 : 1, 8 slots             -> 6, 2
    weights 9 : 1, 4 slots, 10 times   -> 36, 4                         rounding errors are also carried
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np


class Slots:
    """Number of slots of the memory in a sequence of batches.

    Invariant: the sum of all slots returned is the exact fraction of all batches, rounded down; the carry is in [0, 1).
    Slots that the caller cannot fill are not carried over.
    """

    def __init__(self, fraction: float, is_added: bool = False) -> None:
        """Start with nothing carried.

        Args:
            fraction: in [0, 1], below 1 for slots that are added; taken as a decimal, so that .2 is exactly 1/5.
            is_added: whether the slots R come on top of a batch of P, so that R / (P + R) is the fraction, not R / P.
        """
        self._is_added, self._carry = is_added, Fraction(0)
        self.change(fraction)

    def change(self, fraction: float) -> None:
        """Set another fraction; the carry, less than one slot, stays."""
        rate = Fraction(repr(float(fraction)))
        self._rate = rate / (1 - rate) if self._is_added else rate

    def owed(self, num: int) -> int:
        """Return the memory's slots in the next batch of `num`: floor(carry + rate num)."""
        total = self._carry + self._rate * num
        count = math.floor(total)
        self._carry = total - count
        return count

    def get_state(self) -> dict[str, Any]:
        """Return the carry, as JSON types."""
        return {"carry": str(self._carry)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned; a resumed run may have another fraction."""
        self._carry = Fraction(state["carry"])


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
