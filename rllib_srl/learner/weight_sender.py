"""Learner's side of the verified weight transfer: pack weights, score the canary, perturb weights for the self-test.

    learner 0: send(version, canary) -> (ObjectRef of a WeightBundle, canary log-probs)
    driver:    passes the reference to every runner and checks the canary (weights/sync.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import ray
import torch

from rllib_srl.engine.adapters import adapter_tensors, perturbed_adapters
from rllib_srl.engine.canary import perturbed
from rllib_srl.engine.sync import WeightBundle, pack_stream
from rllib_srl.engine.vllm_trainer import open_trainer
from rllib_srl.learner.fsdp.sharding import local
from rllib_srl.learner.model_setup import sent_weights

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
    """Sends the weights of a policy, or only its adapters, to the engines.

    Invariant: no method changes the weights in training; they are equal bit for bit before and after.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compute_dtype: str,
        score: Callable[[list[list[int]]], list[np.ndarray]],
        is_first: bool,
        sends_adapter: bool = False,
    ) -> None:
        """Set the policy's model and how to score with it.

        Args:
            model: the policy's Hugging Face model.
            compute_dtype: number format of the engines.
            score: returns log-probs of token ids under the model; see `Scorer.score`.
            is_first: whether this learner's bundle is used.
            sends_adapter: whether the engines apply the adapters themselves; only these are then sent.
        """
        self._model, self._compute_dtype, self._sends_adapter = model, compute_dtype, sends_adapter
        self._score, self._is_first = score, is_first
        self._buffer: np.ndarray | None = None  # of the last bundle, reused; the object store holds a copy
        self._trainer: Any = None  # vLLM's trainer side, once connected
        self._client: Any = None

    def send(self, version: int, sequences: list[list[int]], scale: float = 0.0) -> Sent:
        """Put the weights into the object store, cast to the engine's number format.

        Args:
            version: weight version that the engine will report.
            sequences: token ids of the canary.
            scale: 0 sends the weights; above 0 sends weights perturbed for the self-test.
        """
        with self._moved(scale):
            times = [time.perf_counter()]
            bundle = self._pack(version)
            times.append(time.perf_counter())
            ref = ray.put(bundle) if bundle is not None else None
            times.append(time.perf_counter())
            logps = self._score(sequences)
            times.append(time.perf_counter())
        spent = [end - start for start, end in pairwise(times)]
        return Sent(ref, logps, dict(zip(("pack_s", "put_s", "learner_canary_s"), spent, strict=True)))

    def score_at(self, sequences: list[list[int]], scale: float) -> list[np.ndarray]:
        """Return the canary log-probs under the weights (`scale` 0) or under perturbed weights."""
        with self._moved(scale):
            return self._score(sequences)

    def connect(self, kind: str, client: Any) -> None:
        """Connect to the engines through vLLM's own transfer backend; GPUs only.

        Args:
            kind: "nccl" or "ipc".
            client: a `transports.RunnersClient`.
        """
        if self._trainer is not None:
            self._trainer.shutdown()
        self._client = client
        address = ray.util.get_node_ip_address()
        self._trainer = open_trainer(kind, self._model, self._compute_dtype, client, address)

    def send_direct(self, version: int, sequences: list[list[int]], scale: float) -> list[np.ndarray]:
        """Send the weights from GPU memory to every engine; return the canary log-probs under them."""
        self._client.version = version
        with self._moved(scale):
            self._trainer.send_weights()
            return self._score(sequences)

    def _pack(self, version: int) -> WeightBundle | None:
        """Return the bundle of what is sent, None on a learner that only takes part in gathering it."""
        layout, weights = sent_weights(self._model, self._sends_adapter)
        if not self._is_first:
            for _ in weights:
                pass
            return None
        bundle = pack_stream(layout, weights, version, self._compute_dtype, self._buffer)
        self._buffer = bundle.buffer
        return bundle

    @contextmanager
    def _moved(self, scale: float) -> Iterator[None]:
        """Perturb what is sent inside the block and restore the exact old values after it."""
        if not scale:
            yield
            return
        named = adapter_tensors(self._model) if self._sends_adapter else self._model.named_parameters()
        own = {name: local(parameter) for name, parameter in named}
        kept = {name: part.clone() for name, part in own.items()}
        try:
            for name, tensor in self._perturbed(kept, scale):
                own[name].copy_(tensor)
            yield
        finally:
            for name, tensor in kept.items():
                own[name].copy_(tensor)

    def _perturbed(self, kept: dict[str, torch.Tensor], scale: float) -> Iterator[tuple[str, torch.Tensor]]:
        if self._sends_adapter:
            return perturbed_adapters(self._model, scale, SELF_TEST_SEED)
        return perturbed(kept.items(), scale, SELF_TEST_SEED)
