"""Does the cluster hold what a run asks for? Asked before anything starts, because Ray would wait without a word."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ray

ROUNDING = 1e-6  # sums of fractions of a CPU


class PlacementError(ValueError):
    """The cluster is too small for the run; the message says what is missing and which settings ask for it."""


def check_cluster_holds(request: Any, config: Any) -> None:
    """Refuse a request that no moment of this cluster could hold.

    Args:
        request: Tune's PlacementGroupFactory: one bundle of resources a process.
        config: the settings; `check_resources` False trusts an autoscaler instead.

    Raises:
        PlacementError: all bundles together, or one on any node, ask for more than there is.
    """
    if not config.check_resources or not ray.is_initialized():
        return
    needed: Counter = Counter()
    for bundle in request.bundles:
        needed.update(bundle)
    cluster = ray.cluster_resources()
    short = [
        f"{n:g} {name} (the cluster has {cluster.get(name, 0):g})"
        for name, n in needed.items()
        if n > cluster.get(name, 0) + ROUNDING
    ]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for bundle in request.bundles:
        if not any(all(node.get(name, 0) >= n for name, n in bundle.items()) for node in nodes):
            amounts = " and ".join(f"{n:g} {name}" for name, n in sorted(bundle.items()))
            short.append(f"{amounts} in one process (no node has that)")
    if short:
        raise PlacementError(
            f"one run needs {', '.join(dict.fromkeys(short))}; expected less: "
            f"lower num_env_runners = {config.num_env_runners}, num_learners = {config.num_learners} or the CPUs and "
            "GPUs of each, or set check_resources = False if the cluster grows by itself"
        )
