"""Learner's side of the verified weight transfer: pack weights, score the canary, perturb weights for the self-test.

    learner 0: send(version, canary) -> (ObjectRef of a WeightBundle, canary log-probs)
    driver:    passes the reference to every runner and checks the canary (weights/sync.py)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import ray
import torch

from rllib_srl.engine.canary import perturbed
from rllib_srl.engine.sync import WeightBundle, pack
from rllib_srl.engine.vllm_trainer import open_trainer
from rllib_srl.learner.fsdp.sharding import local

SELF_TEST_SEED = 7


@dataclass(frozen=True)
class Sent:
    """A bundle of weights and the learner's log-probs of the canary.

    Invariant: `logps` are computed with the bundle's weights before the cast to the engine's number format.
    """

    ref: Any  # ObjectRef of a WeightBundle
    logps: list[np.ndarray]
    seconds: dict[str, float]  # pack_s, put_s, learner_canary_s


class WeightSender:
    """Weight transfer of a learner (mixin).

    Invariant: no method changes the weights in training; they are equal bit for bit before and after.
    """

    model: torch.nn.Module
    config: Any
    _memory: np.ndarray | None = None  # buffer of the last bundle, reused; the object store holds a copy
    _direct: Any = None  # vLLM's trainer side, once connected
    _client: Any = None

    def score(
        self, sequences: list[list[int]], share_prefixes: bool = False, is_exact: bool = False
    ) -> list[np.ndarray]:
        """See `GRPOTorchLearner.score`."""
        raise NotImplementedError

    def policy_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Fitted.policy_weights`."""
        raise NotImplementedError

    def is_first(self) -> bool:
        """See `Fitted.is_first`."""
        raise NotImplementedError

    def send(self, version: int, sequences: list[list[int]], scale: float = 0.0) -> Sent:
        """Put the weights into the object store, cast to the engine's number format.

        Args:
            version: weight version that the engine will report.
            sequences: token ids of the canary.
            scale: 0 sends the weights; above 0 sends weights perturbed for the self-test.
        """
        with _moved(self.model, scale):
            times = [time.perf_counter()]
            bundle = self._pack(version)
            times.append(time.perf_counter())
            ref = ray.put(bundle) if self.is_first() else None
            times.append(time.perf_counter())
            logps = self.score(sequences)
            times.append(time.perf_counter())
        spent = [end - start for start, end in pairwise(times)]
        return Sent(ref, logps, dict(zip(("pack_s", "put_s", "learner_canary_s"), spent, strict=True)))

    def score_at(self, sequences: list[list[int]], scale: float) -> list[np.ndarray]:
        """Return the canary log-probs under the weights (`scale` 0) or under perturbed weights."""
        with _moved(self.model, scale):
            return self.score(sequences)

    def connect(self, kind: str, client: Any) -> None:
        """Connect to the engines through vLLM's own transfer backend; GPUs only.

        Args:
            kind: "nccl" or "ipc".
            client: a `transports.RunnersClient`.
        """
        if self._direct is not None:
            self._direct.shutdown()
        self._client = client
        address = ray.util.get_node_ip_address()
        self._direct = open_trainer(kind, self.model, self.config.compute_dtype, client, address)

    def send_direct(self, version: int, sequences: list[list[int]], scale: float) -> list[np.ndarray]:
        """Send the weights from GPU memory to every engine; return the canary log-probs under them."""
        self._client.version = version
        with _moved(self.model, scale):
            self._direct.send_weights()
            return self.score(sequences)

    def _pack(self, version: int) -> WeightBundle:
        bundle = pack(self.policy_weights(), version, self.config.compute_dtype, self._memory)
        self._memory = bundle.buffer
        return bundle


@contextmanager
def _moved(model: torch.nn.Module, scale: float) -> Iterator[None]:
    """Perturb every parameter inside the block and restore the exact old values after it."""
    if not scale:
        yield
        return
    own = {name: local(parameter) for name, parameter in model.named_parameters()}
    kept = {name: part.clone() for name, part in own.items()}
    try:
        for name, tensor in perturbed(kept.items(), scale, SELF_TEST_SEED):
            own[name].copy_(tensor)
        yield
    finally:
        for name, tensor in kept.items():
            own[name].copy_(tensor)
