"""Divide slots in exact proportions: of batches to the memory (`Slots`), and among domains (`quotas`).

    fraction .2, batches of 4 prompts  -> 0 1 1 1 1, 0 1 1 1 1, ...     fractions of a slot are carried
    weights 3 : 1, 8 slots             -> 6, 2
    the same, only 4 of the first      -> 4, 4                          borrowed
    weights 9 : 1, 4 slots, 10 times   -> 36, 4                         rounding errors are carried, too

Fractions are rounded by largest remainder, ties broken by the generator.
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
        """Set another fraction; what is carried, less than one slot, stays."""
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
        weights: domain -> finite weight >= 0, 0 for a domain that is left out.
        available: domain -> number of candidates.
        generator: breaks ties.
        carry: of the previous call.
    """
    carry, domains = carry or {}, sorted(available)
    available_K = np.array([available[domain] for domain in domains], np.int64)
    weight_K = np.array([weights.get(domain, 0.0) for domain in domains], float)
    carry_K = np.array([carry.get(domain, 0.0) for domain in domains], float)
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
    carried = {**carry, **dict(zip(domains, left_K.tolist(), strict=True))}
    return Quotas(dict(zip(domains, num_K.tolist(), strict=True)), carried)


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
