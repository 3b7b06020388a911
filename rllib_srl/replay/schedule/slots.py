"""Compute the memory's share of slots: the fraction is carried, never floored away.

    4 prompts, share .2  ->  0 1 1 1 1, 0 1 1 1 1, ...
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from rllib_srl.common.setting_checks import is_number


class Share:
    """Number of slots of the memory in a sequence of batches, as an exact share in whole slots.

    Invariant: the sum of all slots returned is the exact share of all batches, rounded down; the carry is in [0, 1).
    Slots that the caller cannot fill are not carried over.
    """

    def __init__(self, fraction: float) -> None:
        """Start with nothing carried.

        Args:
            fraction: the share, in [0, 1]; taken as a decimal, so that .2 is exactly 1/5.

        Raises:
            ValueError: a fraction out of range.
        """
        self._rate = _decimal(fraction)
        self._carry = Fraction(0)

    def owed(self, num: int) -> int:
        """Return the memory's slots in the next batch of `num`: floor(carry + rate num).

        Raises:
            ValueError: a negative number.
        """
        if num < 0:
            raise ValueError(f"num = {num}; expected at least 0")
        total = self._carry + self._rate * num
        count = math.floor(total)
        self._carry = total - count
        return count

    def carried_into(self, other: Share) -> Share:
        """Copy this share's carry, which is less than one slot, into `other`, and return `other`."""
        other._carry = self._carry
        return other

    def get_state(self) -> dict[str, Any]:
        """Return the carry, as JSON types."""
        return {"carry": str(self._carry)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned.

        The carry is less than one slot for any share, so a resumed run may change its share.
        """
        self._carry = Fraction(state["carry"])


def reuse_share(fraction: float) -> Share:
    """Return the share whose `owed(P)` is R, the stored groups for P played ones, with R / (P + R) = fraction.

    Raises:
        ValueError: a fraction outside [0, 1).
    """
    share = Share(fraction)
    if share._rate == 1:
        raise ValueError(f"fraction = {fraction!r}; expected less than 1: stored groups are never all of a batch")
    share._rate /= 1 - share._rate
    return share


def _decimal(fraction: float) -> Fraction:
    if not is_number(fraction) or not 0 <= fraction <= 1:
        raise ValueError(f"fraction = {fraction!r}; expected a number in [0, 1]")
    return Fraction(repr(float(fraction)))
