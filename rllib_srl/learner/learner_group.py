"""The driver's proxy of the learners: every call is typed, has a timeout, and names the learner that failed.

    learners.update(shards, timesteps, num_epochs, timeout_s)   one update; RLlib's own has no timeout, and the live
                                                                learners hang in their all-reduce when one has died
    learners.reuse_report(timeout_s)                            a method of `GRPOTorchLearner`, called on all learners
    learners.send(version, sequences, scale, timeout_s)         called on those that gathered weights need
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import ray
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_srl.batch.shard import TrainingShard
from rllib_srl.common.remote_calls import ActorFailure, Call, Failure, gather
from rllib_srl.learner.learner import GRPOTorchLearner
from rllib_srl.learner.weight_sender import Sent

POLL_S = 1.0
DEATH_SHOWS_S = 10.0  # how long Ray may take to report a learner's death

Result = TypeVar("Result")


class Learners:
    """Calls of `GRPOTorchLearner` methods, in other processes or on the local learner of this one.

    Invariant: no method waits longer than its `timeout_s`, which holds for all learners together. An exception that a
    learner raises is raised here; a learner that died or timed out raises `ActorFailure`.
    """

    def __init__(self, group: LearnerGroup) -> None:
        """Wrap RLlib's group."""
        self._group = group

    @property
    def num(self) -> int:
        """Return the number of learners, at least 1."""
        return max(1, int(self._group.config.num_learners))

    # --- training --------------------------------------------------------------------------------

    def update(
        self, shards: Sequence[TrainingShard], timesteps: dict[str, Any], num_epochs: int, timeout_s: float
    ) -> list[Any]:
        """Train every learner on its shard and return their metrics.

        Raises:
            ActorFailure: a learner died or did not finish within `timeout_s`.
            Exception: the learner's own exception.
        """
        refs = [ray.put(shard) for shard in shards]
        if self._group.is_local:
            results: list[Any] = self._group.update(batch_refs=refs, timesteps=timesteps, num_epochs=num_epochs)
            return results
        self._group.update(batch_refs=refs, timesteps=timesteps, num_epochs=num_epochs, async_update=True)
        return _collect(self._group, timeout_s)

    def episode_kl(self, shards: Sequence[TrainingShard], timeout_s: float) -> list[list[list[float]]]:
        """Return each shard's KL to the reference; see `Reference.episode_kl`."""
        calls = [Call.of(GRPOTorchLearner.episode_kl, shard) for shard in shards]
        return self._run(calls, timeout_s, "scoring the reference")

    def policy_kl(self, shards: Sequence[TrainingShard], timeout_s: float) -> float:
        """Return the KL of the policy that played the shards to the present one, nats per token.

        See `GRPOTorchLearner.policy_kl`.
        """
        calls = [Call.of(GRPOTorchLearner.policy_kl, shard) for shard in shards]
        answers = self._run(calls, timeout_s, "measuring the KL of the update")
        return sum(total for total, _ in answers) / max(1, sum(num for _, num in answers))

    def reuse_report(self, timeout_s: float) -> dict[str, dict[str, float]]:
        """Return and clear the diagnostics of all reused groups; see `GRPOTorchLearner.reuse_report`."""
        told = self._every(Call.of(GRPOTorchLearner.reuse_report), timeout_s, "reporting")
        return {group_id: row for one in told for group_id, row in one.items()}

    def take_embeddings(self) -> list[Any]:
        """Return the embeddings of this iteration, one mapping a learner, or without waiting a reference to each."""
        call = Call.of(GRPOTorchLearner.take_embeddings)
        if self._group.is_local:
            return [call.run(self._group._learner)]
        return [call.submit(worker) for _, worker in sorted(self._group._worker_manager.actors().items())]

    def follow_policy(self, rate: float, timeout_s: float) -> None:
        """Move every learner's reference model towards the policy; see `Reference.follow`."""
        self._every(Call.of(GRPOTorchLearner.follow_policy, rate), timeout_s, "updating the reference model")

    def end_stages(self, domains: Sequence[str], shards: Sequence[TrainingShard], timeout_s: float) -> int:
        """Return the number of episodes that count for EWC at the end of stages; see `Regularisers.end_stages`."""
        calls = [Call.of(GRPOTorchLearner.end_stages, list(domains), shard) for shard in shards]
        return self._run(calls, timeout_s, "ending a stage")[0]

    def onload(self, timeout_s: float) -> None:
        """Move the optimiser state to the GPU that the learners share with engines."""
        self._every(Call.of(GRPOTorchLearner.onload), timeout_s, "moving the learner to the GPU")

    def offload(self, timeout_s: float) -> None:
        """Undo `onload`."""
        self._every(Call.of(GRPOTorchLearner.offload), timeout_s, "moving the learner off the GPU")

    # --- weights ---------------------------------------------------------------------------------

    def send(self, version: int, sequences: list[list[int]], scale: float, timeout_s: float) -> Sent:
        """Put the weights into the object store; see `WeightSender.send`."""
        call = Call.of(GRPOTorchLearner.send, version, sequences, scale)
        return self._gathered(call, timeout_s, f"sending weights version {version}")

    def connect(self, kind: str, client: Any, timeout_s: float) -> None:
        """Connect learner 0 to the engines; see `WeightSender.connect`."""
        self._run([Call.of(GRPOTorchLearner.connect, kind, client)], timeout_s, "connecting to the engines")

    def send_direct(
        self, version: int, sequences: list[list[int]], scale: float, timeout_s: float
    ) -> list[np.ndarray]:
        """Send the weights of learner 0 to every engine; see `WeightSender.send_direct`."""
        call = Call.of(GRPOTorchLearner.send_direct, version, sequences, scale)
        return self._run([call], timeout_s, f"sending weights version {version}")[0]

    def score_at(self, sequences: list[list[int]], scale: float, timeout_s: float) -> list[np.ndarray]:
        """Return the canary log-probs of learner 0; see `WeightSender.score_at`."""
        return self._gathered(Call.of(GRPOTorchLearner.score_at, sequences, scale), timeout_s, "scoring the canary")

    def export(self, directory: str, timeout_s: float) -> None:
        """Write model and tokenizer; see `model_setup.export`."""
        self._gathered(Call.of(GRPOTorchLearner.export, directory), timeout_s, "exporting")

    def take_weights(self, weights: Any, timeout_s: float) -> None:
        """Load an array by tensor name on every learner; the optimiser state stays."""
        weights = weights if self._group.is_local else ray.put(weights)
        self._every(Call.of(GRPOTorchLearner.take_weights, weights), timeout_s, "taking weights")

    # --- checkpoints -----------------------------------------------------------------------------

    def gather(self, timeout_s: float) -> None:
        """Gather the full state, which RLlib then reads from one learner; see `TrainingState.gather`."""
        self._every(Call.of(GRPOTorchLearner.gather), timeout_s, "gathering weights")

    def leave_to_shards(self, timeout_s: float) -> None:
        """Exclude weights and optimiser from the next state; see `TrainingState.leave_to_shards`."""
        self._every(Call.of(GRPOTorchLearner.leave_to_shards), timeout_s, "preparing a checkpoint")

    def take_saved(self, timeout_s: float) -> list[bool]:
        """Return for each learner whether it wrote its part of a checkpoint; see `GRPOTorchLearner.take_saved`."""
        return self._every(Call.of(GRPOTorchLearner.take_saved), timeout_s, "writing a checkpoint")

    def save_shards(self, directory: str, timeout_s: float) -> None:
        """Write every learner's shard; see `TrainingState.save_shards`."""
        self._every(Call.of(GRPOTorchLearner.save_shards, directory), timeout_s, "writing shards")

    def load_shards(self, directory: str, timeout_s: float) -> None:
        """Load weights and optimiser from shards; see `TrainingState.load_shards`."""
        self._every(Call.of(GRPOTorchLearner.load_shards, directory), timeout_s, "reading shards")

    def load_weights_from_shards(self, directory: str, timeout_s: float) -> None:
        """Load only the weights from shards; see `TrainingState.load_shards`."""
        call = Call.of(GRPOTorchLearner.load_shards, directory, weights_only=True)
        self._every(call, timeout_s, "taking weights")

    # --- calls -----------------------------------------------------------------------------------

    def _every(self, call: Call[Result], timeout_s: float, what: str) -> list[Result]:
        """Run a call on every learner."""
        return self._run([call] * self.num, timeout_s, what)

    def _gathered(self, call: Call[Result], timeout_s: float, what: str) -> Result:
        """Run a call for gathered weights, which with `fsdp` every learner must join; return learner 0's result."""
        return self._run([call] * (self.num if self._group.config.fsdp else 1), timeout_s, what)[0]

    def _run(self, calls: Sequence[Call[Result]], timeout_s: float, what: str) -> list[Result]:
        """Run one call on each of the first `len(calls)` learners and return their results in order.

        Raises:
            ActorFailure: a learner died or did not answer in time; the message names the learner and `what`.
            Exception: the learner's own exception.
        """
        if self._group.is_local:
            return [call.run(self._group._learner) for call in calls]
        pending = {i: call.submit(self._group._workers[i]) for i, call in enumerate(calls)}
        answers = dict(gather(pending, timeout_s))
        results: dict[int, Result] = {}
        for index, answer in answers.items():
            if isinstance(answer, Failure):
                raise ActorFailure(f"learner {index} {answer.reason} while {what}")
            results[index] = answer
        return [results[i] for i in range(len(calls))]


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
