"""Learner's side of the verified weight transfer: pack weights.

    learner 0: send(version)         -> ObjectRef of a WeightBundle
    driver:    passes the reference to every runner, and while the engines load it calls
    learner 0: score_canary(canary)  -> log-probs, for the check of the canary (weights/sync.py)
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ray
import torch

from rllib_srl.engine.sync import WeightBundle, pack_stream
from rllib_srl.learner.model_setup import sent_weights


@dataclass(frozen=True)
class Sent:
    """A bundle of weights in the object store."""

    ref: Any  # ObjectRef of a WeightBundle
    seconds: dict[str, float]  # pack_s, put_s


class WeightSender:
    """Sends the weights of a policy, or only its adapters, to the engines.

    Invariant: no method changes the weights in training; they are equal bit for bit before and after.
    """

    def __init__(
        self, model: torch.nn.Module, compute_dtype: str, is_first: bool, sends_adapter: bool = False
    ) -> None:
        """Set the policy's model.

        Args:
            model: the policy's Hugging Face model.
            compute_dtype: number format of the engines.
            is_first: whether this learner's bundle is used.
            sends_adapter: whether the engines apply the adapters themselves; only these are then sent.
        """
        self._model, self._compute_dtype, self._sends_adapter = model, compute_dtype, sends_adapter
        self._is_first = is_first
        self._bundle: WeightBundle | None = None  # the last one, its buffer is reused; the object store holds a copy

    def send(self, version: int) -> Sent:
        """Put the weights into the object store, cast to the engine's number format, as the given version."""
        times = [time.perf_counter()]
        bundle = self._pack(version)
        times.append(time.perf_counter())
        ref = ray.put(bundle) if bundle is not None else None
        times.append(time.perf_counter())
        spent = [end - start for start, end in pairwise(times)]
        return Sent(ref, dict(zip(("pack_s", "put_s"), spent, strict=True)))

    def _pack(self, version: int) -> WeightBundle | None:
        """Return the bundle to send, None on a learner that only takes part in gathering it."""
        layout, weights = sent_weights(self._model, self._sends_adapter)
        if not self._is_first:
            for _ in weights:
                pass
            return None
        memory = self._bundle.buffer if self._bundle is not None else None
        self._bundle = pack_stream(layout, weights, version, self._compute_dtype, memory)
        return self._bundle
