"""Places the learners of a run outside Tune close together, because they exchange gradients in every update.

The strategy is best effort: if a node is full Ray takes another. Tune reserves one placement group for all processes
of a trial, which stays in force. Runners, which exchange nothing, are spread (`rollout/runner_group.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rllib_srl.common.remote_calls import ActorFailure


def learner_resources(config: Any) -> dict[str, float]:
    """Return what one learner asks Ray for, as RLlib does, without zeros."""
    num_gpus, num_cpus = max(0, config.num_gpus_per_learner), config.num_cpus_per_learner
    if num_cpus == "auto":
        num_cpus = 0 if num_gpus else 1
    resources = {"CPU": num_cpus, "GPU": num_gpus, **(config.custom_resources_per_learner or {})}
    return {name: amount for name, amount in resources.items() if amount}


def packed_places(resources: Mapping[str, float], num: int, timeout_s: float) -> PlacementGroup | None:
    """Reserve places for `num` learners with these resources each, on as few nodes as can hold them.

    Return None if there is nothing to place together, or Tune places the learners.

    Raises:
        ActorFailure: Ray found no places in time.
    """
    if num < 2 or not resources or ray.util.get_current_placement_group() is not None:
        return None
    group = placement_group([dict(resources)] * num, strategy="PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        amounts = " and ".join(f"{n:g} {name}" for name, n in sorted(resources.items()))
        raise ActorFailure(f"{num} learners of {amounts} could not be placed within start_timeout_s = {timeout_s:g}")
    return group
