"""Flat names of the metrics in nested results.

    numbers_of({"replay": {"num_items": 3}})  ->  ("replay/num_items", 3.0)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# Parts of a result of `algo.train()` that are not metrics.
LEFT_OUT = ("config", "perf", "timestamp", "pid", "date", "hostname", "node_ip", "trial_id", "fault_tolerance")


def numbers_of(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) for every finite number in a nested result."""
    for name, value in result.items():
        if not prefix and name in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int | float | np.number) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)
