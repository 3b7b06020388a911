"""The LearnerGroup as SRL calls it: RLlib's update has no deadline, and a dead learner leaves the others waiting."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_srl.deadlines import ActorFailure, Failure, gather
from rllib_srl.shard import TrainingShard

POLL_S = 1.0
DEATH_SHOWS_S = 10.0  # longest time between a learner's death and Ray's notice of it


def update_learners(
    group: LearnerGroup, shards: Sequence[TrainingShard], timesteps: dict, num_epochs: int, timeout_s: float
) -> list[Any]:
    """Train every learner on its shard and return their metrics.

    Raises:
        ActorFailure: a learner died, or did not finish in time.
        Exception: what a learner raised itself.
    """
    refs = [ray.put(shard) for shard in shards]
    if group.is_local:
        return group.update(batch_refs=refs, timesteps=timesteps, num_epochs=num_epochs)
    group.update(batch_refs=refs, timesteps=timesteps, num_epochs=num_epochs, async_update=True)
    return _collect(group, timeout_s)


def _collect(group: LearnerGroup, timeout_s: float) -> list[Any]:
    """Wait for all learners, in short steps: those that live hang in their all-reduce once one is dead."""
    deadline, results, waiting = time.monotonic() + timeout_s, [], set(range(len(group._workers)))
    errors: dict[int, Exception] = {}
    while waiting and time.monotonic() < deadline:
        for answer in group._worker_manager.fetch_ready_async_reqs(timeout_seconds=POLL_S):
            waiting.discard(answer.actor_id)
            if answer.ok:
                results.append(answer.get())
                continue
            errors[answer.actor_id] = answer.get()
            if isinstance(errors[answer.actor_id], ray.exceptions.RayActorError):
                raise ActorFailure(f"learner {answer.actor_id} died while updating; continue from the last checkpoint")
            # The others may only report that their connection broke: give a death the time to show.
            deadline = min(deadline, time.monotonic() + DEATH_SHOWS_S)
    if errors:
        error = next(iter(errors.values()))  # the first: later ones may follow from it
        raise error.cause if isinstance(getattr(error, "cause", None), Exception) else error
    if waiting:
        who = ", ".join(map(str, sorted(waiting)))
        raise ActorFailure(f"learner {who} gave no answer within {timeout_s:g} s while updating")
    return results


def ask_learners(group: LearnerGroup, method: str) -> list[Any]:
    """Call `method` on every learner and return references to the answers, or the answer itself of a local one."""
    if group.is_local:
        return [getattr(group._learner, method)()]
    return [getattr(worker, method).remote() for _, worker in sorted(group._worker_manager.actors().items())]


def num_asked(group: LearnerGroup) -> int:
    """Return how many learners must be asked for what one of them answers: with `fsdp` none can gather alone."""
    return max(1, group.config.num_learners) if group.config.fsdp else 1


def call_learners(
    group: LearnerGroup, method: str, arguments: Sequence[tuple], timeout_s: float, what: str
) -> list[Any]:
    """Call `method` on the first `len(arguments)` learners and return their answers in order.

    Raises:
        ActorFailure: naming the learner and `what` it was asked for.
        Exception: what a learner raised itself.
    """
    if group.is_local:
        return [getattr(group._learner, method)(*one) for one in arguments]
    pending = {i: getattr(group._workers[i], method).remote(*one) for i, one in enumerate(arguments)}
    answers = dict(gather(pending, timeout_s))
    for index, answer in answers.items():
        if isinstance(answer, Failure):
            raise ActorFailure(f"learner {index} {answer.reason} while {what}")
    return [answers[i] for i in range(len(arguments))]
