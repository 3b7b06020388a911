"""The driver's proxy of the learners: every call is typed, has a timeout, and names the learner that failed.

    learners.update(shards, timesteps, num_epochs, timeout_s)   one update; RLlib's own has no timeout, and the live
                                                                learners hang in their all-reduce when one has died
    learners.num_left_out(timeout_s)                            a method of `GRPOTorchLearner`, called on all learners
    learners.send(version, timeout_s)                           called on those that gathered weights need
    learners.end()                                              kills all, after the loss of one
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.train._internal.backend_executor import InactiveWorkerGroup
from ray.util.placement_group import remove_placement_group

from rllib_srl.batch.shard import TrainingShard
from rllib_srl.common.remote_calls import ActorFailure, Call, Failure, Place, end_family, family_of, gather
from rllib_srl.learner.learner import GRPOTorchLearner, Sent

POLL_S = 1.0
DEATH_SHOWS_S = 10.0  # how long Ray may take to report a learner's death

Result = TypeVar("Result")


class LearnerFailure(ActorFailure):
    """A learner died, timed out or lost its training data; the others wait for it in collectives in vain."""


class Learners:
    """Calls of `GRPOTorchLearner` methods, in other processes or on the local learner of this one.

    A method with the name of one of `GRPOTorchLearner` calls that method on the learners.

    Invariant: no method waits longer than its `timeout_s`, which holds for all learners together. An exception that a
    learner raises is raised here; a learner that died or timed out raises `LearnerFailure`.
    """

    def __init__(self, group: LearnerGroup) -> None:
        """Wrap RLlib's group."""
        self._group = group

    def end(self) -> None:
        """Kill all remote learners without waiting for them, since they may hang in a collective."""
        group = self._group
        if group.is_local or group._is_shut_down:
            return
        executor = group._backend_executor
        for worker in executor.worker_group.workers:
            family = family_of(Place(worker.metadata.node_id, worker.metadata.pid))
            ray.kill(worker.actor)
            end_family(family)
        if executor._placement_group is not None:  # it would keep the resources of dead learners
            remove_placement_group(executor._placement_group)
        executor.worker_group = InactiveWorkerGroup()  # else RLlib's shutdown would call dead learners
        group._is_shut_down = True

    @property
    def num(self) -> int:
        """Return the number of learners, at least 1."""
        return max(1, int(self._group.config.num_learners))

    @property
    def nodes(self) -> set[str]:
        """Return Ray's ids of the nodes of all learners; this process's own for a local learner."""
        if self._group.is_local:
            return {ray.get_runtime_context().get_node_id()}
        return {worker.metadata.node_id for worker in self._group._backend_executor.worker_group.workers}

    # --- training --------------------------------------------------------------------------------

    def update(
        self, shards: Sequence[TrainingShard], timesteps: dict[str, Any], num_epochs: int, timeout_s: float
    ) -> list[Any]:
        """Train every learner on its shard and return the metrics of each."""
        refs = [ray.put(shard) for shard in shards]
        if self._group.is_local:
            with _loss_reported("updating"):
                results: list[Any] = self._group.update(batch_refs=refs, timesteps=timesteps, num_epochs=num_epochs)
                return results
        self._group.update(batch_refs=refs, timesteps=timesteps, num_epochs=num_epochs, async_update=True)
        with _loss_reported("updating"):
            return _collect(self._group, timeout_s)

    def episode_kl(self, shards: Sequence[TrainingShard], timeout_s: float) -> list[list[list[float]]]:
        calls = [Call.of(GRPOTorchLearner.episode_kl, shard) for shard in shards]
        return self._run(calls, timeout_s, "scoring the reference")

    def num_left_out(self, timeout_s: float) -> dict[str, int]:
        """Return how many episodes of each reused group were left out; a group is in one shard."""
        counts = self._every(Call.of(GRPOTorchLearner.num_left_out), timeout_s, "reporting")
        return {group_id: num for by_group in counts for group_id, num in by_group.items()}

    def retention_report(self, timeout_s: float) -> list[Any]:
        """Return each shard's report on its held answers; see `HeldAnswers.report`."""
        return self._every(Call.of(GRPOTorchLearner.retention_report), timeout_s, "reporting")

    def end_stages(self, domains: Sequence[str], shards: Sequence[TrainingShard], timeout_s: float) -> int:
        calls = [Call.of(GRPOTorchLearner.end_stages, list(domains), shard) for shard in shards]
        return self._run(calls, timeout_s, "ending a stage")[0]

    def onload(self, timeout_s: float) -> None:
        """Move the optimiser state to the GPU that the learners share with engines."""
        self._every(Call.of(GRPOTorchLearner.onload), timeout_s, "moving the learner to the GPU")

    def offload(self, timeout_s: float) -> None:
        self._every(Call.of(GRPOTorchLearner.offload), timeout_s, "moving the learner off the GPU")

    # --- weights ---------------------------------------------------------------------------------

    def send(self, version: int, timeout_s: float) -> Sent:
        call = Call.of(GRPOTorchLearner.send, version)
        return self._gathered(call, timeout_s, f"sending weights version {version}")

    def score_canary(self, sequences: list[list[int]], timeout_s: float) -> list[np.ndarray]:
        """Return the log-probs of the canary under the weights in training."""
        return self._gathered(Call.of(GRPOTorchLearner.score_canary, sequences), timeout_s, "scoring the canary")

    def export(self, directory: str, timeout_s: float) -> None:
        self._gathered(Call.of(GRPOTorchLearner.export, directory), timeout_s, "exporting")

    def first_sees(self, file: str, timeout_s: float) -> bool:
        """Return whether a file that the driver wrote is visible to learner 0, which writes exports."""
        return self._run([Call.of(GRPOTorchLearner.sees, file)], timeout_s, "looking for a file")[0]

    def take_weights(self, weights: Any, timeout_s: float) -> None:
        """Load an array by tensor name on every learner; the optimiser state stays."""
        weights = weights if self._group.is_local else ray.put(weights)
        self._every(Call.of(GRPOTorchLearner.take_weights, weights), timeout_s, "taking weights")

    # --- checkpoints -----------------------------------------------------------------------------

    def gather(self, timeout_s: float) -> None:
        """Gather the full state, which RLlib then reads from one learner; see `GRPOTorchLearner.gather`."""
        self._every(Call.of(GRPOTorchLearner.gather), timeout_s, "gathering weights")

    def check_alive(self, timeout_s: float) -> None:
        """Check that every learner answers."""
        self._every(Call.of(GRPOTorchLearner.take_saved), timeout_s, "idle")

    def take_saved(self, timeout_s: float) -> list[bool]:
        return self._every(Call.of(GRPOTorchLearner.take_saved), timeout_s, "writing a checkpoint")

    @contextmanager
    def unreachable_reported(self, what: str) -> Iterator[None]:
        """Raise `LearnerFailure` where RLlib's own call to a learner fails because it died or cannot be reached."""
        ids = [] if self._group.is_local else [worker._actor_id.hex() for worker in self._group._workers]
        try:
            yield
        except RayActorError as error:
            if error.actor_id not in ids:
                raise
            raise LearnerFailure(f"learner {ids.index(error.actor_id)} could not be reached while {what}") from error

    # --- calls -----------------------------------------------------------------------------------

    def _every(self, call: Call[Result], timeout_s: float, what: str) -> list[Result]:
        return self._run([call] * self.num, timeout_s, what)

    def _gathered(self, call: Call[Result], timeout_s: float, what: str) -> Result:
        """Run a call for gathered weights, which with `fsdp` every learner must join; return learner 0's result."""
        return self._run([call] * (self.num if self._group.config.fsdp else 1), timeout_s, what)[0]

    def _run(self, calls: Sequence[Call[Result]], timeout_s: float, what: str) -> list[Result]:
        """Run one call on each of the first `len(calls)` learners and return their results in order.

        Raises:
            LearnerFailure: a learner died or did not answer in time; the message names the learner and `what`.
            Exception: the learner's own exception.
        """
        with _loss_reported(what):
            if self._group.is_local:
                return [call.run(self._group._learner) for call in calls]
            pending = {i: call.submit(self._group._workers[i]) for i, call in enumerate(calls)}
            answers = dict(gather(pending, timeout_s))
        results: dict[int, Result] = {}
        for index, answer in answers.items():
            if isinstance(answer, Failure):
                raise LearnerFailure(f"learner {index} {answer.reason} while {what}")
            results[index] = answer
        return [results[i] for i in range(len(calls))]


