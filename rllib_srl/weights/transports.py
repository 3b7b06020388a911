"""Transport weights from learner 0 to the engines: two transports with one interface.

    ObjectStoreTransport   learner packs, Ray transfers, each engine verifies checksums and loads      any machine
    VLLMTransport          vLLM's own backends: "nccl" between GPUs, "ipc" within one GPU              GPUs only

    transport.update(version, ids)         -> Delivered: the canary's log-probs by the engines, and by the learner
    transport.seconds                      -> duration of the learner's steps in the last delivery

The learner scores the canary while the engines load, each in its own process. vLLM's transfer has no checksums; canary
and self-test verify it. It was written without access to GPUs, so it has not been run there:
tests/weights/test_transports.py tests its handshake with a stand-in for vLLM's trainer side.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError

from rllib_srl.common.remote_calls import Call, Failure
from rllib_srl.engine.canary import update_sequences
from rllib_srl.learner.group.learners import LearnerFailure, Learners
from rllib_srl.learner.weight_sender import Sent
from rllib_srl.rollout.batches import Loaded
from rllib_srl.rollout.env_runner import LLMEnvRunner
from rllib_srl.rollout.runner_group import PendingLoads, RunnerGroup
from rllib_srl.types import ProcessBrokenError


@dataclass(frozen=True)
class Delivered:
    """The engines' log-probs of the canary, by runner id, and the learner's under the same weights."""

    answers: dict[int, Loaded | Failure]
    learner_logps: list[np.ndarray]


class ObjectStoreTransport:
    """Transport of one packed bundle through Ray's object store.

    Invariant: it keeps at most one bundle alive.
    """

    def __init__(self, learners: Learners, runners: RunnerGroup, sequences: list[list[int]], timeout_s: float) -> None:
        """Set learners, runners, the canary's token ids and the timeout of each call."""
        self._learners, self._runners, self._timeout_s = learners, runners, timeout_s
        self._canary = update_sequences(sequences)
        self._sent: dict[int, Sent] = {}  # by version
        self.seconds: dict[str, float] = {}

    def update(self, version: int, ids: Sequence[int]) -> Delivered:
        """Send weights to some runners, and score the canary of updates on both sides.

        Raises:
            LearnerFailure: a learner died or timed out, or the weights were lost with it after it had sent them.
            WeightSyncError: the weights sent are not those in training.
        """
        if version not in self._sent:
            self.forget()
            self._sent[version] = self._learners.send(version, self._timeout_s)
        sent = self._sent[version]
        loading = self._runners.start_loading(ids, sent.ref, self._canary, self._timeout_s)
        start = time.perf_counter()
        logps = self._learners.score_sent(version, self._canary, self._timeout_s)
        self.seconds = {**sent.seconds, "learner_canary_s": time.perf_counter() - start}
        return Delivered(self._loaded(loading, version), logps)

    def _loaded(self, loading: PendingLoads, version: int) -> dict[int, Loaded | Failure]:
        try:
            return self._runners.loaded(loading, self._timeout_s)
        except ObjectLostError as error:
            raise LearnerFailure(f"learner 0 died while the engines loaded weights version {version}") from error

    def forget(self) -> None:
        """Free the bundle in the object store."""
        self._sent.clear()


class VLLMTransport:
    """Transport through vLLM's transfer backends, from GPU memory to GPU memory.

    Invariant: every delivery reaches all runners that were alive at the last `connect`.
    """

    def __init__(
        self,
        learners: Learners,
        runners: RunnerGroup,
        sequences: list[list[int]],
        timeout_s: float,
        kind: str,
        tensor_parallel_size: int,
    ) -> None:
        """Set the arguments of `ObjectStoreTransport`, the backend ("nccl" or "ipc") and the GPUs per engine."""
        self._learners, self._runners, self._timeout_s = learners, runners, timeout_s
        self._canary = update_sequences(sequences)
        self._kind, self._tensor_parallel_size = kind, tensor_parallel_size
        self.seconds: dict[str, float] = {}
        self._is_connected = False

    def update(self, version: int, ids: Sequence[int]) -> Delivered:
        """Send weights to all runners, and score the canary on the learner and on the runners in `ids`."""
        if not self._is_connected:
            client = RunnersClient(self._runners.actors(), self._tensor_parallel_size, self._timeout_s)
            self._learners.connect(self._kind, client, self._timeout_s)
            self._is_connected = True
        start = time.perf_counter()
        logps = self._learners.send_direct(version, self._canary, self._timeout_s)
        self.seconds = {"send_s": time.perf_counter() - start}
        return Delivered(self._runners.score_loaded(ids, self._canary, self._timeout_s), logps)

    def forget(self) -> None:
        """Reconnect before the next delivery, because a process group does not survive the loss of a member."""
        self._is_connected = False


class RunnersClient:
    """vLLM's weight-sync client (a structural protocol of four methods) over runner actors.

    A runner's `receive_weights` performs a whole update, so the start and finish methods are empty.
    """

    def __init__(self, actors: Sequence[Any], tensor_parallel_size: int, timeout_s: float) -> None:
        """Set the actors in a fixed order, the workers per actor and the timeout of each call."""
        self._actors, self._workers, self._timeout_s = list(actors), tensor_parallel_size, timeout_s
        self.version = 0

    @property
    def world_size(self) -> int:
        """Return the size of the transfer's process group: the learner plus every engine worker."""
        return 1 + len(self._actors) * self._workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect each runner; with "nccl" each gets its own rank offset in the process group."""
        infos = [dict(init_info) for _ in self._actors]
        if "rank_offset" in init_info:
            infos = [{**init_info, "rank_offset": 1 + i * self._workers} for i in range(len(infos))]
        calls = [Call.of(LLMEnvRunner.init_transfer, info) for info in infos]
        started = [call.submit(actor) for call, actor in zip(calls, self._actors, strict=True)]
        self._wait_for(started)

    def start_weight_update(self) -> None:
        """Do nothing; see the class."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Run one whole weight update on every runner."""
        call = Call.of(LLMEnvRunner.receive_weights, update_info, self.version)
        self._wait_for([call.submit(actor) for actor in self._actors])

    def _wait_for(self, calls: Sequence[ray.ObjectRef[None]]) -> None:
        try:
            ray.get(list(calls), timeout=self._timeout_s)
        except ProcessBrokenError as error:  # the engine's process is broken, not the learner's that calls it
            raise RuntimeError(f"an engine failed in a weight transfer: {error}") from None

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing; see the class."""
