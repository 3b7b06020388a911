"""A backend of vLLM's weight-transfer API that loads a `WeightBundle` from this machine's memory.

    start_weight_update() -> update_weights({"handle"}) -> finish_weight_update()      vLLM's own three calls
                                        |
    offers(bundle) -> handles ----------+      one process: the bundle itself, by reference
                                               several workers: one small block of POSIX shared memory, filled again
                                               for each part of the bundle, one update call per part

vLLM's own backends move data between CUDA devices only. Importing this module imports vLLM.

Traps (vLLM 0.32), each covered by a test:
1. The base class ends `update_weights` with `torch.accelerator.synchronize()`, which raises without an accelerator.
2. On the CPU every linear layer computes with a prepacked copy of its weight. The layerwise reload packs it again,
   except for a head tied to the embedding: that layer receives no tensor and keeps the old matrix.
3. A layer with missing tensors is filled from uninitialised memory: call `verify` against the model first.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rllib_srl.engine.canary import noise
from rllib_srl.engine.fingerprint import digests, probe
from rllib_srl.engine.sync import TensorSpec, WeightBundle, torch_dtype, unpack
from rllib_srl.engine.vllm_adapter import AdapterWorker

BACKEND = "object_store"

_reload_log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
_offered: dict[str, WeightBundle] = {}
_handles = itertools.count()


@dataclass
class BundleInitInfo(WeightTransferInitInfo):
    """Empty: no connection is needed."""


@dataclass
class BundleUpdateInfo(WeightTransferUpdateInfo):
    """The location of the bundle.

    Invariant: `handle` is a key of `_offered` in this process or, with `specs`, the name of a shared memory block.
    """

    handle: str
    version: int
    specs: list[TensorSpec] | None = None


PART_BYTES = 256 * 2**20  # shared memory for several workers; a larger tensor gets a block of its size


def parts_of(bundle: WeightBundle, num_bytes: int = PART_BYTES) -> list[list[TensorSpec]]:
    """Return the tensors of a bundle in order, in parts of at most `num_bytes` of its buffer or of one tensor."""
    parts: list[list[TensorSpec]] = []
    for spec in bundle.tensors:
        if not parts or spec.offset + spec.num_bytes - parts[-1][0].offset > num_bytes:
            parts.append([])
        parts[-1].append(spec)
    return parts


def offers(bundle: WeightBundle, *, is_one_process: bool) -> Generator[dict[str, Any]]:
    """Make a bundle accessible to the workers; yield the update info of each part, which is valid until the next one.

    Parts are copied to shared memory unless the only worker runs in this process.
    """
    if is_one_process:
        handle = f"bundle-{next(_handles)}"
        _offered[handle] = bundle
        try:
            yield {"handle": handle, "version": bundle.version}
        finally:
            del _offered[handle]
        return
    parts = parts_of(bundle)
    sizes = [part[-1].offset + part[-1].num_bytes - part[0].offset for part in parts]
    block = shared_memory.SharedMemory(create=True, size=max([1, *sizes]))
    try:
        for part, size in zip(parts, sizes, strict=True):
            start = part[0].offset
            np.ndarray(size, np.uint8, block.buf)[:] = bundle.buffer[start : start + size]
            specs = [replace(spec, offset=spec.offset - start) for spec in part]
            yield {"handle": block.name, "version": bundle.version, "specs": specs}
    finally:
        block.close()
        block.unlink()


def received(update_info: BundleUpdateInfo) -> WeightBundle:
    """Return an offered bundle, or one part of it."""
    if update_info.specs is None:
        return _offered[update_info.handle]
    block = shared_memory.SharedMemory(update_info.handle)
    try:
        # Copied, because the layerwise reload keeps the tensors of a layer until it is complete, in a later part.
        buffer = np.ndarray(block.size, np.uint8, block.buf)[: _end(update_info.specs)].copy()
    finally:
        block.close()
    return WeightBundle(update_info.version, tuple(update_info.specs), buffer)


class BundleTransferEngine(WeightTransferEngine[BundleInitInfo, BundleUpdateInfo]):
    """The worker's side: loads an offered bundle through vLLM's layerwise reload.

    Invariant: after `finish_weight_update` no layer computes with an earlier weight or refers to the bundle.
    """

    init_info_cls = BundleInitInfo
    update_info_cls = BundleUpdateInfo

    def init_transfer_engine(self, init_info: BundleInitInfo) -> None:
        """Do nothing: the bundle needs no connection."""

    def start_weight_update(self) -> None:
        """Prepare the layers for loading."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the bundle; unlike the base class, do not synchronise an accelerator on a CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BundleUpdateInfo) -> None:
        """Load every tensor of the bundle, or of one part of it."""
        self.model.load_weights(unpack(received(update_info)))

    def finish_weight_update(self) -> None:
        """Finish the reload and prepack tied heads again."""
        finish_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_heads(self.model)

    def shutdown(self) -> None:
        """Do nothing: there are no resources to release."""


