"""How weights travel from the first learner to the engines: two carriers behind one interface.

    ObjectStore   learner packs, Ray carries, each engine verifies checksums and loads        any machine
    Direct        vLLM's own backends: "nccl" between cards, "ipc" within one                 GPUs only

    carrier.deliver(version, scale, ids) -> {runner id: Loaded or Failure}
    carrier.logps(version, scale)        -> the learner's canary under the weights it delivered
    carrier.seconds                      -> where the last delivery's time went on the learner

`scale` 0 is the weights themselves, above 0 the self-test's perturbed ones. Direct has no checksums of
its own; canary and self-test cover it. It could not be run where it was written, for want of GPUs:
tests/test_carriers.py drives its handshake with a stand-in for vLLM's trainer side.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_srl.learners import call_learners, num_asked
from rllib_srl.runners import Runners
from rllib_srl.weights import Sent

Key = tuple[int, float]  # (version, scale)


class ObjectStore:
    """Carries one packed bundle through Ray's object store.

    Invariant: at most one bundle is kept alive here.
    """

    def __init__(self, learners: LearnerGroup, runners: Runners, sequences: list[list[int]], timeout_s: float) -> None:
        """Take both groups, the canary's token ids and the deadline of each call."""
        self._learners, self._runners = learners, runners
        self._sequences, self._timeout_s = sequences, timeout_s
        self._sent: dict[Key, Sent] = {}
        self.seconds: dict[str, float] = {}

    def deliver(self, version: int, scale: float, ids: Sequence[int]) -> dict[int, Any]:
        """Send weights to some runners; see the module docstring."""
        sent = self._bundle(version, scale)
        self.seconds = sent.seconds
        arguments = {
            "ref": sent.ref,
            "learner_logps": sent.logps,
            "sequences": self._sequences,
            "timeout_s": self._timeout_s,
        }
        return dict(self._runners.each("load_weights", dict.fromkeys(ids, arguments), self._timeout_s))

    def logps(self, version: int, scale: float) -> list[np.ndarray]:
        """Return the learner's log-probs of the canary."""
        return self._bundle(version, scale).logps

    def forget(self) -> None:
        """Free the bundle in the object store."""
        self._sent.clear()

    def _bundle(self, version: int, scale: float) -> Sent:
        if (version, scale) not in self._sent:
            self.forget()
            arguments = [(version, self._sequences, scale)] * num_asked(self._learners)
            what = f"sending weights version {version}"
            self._sent[version, scale] = call_learners(self._learners, "send", arguments, self._timeout_s, what)[0]
        return self._sent[version, scale]


class Direct:
    """Carries weights through vLLM's transfer backends, from GPU memory to GPU memory.

    Invariant: every delivery reaches all runners that were alive at the last `connect`.
    """

    def __init__(
        self,
        learners: LearnerGroup,
        runners: Runners,
        sequences: list[list[int]],
        timeout_s: float,
        kind: str,
        tensor_parallel_size: int,
    ) -> None:
        """Take what `ObjectStore` takes, "nccl" or "ipc", and the GPUs of each engine."""
        self._learners, self._runners = learners, runners
        self._sequences, self._timeout_s = sequences, timeout_s
        self._kind, self._tensor_parallel_size = kind, tensor_parallel_size
        self._logps: dict[Key, list[np.ndarray]] = {}
        self.seconds: dict[str, float] = {}
        self._is_connected = False

    def deliver(self, version: int, scale: float, ids: Sequence[int]) -> dict[int, Any]:
        """Send weights to all runners, and compare the canary on those in `ids`."""
        if not self._is_connected:
            client = RunnersClient(self._runners.actors(), self._tensor_parallel_size, self._timeout_s)
            self._ask("connect", (self._kind, client), "connecting to the engines")
            self._is_connected = True
        start = time.perf_counter()
        logps = self._ask("send_direct", (version, self._sequences, scale), f"sending weights version {version}")
        self.seconds = {"send_s": time.perf_counter() - start}
        self._logps = {(version, scale): logps}
        arguments = {"learner_logps": logps, "sequences": self._sequences}
        return dict(self._runners.each("compare", dict.fromkeys(ids, arguments), self._timeout_s))

    def logps(self, version: int, scale: float) -> list[np.ndarray]:
        """Return the learner's log-probs of the canary."""
        if (version, scale) not in self._logps:
            self._logps = {(version, scale): self._ask("score_at", (self._sequences, scale), "scoring the canary")}
        return self._logps[version, scale]

    def forget(self) -> None:
        """Rendezvous anew before the next delivery: a process group does not survive a member."""
        self._is_connected = False
        self._logps.clear()

    def _ask(self, method: str, arguments: tuple, what: str) -> Any:
        return call_learners(self._learners, method, [arguments], self._timeout_s, what)[0]


class RunnersClient:
    """vLLM's weight-sync client (a structural protocol of four methods) over runner actors.

    A runner's `receive_weights` is a whole update, so start and finish have nothing left to do.
    """

    def __init__(self, actors: Sequence[Any], tensor_parallel_size: int, timeout_s: float) -> None:
        """Take the actors in a fixed order, the workers of each and the deadline of each call."""
        self._actors, self._workers, self._timeout_s = list(actors), tensor_parallel_size, timeout_s
        self.version = 0

    @property
    def world_size(self) -> int:
        """Return the members of the transfer's process group: the learner and every engine worker."""
        return 1 + len(self._actors) * self._workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect each runner; with "nccl" each gets its own place in the process group."""
        infos = [dict(init_info) for _ in self._actors]
        if "rank_offset" in init_info:
            infos = [{**init_info, "rank_offset": 1 + i * self._workers} for i in range(len(infos))]
        calls = [actor.init_transfer.remote(info) for actor, info in zip(self._actors, infos, strict=True)]
        ray.get(calls, timeout=self._timeout_s)

    def start_weight_update(self) -> None:
        """Do nothing; see the class."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let every runner take one whole update."""
        calls = [actor.receive_weights.remote(update_info, self.version) for actor in self._actors]
        ray.get(calls, timeout=self._timeout_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing; see the class."""
