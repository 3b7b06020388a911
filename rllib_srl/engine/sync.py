"""Pack weights into one checksummed buffer, and verify and unpack it on the engine's side.

    learner:   pack(named_parameters, version, dtype) -> WeightBundle      one buffer, one checksum per tensor
    transport: `rllib_srl.weights` moves the bundle (one `ray.put`, zero-copy `get`)
    engine:    verify(bundle, expected) -> load each of unpack(bundle)     receipt

A verified receipt proves nothing about the policy: an engine may keep a prepacked copy of an old matrix, or load a
matrix into the wrong place. `rllib_srl.engine.canary` compares the two policies on fixed text.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

ALIGNMENT = 64  # bytes; one cache line, and sufficient for the view of every dtype
_NUM_THREADS = min(4, os.cpu_count() or 1)


class WeightSyncError(RuntimeError):
    """Weights did not arrive intact, or the engine does not compute with them."""

    def __init__(self, message: str, version: int, tensors: Sequence[str] = ()) -> None:
        """Store one line of `message`, the `version` that failed and the names of the `tensors` at fault."""
        names = ", ".join(tensors[:8]) + (f" and {len(tensors) - 8} more" if len(tensors) > 8 else "")
        super().__init__(f"weights version {version}: {message}" + (f" [{names}]" if names else ""))
        self.message, self.version, self.tensors = message, version, tuple(tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, which a Ray actor's reply needs."""
        return type(self), (self.message, self.version, self.tensors)


@dataclass(frozen=True)
class TensorSpec:
    """The location of one tensor in the buffer.

    Invariant: `num_bytes` is the size of `shape` in `dtype`; `checksum` is the xxh3_64 of those bytes.
    """

    name: str
    dtype: str  # torch's name without the "torch."
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    checksum: int


