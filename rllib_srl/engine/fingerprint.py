"""Digests of the outputs of an engine's modules on a fixed input; they detect a stale matrix without rounding noise.

    equal weights in an equal place   ->  equal digests, bit by bit
    another weight                    ->  other digests, block by block

If a module keeps an old matrix through an update, its digests do not change. In bf16 a comparison of policies cannot
detect one stale matrix among hundreds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

BLOCK = 16  # outputs per digest; q, k and v of a stacked projection never share one

Fingerprint = Mapping[str, tuple[int, ...]]


def digests(values: torch.Tensor) -> tuple[int, ...]:
    """Return one digest for every 16 entries of `values`, on any device, along the first dimension."""
    raw = values.detach().contiguous().reshape(len(values), -1).view(torch.uint8).cpu().numpy()
    return tuple(xxhash.xxh3_64_intdigest(raw[start : start + BLOCK]) for start in range(0, len(raw), BLOCK))


def probe(num_features: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the fixed input of a linear layer, [2, num_features], entries +-1."""
    sign = torch.randint(0, 2, (2, num_features), generator=torch.Generator().manual_seed(num_features))
    return (sign * 2 - 1).to(device=device, dtype=dtype)


def unmoved(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Return the modules that have at least one equal block in both."""
    return [name for name, old in before.items() if any(a == b for a, b in zip(old, after[name], strict=True))]


def moved(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Return the modules that differ."""
    return [name for name, old in before.items() if old != after[name]]
