"""Computes the memory's share of slots, and limits the expected reviews to the revisit slots (load control).

    Share         4 prompts, share .2  ->  0 1 1 1 1, 0 1 1 1 1, ...     the fraction is carried, never floored away
    LoadControl   expected reviews an iteration = sum over scheduled items of 1 / interval, against the slots

New items arrive faster than any spacing rule spreads them. Without load control all items are soon overdue, and every
rule degenerates to "most overdue first". "throttle_new" keeps new items waiting outside the schedule until their
reviews fit the slots; "stretch" schedules all items and multiplies their intervals so that the reviews fit.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from rllib_srl.common.setting_checks import is_number

UNIT = 1 << 40  # one review an iteration in fixed-point units of load; 2 ** 23 of them fit int64
LOAD_CONTROLS = ("throttle_new", "stretch", "none")


def whole(amount: float) -> tuple[int, float]:
    """Split an amount >= 0 into its integer part and the remainder in [0, 1).

    An amount within 1e-9 below an integer counts as that integer, to absorb rounding errors of float sums.
    """
    part = math.floor(amount + 1e-9)
    return part, max(amount - part, 0.0)


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


class LoadControl:
    """Tracks the expected reviews an iteration in O(1), and limits them to the available slots.

    Invariant: `load` is the sum over the scheduled items of 1 / max(interval, 1), each rounded to 2 ** -40. The sum
    is kept as an integer, so it does not drift and does not depend on the order of `add` and `remove`.
    """

    def __init__(self, mode: str) -> None:
        """Start with an empty schedule.

        Args:
            mode: "throttle_new", "stretch" or "none".

        Raises:
            ValueError: an unknown mode.
        """
        if mode not in LOAD_CONTROLS:
            raise ValueError(f"load_control = {mode!r}; expected one of {list(LOAD_CONTROLS)}")
        self.mode = mode
        self._units = 0
        self._num_items = 0

    @property
    def load(self) -> float:
        """Return the expected reviews an iteration."""
        return self._units / UNIT

    @property
    def num_items(self) -> int:
        """Return the number of scheduled items."""
        return self._num_items

    def add(self, interval_N: np.ndarray) -> None:
        """Add items to the load.

        Args:
            interval_N: effective intervals before stretching, in iterations; values below 1 count as 1, because an
                item is visited at most once an iteration.

        Raises:
            ValueError: an interval that is negative or not finite.
        """
        self._units += int(_units(interval_N).sum())
        self._num_items += len(interval_N)

    def remove(self, interval_N: np.ndarray) -> None:
        """Remove items from the load, with exactly the intervals they were added with.

        Raises:
            ValueError: more items or more load than were added.
        """
        units = int(_units(interval_N).sum())
        if len(interval_N) > self._num_items or units > self._units:
            raise ValueError(
                f"removing {len(interval_N)} items of load {units / UNIT:g}; "
                f"expected at most the {self._num_items} items of load {self.load:g} that were added"
            )
        self._units -= units
        self._num_items -= len(interval_N)

    def admit(self, interval_W: np.ndarray, slots: float) -> int:
        """Return how many of the waiting items, in their order, may enter the schedule in this iteration.

        "throttle_new": as many as keep the load within the slots, and at most ceil(slots): items that enter together
        are due together, so a burst would be overdue even if the load fits. Other modes: all.

        Args:
            interval_W: first effective interval of each waiting item, in iterations.
            slots: revisits an iteration, on average.
        """
        if self.mode != "throttle_new":
            return len(interval_W)
        entering_W = _units(interval_W)[: math.ceil(slots)]
        return int(np.searchsorted(np.cumsum(entering_W), round(slots * UNIT) - self._units, side="right"))

    def stretch(self, slots: float) -> float:
        """Return the factor >= 1 of all intervals: max(1, load / slots) in mode "stretch", else 1.

        Without slots nothing is revisited, and the factor is 1.
        """
        if self.mode != "stretch" or slots <= 0:
            return 1.0
        return max(1.0, self.load / slots)

    def metrics(self, slots: float, num_due: int, num_waiting: int) -> dict[str, float]:
        """Return the load, its ratio to the slots, the backlog in items, the waiting items and the factor.

        Args:
            slots: revisits an iteration, on average.
            num_due: items that are due now.
            num_waiting: items outside the schedule.
        """
        return {
            "load": self.load,
            "load_ratio": self.load / slots if slots > 0 else float("nan"),
            "backlog": max(num_due - slots, 0.0),
            "num_waiting": float(num_waiting),
            "stretch": self.stretch(slots),
        }

    def check(self, interval_N: np.ndarray) -> None:
        """Compare the running sum with a recomputed one.

        Args:
            interval_N: effective intervals of all scheduled items.

        Raises:
            ValueError: they differ.
        """
        units = int(_units(interval_N).sum())
        if (units, len(interval_N)) != (self._units, self._num_items):
            raise ValueError(
                f"load = {self.load!r} of {self._num_items} items; "
                f"expected {units / UNIT!r} of {len(interval_N)}, the sum over the schedule"
            )

    def get_state(self) -> dict[str, Any]:
        """Return the running sum, as JSON types."""
        return {"units": self._units, "num_items": self._num_items}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned; the mode is not part of it."""
        self._units, self._num_items = state["units"], state["num_items"]


def _units(interval_N: np.ndarray) -> np.ndarray:
    interval_N = np.asarray(interval_N, np.float64)
    if not np.isfinite(interval_N).all() or (interval_N < 0).any():
        raise ValueError(f"interval_N = {interval_N}; expected finite numbers of at least 0 iterations")
    units_N: np.ndarray = np.rint(UNIT / np.maximum(interval_N, 1.0)).astype(np.int64)
    return units_N