@dataclass(frozen=True)
class WeightBundle:
    """All weights of one version in one contiguous buffer.

    Invariant: `verify` passes on every bundle from `pack`; `buffer` may be read-only shared memory.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    buffer: np.ndarray  # uint8


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype called `name`, "float32" or "bfloat16" for weights.

    Raises:
        ValueError: if torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f'dtype = {name!r}; expected the name of a torch dtype such as "float32" or "bfloat16"')
    return dtype


def pack(
    named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, dtype: str, memory: np.ndarray | None = None
) -> WeightBundle:
    """Cast the weights to the engine's dtype and concatenate them into one buffer.

    A tensor that shares its memory with an earlier one (a tied head) is packed once, under the first name.

    Args:
        named_tensors: as from `named_parameters()`, on any device, unsharded.
        version: version of these weights.
        dtype: floating-point tensors are cast to it; an engine refuses weights of another dtype than its own.
        memory: the buffer of an earlier bundle; overwritten if its size matches: allocation costs more than packing.
    """
    kept: list[tuple[str, torch.Tensor]] = []
    seen = set()
    for name, tensor in named_tensors:
        source = tensor.detach()
        place = (source.device, source.data_ptr(), source.shape, source.stride())
        if not source.numel() or place not in seen:
            kept.append((name, source))
        seen.add(place)
    layout = [(name, source.shape, source.dtype) for name, source in kept]
    return pack_stream(layout, kept, version, dtype, memory)


Layout = Sequence[tuple[str, Sequence[int], torch.dtype]]  # name, shape and dtype of each tensor


def pack_stream(
    layout: Layout,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    version: int,
    dtype: str,
    memory: np.ndarray | None = None,
) -> WeightBundle:
    """Pack tensors that exist one at a time, such as gathered shards: at most four are held at once.

    No two of them share memory; the other arguments are those of `pack`.

    Raises:
        ValueError: the tensors are not those of the layout.
    """
    target, specs = torch_dtype(dtype), []
    offset = 0
    for name, shape, tensor_dtype in layout:
        kind = target if tensor_dtype.is_floating_point else tensor_dtype
        num_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        specs.append((name, str(kind).removeprefix("torch."), tuple(shape), offset, num_bytes))
        offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    buffer = memory if memory is not None and memory.size == offset else np.empty(offset, np.uint8)
    raw = torch.from_numpy(buffer)

    def fill(spec: tuple[str, str, tuple[int, ...], int, int], source: torch.Tensor) -> TensorSpec:
        start, end = spec[3], spec[3] + spec[4]
        to = _view(raw[start:end], spec[1], spec[2])
        # From a GPU, `copy_` alone would move the tensor in its own format and cast it on the CPU.
        to.copy_(source.to(to.dtype) if source.is_cuda else source)
        buffer[end : end + -end % ALIGNMENT] = 0  # equal weights give equal buffers
        return TensorSpec(*spec, checksum=xxhash.xxh3_64_intdigest(buffer[start:end]))

    filled: list[Future[TensorSpec]] = []
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for spec, (name, tensor) in zip(specs, named_tensors, strict=True):
            if name != spec[0] or tuple(tensor.shape) != spec[2]:
                raise ValueError(f"tensor {name!r} {tuple(tensor.shape)}; expected {spec[0]!r} {spec[2]}")
            if len(filled) >= _NUM_THREADS:
                filled[-_NUM_THREADS].result()  # the oldest that may be unfinished
            filled.append(pool.submit(fill, spec, tensor.detach()))
            del tensor
    return WeightBundle(version, tuple(future.result() for future in filled), buffer)


def verify(bundle: WeightBundle, expected: Mapping[str, Sequence[int]] | None = None, dtype: str | None = None) -> None:
    """Check that `bundle` arrived intact and fits the engine's model.

    Args:
        bundle: the received bundle.
        expected: name and shape of every tensor the engine needs; None checks the receipt only.
        dtype: the engine's dtype; None accepts any.

    Raises:
        WeightSyncError: the message names every damaged, missing or unknown tensor and every wrong shape or dtype.
    """
    names = [spec.name for spec in bundle.tensors]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise WeightSyncError("a tensor name occurs twice", bundle.version, twice)
    if expected is not None:
        _verify_fit(bundle, expected, dtype)
    if len(bundle.tensors) == 1:  # threads would cost more than the checksum
        is_intact = [_is_intact(bundle.buffer, bundle.tensors[0])]
    else:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            is_intact = list(pool.map(lambda spec: _is_intact(bundle.buffer, spec), bundle.tensors))
    if damaged := [name for name, ok in zip(names, is_intact, strict=True) if not ok]:
        raise WeightSyncError("the received bytes differ from those sent", bundle.version, damaged)


def unpack(bundle: WeightBundle) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (name, tensor) without copying.

    The tensors are views: writing to one crashes the process when the buffer is Ray's read-only shared memory.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        raw = torch.frombuffer(bundle.buffer, dtype=torch.uint8) if bundle.buffer.size else torch.empty(0).byte()
    for spec in bundle.tensors:
        yield spec.name, _view(raw[spec.offset : spec.offset + spec.num_bytes], spec.dtype, spec.shape)


def _view(raw: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return raw.view(torch_dtype(dtype)).view(shape)


def _verify_fit(bundle: WeightBundle, expected: Mapping[str, Sequence[int]], dtype: str | None) -> None:
    got = {spec.name: spec for spec in bundle.tensors}
    errors = {
        "tensors are missing": [name for name in expected if name not in got],
        "the engine's model has no such tensors": [name for name in got if name not in expected],
        "shapes differ from those of the engine's tensors": [
            name for name, shape in expected.items() if name in got and got[name].shape != tuple(shape)
        ],
        f"expected {dtype}, the engine's dtype: pack(..., dtype={dtype!r}) casts": [
            name
            for name, spec in got.items()
            if dtype and torch_dtype(spec.dtype).is_floating_point and spec.dtype != dtype
        ],
    }
    if mismatches := {error: names for error, names in errors.items() if names}:
        tensors = [name for names in mismatches.values() for name in names]
        raise WeightSyncError("; ".join(mismatches), bundle.version, tensors)


def _is_intact(buffer: np.ndarray, spec: TensorSpec) -> bool:
    needed = int(np.prod(spec.shape, dtype=np.int64)) * torch_dtype(spec.dtype).itemsize
    end = spec.offset + spec.num_bytes
    if spec.num_bytes != needed or spec.offset % ALIGNMENT or spec.offset < 0 or end > buffer.size:
        return False
    return xxhash.xxh3_64_intdigest(buffer[spec.offset : end]) == spec.checksum
