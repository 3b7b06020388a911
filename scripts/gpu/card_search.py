"""Check the memory's search on a GPU: beside torch's CUDA runtime in one process, and against the CPU.

    python -m scripts.gpu.card_search            65,536 and 262,144 vectors of 576 numbers

Prints one JSON line per size: share of neighbours that equal those of the exact search on the CPU, and milliseconds.
Exit status 1 if torch or faiss computes something wrong after the other has used the card.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np
import torch

from rllib_srl.replay.diversity.card import check_card
from rllib_srl.replay.diversity.neighbours import Neighbours

SIZES, DIM, NUM_QUERIES, K = (65_536, 262_144), 576, 128, 8


def torch_is_right() -> bool:
    """Return whether a product of torch on its device is that of numpy."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.arange(64 * 64, dtype=torch.float64).reshape(64, 64) / 4096
    return bool(torch.allclose((a.to(device) @ a.to(device)).cpu(), a @ a))


def figures(num: int, dim: int, device: str) -> dict[str, float]:
    """Return agreement with the CPU and the time of a search of 128 queries on both."""
    vectors_ND = np.random.default_rng(num).standard_normal((num, dim)).astype(np.float32)
    found, spent_ms = {}, {}
    for where in ("cpu", device):
        index = Neighbours(dim, exact_up_to=num, device=where)
        index.set(np.arange(num), vectors_ND)
        index.nearest(vectors_ND[:1], K)
        start = time.perf_counter()
        found[where] = index.nearest(vectors_ND[:NUM_QUERIES], K)[0]
        spent_ms[where] = 1e3 * (time.perf_counter() - start)
    same = float((found["cpu"] == found[device]).mean())
    return {"num": num, "same": same, "cpu_ms": spent_ms["cpu"], "device_ms": spent_ms[device]}


def main() -> int:
    """Print the figures; `--short` runs on the CPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="small, on the CPU")
    args = parser.parse_args()
    is_right = torch_is_right()
    if not args.short:
        check_card()
    for num in (2048,) if args.short else SIZES:
        one = figures(num, 32 if args.short else DIM, "cpu" if args.short else "gpu")
        is_right = is_right and one["same"] > 0.999 and torch_is_right()
        print(json.dumps(one), flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
