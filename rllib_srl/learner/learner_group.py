"""Call learners with a timeout and detect dead ones.

RLlib's `LearnerGroup.update` has no timeout, and the live learners hang in their all-reduce when one has died.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_srl.batch.shard import TrainingShard
from rllib_srl.common.remote_calls import ActorFailure, Failure, gather

POLL_S = 1.0
DEATH_SHOWS_S = 10.0  # how long Ray may take to report a learner's death


def update_learners(
    group: LearnerGroup, shards: Sequence[TrainingShard], timesteps: dict, num_epochs: int, timeout_s: float
) -> list[Any]:
    """Train every learner on its shard and return their metrics.

    Raises:
        ActorFailure: a learner died or did not finish within `timeout_s`.
        Exception: the learner's own exception.
    """
    refs = [ray.put(shard) for shard in shards]
    if group.is_local:
        return group.update(batch_refs=refs, timesteps=timesteps, num_epochs=num_epochs)
    group.update(batch_refs=refs, timesteps=timesteps, num_epochs=num_epochs, async_update=True)
    return _collect(group, timeout_s)


def _collect(group: LearnerGroup, timeout_s: float) -> list[Any]:
    """Poll all learners; a single long wait would hang, since one death blocks the others in their all-reduce."""
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
            # This may be only a broken connection that follows from a death: wait for Ray to report the death.
            deadline = min(deadline, time.monotonic() + DEATH_SHOWS_S)
    if errors:
        error = next(iter(errors.values()))  # the first: later ones may follow from it
        cause = getattr(error, "cause", None)
        raise cause if isinstance(cause, Exception) else error
    if waiting:
        who = ", ".join(map(str, sorted(waiting)))
        raise ActorFailure(f"learner {who} gave no answer within {timeout_s:g} s while updating")
    return results


def ask_learners(group: LearnerGroup, method: str) -> list[Any]:
    """Call `method` on every learner; return one ObjectRef per learner, or the result itself if the group is local."""
    if group.is_local:
        return [getattr(group._learner, method)()]
    return [getattr(worker, method).remote() for _, worker in sorted(group._worker_manager.actors().items())]


def num_asked(group: LearnerGroup) -> int:
    """Return how many learners a call for gathered weights must reach: all with `fsdp`, else 1."""
    return max(1, group.config.num_learners) if group.config.fsdp else 1


def call_learners(
    group: LearnerGroup, method: str, arguments: Sequence[tuple], timeout_s: float, what: str
) -> list[Any]:
    """Call `method` on the first `len(arguments)` learners and return their results in order.

    Args:
        group: the learners.
        method: name of a learner method.
        arguments: positional arguments of each call.
        timeout_s: time limit for all calls together.
        what: description of the call for the error message.

    Raises:
        ActorFailure: a learner died or did not answer in time; the message names the learner and `what`.
        Exception: the learner's own exception.
    """
    if group.is_local:
        return [getattr(group._learner, method)(*one) for one in arguments]
    pending = {i: getattr(group._workers[i], method).remote(*one) for i, one in enumerate(arguments)}
    answers = dict(gather(pending, timeout_s))
    for index, answer in answers.items():
        if isinstance(answer, Failure):
            raise ActorFailure(f"learner {index} {answer.reason} while {what}")
    return [answers[i] for i in range(len(arguments))]