class WorkerExtension(AdapterWorker):
    """Methods that vLLM adds to each of its workers; importing it registers the backend there."""

    model_runner: Any  # vLLM's, as is `device`
    device: torch.device

    def load_noise(self, shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
        """Load noise into every tensor of the model, as an update loads weights."""
        model = self.model_runner.get_model()
        initialize_layerwise_reload(model)
        model.load_weights(noise(shapes, torch_dtype(dtype)))
        finish_reload(model, self.model_runner.model_config)
        if self.device.type == "cpu":
            repack_heads(model)

    @torch.inference_mode()
    def fingerprint(self) -> dict[str, tuple[int, ...]]:
        """Return digests of each linear layer's output for a fixed input, and of all parameters.

        The output is computed as in the model, from the prepacked copy if there is one.
        """
        prints = {}
        for name, layer in self.model_runner.get_model().named_modules():
            # Rows that pad the vocabulary belong to no tensor.
            rows = layer.shard_indices.num_org_elements if isinstance(layer, VocabParallelEmbedding) else None
            if isinstance(layer, LinearBase | ParallelLMHead):
                prints[f"{name} (answer)"] = digests(_answer(layer, self.device).T[:rows])
            for kind, parameter in layer.named_parameters(recurse=False):
                if parameter.numel():  # a prepacked layer may have dropped its parameter
                    prints[f"{name}.{kind}"] = digests(parameter[:rows])
        return prints

    def receive_adapter(self, update_info: dict[str, Any]) -> None:
        """Keep an offered adapter, or one part of it, until `load_adapter`."""
        self.keep_adapter(unpack(received(BundleUpdateInfo(**update_info))))

    def reseed(self, seed: int) -> None:
        """Reseed the generators that this worker samples from."""
        torch.manual_seed(seed)


def finish_reload(model: torch.nn.Module, model_config: Any) -> None:
    """End a layerwise reload, without vLLM's warnings about layers that have no separate tensors.

    Those are rotary caches and tied heads; `verify` has found no tensor missing.
    """
    _reload_log.addFilter(_is_news)
    try:
        finalize_layerwise_reload(model, model_config)
    finally:
        _reload_log.removeFilter(_is_news)


def repack_heads(model: torch.nn.Module) -> None:
    """Prepack the weight of each head again, from the weight that it shares with the embedding."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _end(specs: Sequence[TensorSpec]) -> int:
    return max((spec.offset + spec.num_bytes for spec in specs), default=0)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().endswith("Failed to load weights")


def _answer(layer: Any, device: torch.device) -> torch.Tensor:
    """Return the layer's output for the probe, [2, outputs]."""
    is_head = isinstance(layer, ParallelLMHead)
    num_features = layer.embedding_dim if is_head else layer.input_size_per_partition
    answer: torch.Tensor = layer.quant_method.apply(layer, probe(num_features, layer.params_dtype, device), layer.bias)
    return answer


# By path, so that a registry inherited by a forked worker resolves to that process's own class.
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, __name__, BundleTransferEngine.__name__)
