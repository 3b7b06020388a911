"""Compute the memory's slots in batches: fractions of a slot are carried, never floored away.

    fraction .2, batches of 4 prompts  ->  0 1 1 1 1, 0 1 1 1 1, ...
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from rllib_srl.common.setting_checks import is_number


class Slots:
    """Number of slots of the memory in a sequence of batches, an exact fraction in whole slots.

    Invariant: the sum of all slots returned is the exact fraction of all batches, rounded down; the carry is in [0, 1).
    Slots that the caller cannot fill are not carried over.
    """

    def __init__(self, fraction: float, is_added: bool = False) -> None:
        """Start with nothing carried.

        Args:
            fraction: in [0, 1], taken as a decimal, so that .2 is exactly 1/5.
            is_added: whether the slots R come on top of a batch of P, so that R / (P + R) is the fraction, not R / P.

        Raises:
            ValueError: a fraction out of range; 1 is, for slots that are added.
        """
        self._is_added, self._carry = is_added, Fraction(0)
        self.change(fraction)

    def change(self, fraction: float) -> None:
        """Set another fraction; what is carried, less than one slot, stays."""
        if not is_number(fraction) or not 0 <= fraction <= 1:
            raise ValueError(f"fraction = {fraction!r}; expected a number in [0, 1]")
        if self._is_added and fraction == 1:
            raise ValueError(f"fraction = {fraction!r}; expected less than 1: stored groups are never all of a batch")
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
