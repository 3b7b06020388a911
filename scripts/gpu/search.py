"""Time the memory's search for neighbours: faiss on the card (`--short`: on the CPU) against numpy's product.

    python -m scripts.gpu.search

256 queries for 8 neighbours among vectors of 384 numbers. Exit status 1 if the two find other neighbours.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

import numpy as np

from rllib_srl.replay.diversity import neighbours
from rllib_srl.replay.diversity.embedders import normalised

DIM, QUERIES, K = 384, 256, 8


def timed(device: str, numpy_up_to: int, vectors_ND: np.ndarray, queries_QD: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the neighbours, and the seconds of the fastest of three searches."""
    neighbours.NUMPY_UP_TO = numpy_up_to
    ids_N, seconds = np.arange(len(vectors_ND)), []
    for _ in range(3):
        start = time.perf_counter()
        ids_QK, _ = neighbours.nearest(queries_QD, ids_N, vectors_ND, K, device=device)
        seconds.append(time.perf_counter() - start)
    return ids_QK, min(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare both; return the exit status."""
    parser = argparse.ArgumentParser(description="Time the search for neighbours.")
    parser.add_argument("--short", action="store_true", help="faiss on the CPU, fewer vectors")
    is_short = parser.parse_args(argv).short
    if not is_short:
        neighbours.check_card()
    rng, is_same = np.random.default_rng(0), True
    figures: dict[str, float] = {}
    for num in (2048, 8192) if is_short else (32_768, 262_144):
        vectors_ND, queries_QD = (normalised(rng.standard_normal((size, DIM))) for size in (num, QUERIES))
        by_numpy, numpy_s = timed("cpu", sys.maxsize, vectors_ND, queries_QD)
        by_faiss, faiss_s = timed("cpu" if is_short else "gpu", 0, vectors_ND, queries_QD)
        is_same &= bool(np.array_equal(by_numpy, by_faiss))
        figures |= {f"numpy_ms_{num}": round(1e3 * numpy_s, 1), f"faiss_ms_{num}": round(1e3 * faiss_s, 1)}
    print(json.dumps({**figures, "same": is_same}))
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
