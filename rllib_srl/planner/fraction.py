"""A replay fraction that follows forgetting, within bounds, held low until the learner's plasticity has settled.

    forgetting > threshold   up by rate (high - low)        not before `settled`
    else                     down by as much
    reused tokens' effective sample size < floor            down, whatever forgetting says

1. The step is a share of the range, not of the value, so that a fraction of 0 can rise again.
2. The rule of the second source switches the ratio of gradient steps in pixel control, by the share of active
   units of the critic; here the signal is any metric of the learner, and what it releases is replay.

Sources: experience replay for continual learning (threshold 0.1, rate 0.1, bounds); Ma et al. 2024 (Adaptive Replay
Ratio), arXiv 2310.07418.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def adapted(
    fraction: float,
    forgetting: float,
    threshold: float,
    rate: float,
    bounds: Sequence[float],
    is_settled: bool = True,
    is_stale: bool = False,
) -> float:
    """Return the fraction of the next iteration, within `bounds`.

    Args:
        fraction: of this iteration.
        forgetting: mean over domains, in [0, 1].
        threshold: of forgetting.
        rate: step, as a share of the range.
        bounds: lowest and highest.
        is_settled: False holds the fraction at the lowest.
        is_stale: the effective sample size is too low: reuse less.
    """
    low, high = bounds
    if not is_settled:
        return low
    step = rate * (high - low)
    return min(high, max(low, fraction + (step if forgetting > threshold and not is_stale else -step)))


@dataclass
class Plasticity:
    """Looks at a signal every n iterations until it has settled. Invariant: once settled it stays so."""

    every: int
    tolerance: float
    last: float | None = None
    is_settled: bool = False

    def look(self, value: float, now: int) -> bool:
        """Take the signal of iteration `now`; return whether it has settled. The first look has nothing to compare."""
        if not self.is_settled and now % self.every == 0 and math.isfinite(value):
            self.is_settled = self.last is not None and abs(value - self.last) <= self.tolerance
            self.last = value
        return self.is_settled

    def get_state(self) -> dict[str, Any]:
        """Return everything the next looks depend on."""
        return {"last": self.last, "is_settled": self.is_settled}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self.last, self.is_settled = state["last"], state["is_settled"]
