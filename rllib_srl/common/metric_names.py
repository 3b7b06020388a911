"""Names of metrics: flat names of nested results, and the present names of former ones in earlier logs.

    numbers_of({"replay": {"num_items": 3}})                  ->  ("replay/num_items", 3.0)
    current_metric("learners/default_policy/reuse/clipped")   ->  "learners/default_policy/reuse/clip_fraction"
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# Parts of a result of `algo.train()` that are no metrics.
LEFT_OUT = ("config", "perf", "timestamp", "pid", "date", "hostname", "node_ip", "trial_id", "fault_tolerance")
RENAMED = {"clipped": "clip_fraction", "mismatch": "rollout_logp_abs_diff"}


def current_metric(name: str) -> str:
    """Return the present name of a metric, with the path before it."""
    path, slash, last = name.rpartition("/")
    return f"{path}{slash}{RENAMED.get(last, last)}"


def numbers_of(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) for every finite number in a nested result."""
    for name, value in result.items():
        if not prefix and name in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int | float | np.number) and math.isfinite(value):
            yield f"{prefix}{name}", float(value)
