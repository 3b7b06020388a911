"""The learner's side of the verified weight transfer: pack, score, and perturb for the self-test.

    learner 0: send(version, canary) -> (ObjectRef of a WeightBundle, canary log-probs)
    driver:    hands the reference to every runner and compares canaries (weight_sync.py)
"""

from __future__ import annotations

import socket
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
from rllib_srl.engine.sync import WeightBundle, pack, torch_dtype

SELF_TEST_SEED = 7


@dataclass(frozen=True)
class Sent:
    """What the learner sent, and what it makes of the canary.

    Invariant: `logps` are under the weights in the bundle behind `ref`, before they were cast for the engine.
    """

    ref: Any  # ObjectRef of a WeightBundle
    logps: list[np.ndarray]
    seconds: dict[str, float]  # pack_s, put_s, learner_canary_s


class WeightSender:
    """Mixin of the learner that sends its weights.

    Invariant: the weights in training are the same, bit for bit, before and after every method.
    """

    model: torch.nn.Module
    config: Any
    _direct: Any = None  # vLLM's trainer side, once connected
    _client: Any = None

    def score(
        self, sequences: list[list[int]], share_prefixes: bool = False, is_exact: bool = False
    ) -> list[np.ndarray]:
        """See `GRPOTorchLearner.score`."""
        raise NotImplementedError

    def send(self, version: int, sequences: list[list[int]], scale: float = 0.0) -> Sent:
        """Put the weights into the object store, cast to the engine's number format.

        Args:
            version: the number the engine will carry.
            sequences: the canary's token ids.
            scale: 0 sends the weights themselves; above 0 the self-test's perturbed ones.

        """
        with _moved(self.model, scale):
            times = [time.perf_counter()]
            bundle = self._pack(version)
            times.append(time.perf_counter())
            ref = ray.put(bundle)
            times.append(time.perf_counter())
            logps = self.score(sequences)
            times.append(time.perf_counter())
        spent = [end - start for start, end in pairwise(times)]
        return Sent(ref, logps, dict(zip(("pack_s", "put_s", "learner_canary_s"), spent, strict=True)))

    def score_at(self, sequences: list[list[int]], scale: float) -> list[np.ndarray]:
        """Return the canary log-probs under the weights themselves (`scale` 0) or perturbed ones."""
        with _moved(self.model, scale):
            return self.score(sequences)

    def connect(self, kind: str, client: Any) -> None:
        """Rendezvous with the engines through vLLM's own backend; GPUs only.

        Args:
            kind: "nccl" or "ipc".
            client: a `carriers.RunnersClient`.
        """
        from vllm.distributed.weight_transfer.base import ParamMeta
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        if self._direct is not None:
            self._direct.shutdown()
        source = CastSource(self.model, torch_dtype(self.config.compute_dtype), ParamMeta)
        self._client = client
        self._direct = WeightTransferTrainerFactory.trainer_init(
            _trainer_info(kind, client.world_size), client=client, source=source
        )

    def send_direct(self, version: int, sequences: list[list[int]], scale: float) -> list[np.ndarray]:
        """Send the weights from GPU memory to every engine; return the canary log-probs under them."""
        self._client.version = version
        with _moved(self.model, scale):
            self._direct.send_weights()
            return self.score(sequences)

    def _pack(self, version: int) -> WeightBundle:
        return pack(self.model.named_parameters(), version, self.config.compute_dtype)


class CastSource:
    """vLLM's `WeightSource` (duck-typed) over a model: its parameters in the engine's number format."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, describe: Any) -> None:
        """Take the model, the format on the wire, and vLLM's `ParamMeta`."""
        self._model, self._dtype, self._describe = model, dtype, describe

    def metadata(self) -> list[Any]:
        """Describe every parameter, in the order of iteration."""
        return [self._describe(name, self._dtype, tuple(p.shape)) for name, p in self._model.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach().to(self._dtype)


def _trainer_info(kind: str, world_size: int) -> Any:
    if kind == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    # Unpacked: one update call a round, which is what `RunnersClient` maps to one runner call.
    address, port = ray.util.get_node_ip_address(), _free_port()
    return NCCLTrainerInitInfo(rank=0, master_address=address, master_port=port, world_size=world_size, packed=False)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


@contextmanager
def _moved(model: torch.nn.Module, scale: float) -> Iterator[None]:
    """Perturb every parameter inside the block, and put the exact old values back after it."""
    if not scale:
        yield
        return
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        with torch.no_grad():
            for name, tensor in perturbed(kept.items(), scale, SELF_TEST_SEED):
                model.get_parameter(name).copy_(tensor)
        yield
    finally:
        with torch.no_grad():
            for name, tensor in kept.items():
                model.get_parameter(name).copy_(tensor)
