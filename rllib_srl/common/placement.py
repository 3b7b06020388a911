"""Where Ray puts the processes of a run outside Tune: learners together, runners spread over the nodes.

    with runners_spread(): Algorithm.setup(...)          runners start with Ray's strategy SPREAD
    packed_places(resources, num, timeout_s)             a placement group for learners, of strategy PACK

Learners exchange gradients in every update and runners exchange nothing. Both strategies are best effort: if a node is
full Ray takes another. Tune reserves one placement group for all processes of a trial, which stays in force.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.rllib.algorithms import algorithm
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rllib_srl.common.remote_calls import ActorFailure


class SpreadRunners(EnvRunnerGroup):
    """RLlib's group of runners, each on the node with the fewest."""

    def _setup(self, **settings: Any) -> None:
        self._remote_args["scheduling_strategy"] = "SPREAD"  # also of a runner that Ray restarts
        super()._setup(**settings)


@contextmanager
def runners_spread() -> Iterator[None]:
    """Let algorithms that are set up inside the context spread their runners, unless Tune places them.

    RLlib 2.60 has no setting for it: `Algorithm.setup` creates the group by its class's name.
    """
    if ray.util.get_current_placement_group() is not None:
        yield
        return
    usual = algorithm.EnvRunnerGroup
    algorithm.EnvRunnerGroup = SpreadRunners
    try:
        yield
    finally:
        algorithm.EnvRunnerGroup = usual


def learner_resources(config: Any) -> dict[str, float]:
    """Return what one learner asks Ray for, as RLlib does, without zeros."""
    num_gpus, num_cpus = max(0, config.num_gpus_per_learner), config.num_cpus_per_learner
    if num_cpus == "auto":
        num_cpus = 0 if num_gpus else 1
    resources = {"CPU": num_cpus, "GPU": num_gpus, **(config.custom_resources_per_learner or {})}
    return {name: amount for name, amount in resources.items() if amount}


def packed_places(resources: Mapping[str, float], num: int, timeout_s: float) -> PlacementGroup | None:
    """Reserve places for learners on as few nodes as can hold them.

    Args:
        resources: of one learner, as Ray names them.
        num: of learners.
        timeout_s: how long to wait for the places.

    Returns:
        The group; None if there is nothing to place together, or Tune places the learners.

    Raises:
        ActorFailure: Ray found no places in time.
    """
    if num < 2 or not resources or ray.util.get_current_placement_group() is not None:
        return None
    group = placement_group([dict(resources)] * num, strategy="PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        amounts = " and ".join(f"{n:g} {name}" for name, n in sorted(resources.items()))
        raise ActorFailure(f"{num} learners of {amounts} found no place within {timeout_s:g} s")
    return group
