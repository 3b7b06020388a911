"""Learner's side of the verified weight transfer: pack weights and score the canary.

    learner 0: send(version)               -> ObjectRef of a WeightBundle
    driver:    passes the reference to every runner, and while the engines load it calls
    learner 0: score_sent(version, canary) -> log-probs, for the check of the canary (weights/sync.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import ray
import torch

from rllib_srl.engine.sync import WeightBundle, WeightSyncError, pack_stream, unpack
from rllib_srl.engine.vllm_trainer import open_trainer
from rllib_srl.learner.model_setup import sent_weights
from rllib_srl.learner.sharding import is_spread

CHECKED_STRIDE = 64  # one row in so many of each packed matrix is compared with the weights in training


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
        self,
        model: torch.nn.Module,
        compute_dtype: str,
        score: Callable[..., list[np.ndarray]],
        is_first: bool,
        sends_adapter: bool = False,
    ) -> None:
        """Set the policy's model and how to score with it.

        Args:
            model: the policy's Hugging Face model.
            compute_dtype: number format of the engines.
            score: returns log-probs of token ids under the model, or under other `weights`; see `Scorer.score`.
            is_first: whether this learner's bundle is used.
            sends_adapter: whether the engines apply the adapters themselves; only these are then sent.
        """
        self._model, self._compute_dtype, self._sends_adapter = model, compute_dtype, sends_adapter
        self._score, self._is_first = score, is_first
        self._bundle: WeightBundle | None = None  # the last one, its buffer is reused; the object store holds a copy
        self._trainer: Any = None  # vLLM's trainer side, once connected
        self._client: Any = None

    def send(self, version: int) -> Sent:
        """Put the weights into the object store, cast to the engine's number format, as the given version."""
        times = [time.perf_counter()]
        bundle = self._pack(version)
        times.append(time.perf_counter())
        ref = ray.put(bundle) if bundle is not None else None
        times.append(time.perf_counter())
        spent = [end - start for start, end in pairwise(times)]
        return Sent(ref, dict(zip(("pack_s", "put_s"), spent, strict=True)))

    def score_sent(self, version: int, sequences: list[list[int]]) -> list[np.ndarray]:
        """Return the canary log-probs under the weights, which `send` has just sent as `version`.

        In bfloat16 on a CPU half of a short pass is the cast of the matrices, which `send` has done already. Then the
        pass computes with the matrices in the bundle, which gives the same bits, and part of the bundle is compared
        with the weights in training, because a fault in packing would otherwise reach both sides of the canary.

        Raises:
            WeightSyncError: the bundle does not hold the weights in training; the message names the tensors.
        """
        if self._bundle is None or not self._has_cast_matrices(self._bundle):
            return self._score(sequences)
        check_packed(self._bundle, dict(self._model.named_parameters()), version)
        return self._score(sequences, weights=cast_matrices(self._model, self._bundle))

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

    def send_direct(self, version: int, sequences: list[list[int]]) -> list[np.ndarray]:
        """Send the weights from GPU memory to every engine; return the canary log-probs under them."""
        self._client.version = version
        self._trainer.send_weights()
        return self._score(sequences)

    def _pack(self, version: int) -> WeightBundle | None:
        """Return the bundle of what is sent, None on a learner that only takes part in gathering it."""
        layout, weights = sent_weights(self._model, self._sends_adapter)
        if not self._is_first:
            for _ in weights:
                pass
            return None
        memory = self._bundle.buffer if self._bundle is not None else None
        self._bundle = pack_stream(layout, weights, version, self._compute_dtype, memory)
        return self._bundle

    def _has_cast_matrices(self, bundle: WeightBundle) -> bool:
        """Return whether a bundle holds the model's own parameters, linear layers among them, cast on this CPU."""
        own = dict(self._model.named_parameters())
        is_here = all(
            one.device.type == "cpu" and one.dtype == torch.float32 and not is_spread(one) for one in own.values()
        )
        is_cast = self._compute_dtype == "bfloat16" and own.keys() == {spec.name for spec in bundle.tensors}
        return is_here and is_cast and any(isinstance(layer, torch.nn.Linear) for layer in self._model.modules())


def check_packed(bundle: WeightBundle, parameters: Mapping[str, torch.Tensor], version: int) -> None:
    """Compare one row in 64 of each matrix of a bundle with the parameter, bit for bit, with each version other rows.

    Vectors are compared whole. It finds at once a tensor that was not cast, is another's or is of an older version,
    in whole or in 64 rows in turn.

    Args:
        bundle: of bfloat16 tensors.
        parameters: by name, float32 on the CPU.
        version: that the bundle should have.

    Raises:
        WeightSyncError: the bundle is of another version, or tensors differ; the message names them.
    """
    if bundle.version != version:
        raise WeightSyncError(f"the last bundle is of version {bundle.version}", version)
    rows = slice(version % CHECKED_STRIDE, None, CHECKED_STRIDE)
    wrong = [
        name
        for name, sent in unpack(bundle)
        for at in [rows if sent.dim() > 1 else slice(None)]
        if not _is_same(sent[at], parameters[name].detach()[at].to(torch.bfloat16))
    ]
    if wrong:
        raise WeightSyncError("the packed weights are not those in training", version, wrong)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two bfloat16 tensors are equal bit for bit, but for the bits of what is not a number."""
    if torch.equal(a.view(torch.int16), b.view(torch.int16)):
        return True
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def cast_matrices(model: torch.nn.Module, bundle: WeightBundle) -> dict[str, torch.Tensor]:
    """Return what autocast would cast of a model's linear layers, by name, as views of a bundle without a copy.

    A head that is tied to the embedding is among them; the embedding itself stays in float32, as under autocast.
    """
    own, sent = dict(model.named_parameters()), dict(unpack(bundle))
    name_of = {id(parameter): name for name, parameter in own.items()}
    return {
        f"{path}.{kind}": sent[name_of[id(parameter)]]
        for path, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
        for kind, parameter in layer.named_parameters(recurse=False)
    }