def _is_broken_connection(error: Exception) -> bool:
    """Return whether a collective failed, as it does if a learner's machine is gone; gloo has no exception class."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error)


@contextmanager
def _loss_reported(what: str) -> Iterator[None]:
    """Raise `LearnerFailure` if the groups that a learner fetches were lost with their node.

    Other learners may have got theirs, and wait in a collective for one that has not.
    """
    try:
        yield
    except ObjectLostError as error:
        raise LearnerFailure(f"groups were lost with their node while {what}") from error


def _collect(group: LearnerGroup, timeout_s: float) -> list[Any]:
    """Poll all learners; a single long wait would hang, since one death blocks the others in their all-reduce."""
    deadline, waiting = time.monotonic() + timeout_s, set(range(len(group._workers)))
    results: dict[int, Any] = {}
    errors: dict[int, Exception] = {}
    while waiting and time.monotonic() < deadline:
        for answer in group._worker_manager.fetch_ready_async_reqs(timeout_seconds=POLL_S):
            waiting.discard(answer.actor_id)
            if answer.ok:
                results[answer.actor_id] = answer.get()
                continue
            errors[answer.actor_id] = answer.get()
            if isinstance(errors[answer.actor_id], ray.exceptions.RayActorError):
                raise LearnerFailure(f"learner {answer.actor_id} died while updating")
            # This may be only a broken connection that follows from a death: wait for Ray to report the death.
            deadline = min(deadline, time.monotonic() + DEATH_SHOWS_S)
    if errors:
        error = next(iter(errors.values()))  # the first: later ones may follow from it
        cause = getattr(error, "cause", None)
        cause = cause if isinstance(cause, Exception) else error
        if _is_broken_connection(cause):
            raise LearnerFailure(f"learner {next(iter(errors))} lost the connection to another while updating")
        raise cause
    if waiting:
        who = ", ".join(map(str, sorted(waiting)))
        raise LearnerFailure(f"learner {who} gave no answer within {timeout_s:g} s while updating")
    return [results[index] for index in sorted(results)]


def started(build: Callable[[], LearnerGroup], num: int, timeout_s: float) -> LearnerGroup:
    """Start a group in a daemon thread, which is abandoned on a timeout: RLlib waits for its learners without one.

    Raises:
        LearnerFailure: a learner died, or the learners did not start in time.
        Exception: raised by a learner's constructor.
    """
    future: Future[LearnerGroup] = Future()

    def start() -> None:
        try:
            future.set_result(build())
        except BaseException as error:  # any: it is raised below
            future.set_exception(error)

    thread = threading.Thread(target=start, name="start-learners", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not future.done():
        raise LearnerFailure(f"{num} learner{'s' * (num > 1)} did not start within start_timeout_s = {timeout_s:g}")
    try:
        return future.result()
    except Exception as error:
        # Ray 2.60 raises None after the death of a learner that starts; the death is then the context of the TypeError.
        if any(isinstance(cause, RayActorError) for cause in (error, error.__context__)):
            raise LearnerFailure("a learner died while starting") from error
        raise
