"""Former names of metrics, for settings that name one and for readers of the logs of earlier runs.

    current_metric("learners/default_policy/reuse/clipped")   ->  "learners/default_policy/reuse/clip_fraction"
"""

from __future__ import annotations

RENAMED = {"clipped": "clip_fraction", "mismatch": "rollout_logp_abs_diff"}


def current_metric(name: str) -> str:
    """Return the present name of a metric, with the path before it."""
    path, slash, last = name.rpartition("/")
    return f"{path}{slash}{RENAMED.get(last, last)}"
