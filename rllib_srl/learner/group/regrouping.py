"""Replaces a group of learners of which one has died: ends the others, and starts as many as Ray can place.

    end(group) -> num_places(resources, ...) -> config.build_learner_group(...) -> a new LearnerGroup

The learners of a group wait for each other in every collective, so the loss of one makes all others useless. How many
can be placed is tried, with an actor of the same resources for each: what Ray reports as free leaves out placement
groups and is late after the death of a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.train._internal.backend_executor import InactiveWorkerGroup
from ray.util.placement_group import remove_placement_group

from rllib_srl.common.remote_calls import Place, end_family, family_of
from rllib_srl.learner.group.learners import LearnerFailure


class _Place:
    """An actor that reserves the resources of one learner."""

    def is_here(self) -> bool:
        """Return True, once it has been placed."""
        return True


def regrouped(old: LearnerGroup, config: Any, wait_s: float, timeout_s: float) -> LearnerGroup:
    """End a group; return one of at most `config.num_learners` new learners, with the weights of the model's files.

    Args:
        old: a group of remote learners.
        config: the run's `SRLConfig`.
        wait_s: how long to wait for places for all learners, before fewer are started.
        timeout_s: timeout of the start, and of the wait for the smallest number.

    Raises:
        LearnerFailure: not even the smallest number of learners can be placed, or one died or hung while it started.
    """
    resources = dict(old._backend_executor._resources_per_worker)
    end(old)
    smallest = max(2, config.learners_per_shard) if config.fsdp else 1
    num = num_places(resources, config.num_learners, smallest, wait_s, timeout_s)
    num -= num % config.learners_per_shard
    if num < smallest:
        amounts = " and ".join(f"{n:g} {name}" for name, n in sorted(resources.items()) if n)
        raise LearnerFailure(f"{num} of at least {smallest} learners found a place of {amounts} within {timeout_s:g} s")
    own = config.copy(copy_frozen=False)
    own.num_learners, own.start_timeout_s = num, timeout_s
    group: LearnerGroup = own.build_learner_group(rl_module_spec=old._module_spec)
    return group


def end(group: LearnerGroup) -> None:
    """Kill all learners of a group; none is waited for, since they may hang in a collective."""
    if group._is_shut_down:
        return
    for worker in group._backend_executor.worker_group.workers:
        family = family_of(Place(worker.metadata.node_id, worker.metadata.pid))
        ray.kill(worker.actor)
        end_family(family)
    if group._backend_executor._placement_group is not None:  # it would keep the places of the dead
        remove_placement_group(group._backend_executor._placement_group)
    group._backend_executor.worker_group = InactiveWorkerGroup()  # or a later shutdown would call the dead
    group._is_shut_down = True


def num_places(resources: Mapping[str, float], num: int, smallest: int, wait_s: float, timeout_s: float) -> int:
    """Return for how many of `num` actors of these resources Ray has places at the same time.

    Args:
        resources: of one actor, as Ray names them.
        num: the largest number.
        smallest: a number to wait for longer.
        wait_s: how long to wait for all of them.
        timeout_s: how long to wait for the smallest number.
    """
    others = {name: n for name, n in resources.items() if name not in ("CPU", "GPU")}
    options = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": others}
    actors = [ray.remote(_Place).options(**options).remote() for _ in range(num)]
    try:
        answers = [actor.is_here.remote() for actor in actors]
        placed, _ = ray.wait(answers, num_returns=num, timeout=wait_s)
        if len(placed) < smallest:
            placed, _ = ray.wait(answers, num_returns=smallest, timeout=max(0.0, timeout_s - wait_s))
        return sum(_is_true(answer) for answer in placed)
    finally:
        for actor in actors:
            ray.kill(actor)


def _is_true(answer: Any) -> bool:
    with suppress(RayError):  # its node died meanwhile
        return bool(ray.get(answer, timeout=60))
    return False
