"""Search for neighbours on a GPU with faiss, in the memory's own process and within its reserved share of the card.

    check_card()                            at the start: faiss has GPU functions, sees a card, is right on it
    nearest_rows(queries, vectors, num)     exact search; the vectors are copied to the card in parts

faiss-gpu brings CUDA 12 beside torch's CUDA 13: two CUDA runtimes in one process if that also uses torch on a GPU; the
memory's process does not. Nothing here ran on a GPU; `scripts/gpu/card_search.py` checks it there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

CARD_BYTES = 2 * 2**30  # what a search takes at most: CUDA's context, the copied part of the vectors, scratch
_PART_BYTES = 2**30  # of vectors on the card at once
_SCRATCH_BYTES = 256 * 2**20
_NEEDS = "replay diversity.device = 'gpu'"
_resources: list[Any] = []  # faiss's, made with the first search; at most one


def check_card() -> None:
    """Check that faiss can search on a GPU of this process.

    Raises:
        ValueError: faiss is built for CPUs, sees no GPU, or computes something else than numpy.
    """
    import faiss

    if not hasattr(faiss, "StandardGpuResources"):
        raise ValueError(
            f"{_NEEDS}; expected faiss built for GPUs in place of faiss-cpu (pip uninstall faiss-cpu; "
            "pip install 'rllib_srl[faiss-gpu]'), or 'cpu'"
        )
    if not faiss.get_num_gpus():
        raise ValueError(f"{_NEEDS}; expected a GPU that the memory's process can see, or 'cpu'")
    vectors_ND = np.random.default_rng(0).standard_normal((256, 16)).astype(np.float32)
    found_Q = nearest_rows(vectors_ND[:8], vectors_ND, 1)[:, 0]
    wanted_Q = (vectors_ND[:8] @ vectors_ND.T).argmax(axis=1)
    if not np.array_equal(found_Q, wanted_Q):
        raise ValueError(f"{_NEEDS}; faiss finds other neighbours on the GPU than numpy; expected 'cpu' here")


def nearest_rows(vectors_QD: np.ndarray, vectors_ND: np.ndarray, num: int) -> np.ndarray:
    """Return the `num` rows with the largest products for each query, int64 [Q, num]; `num` is at most N and 2048."""
    import faiss

    if not _resources:
        _resources.append(faiss.StandardGpuResources())
        _resources[0].setTempMemory(_SCRATCH_BYTES)
    how = {"metric": faiss.METRIC_INNER_PRODUCT, "vectorsMemoryLimit": _PART_BYTES}
    search: Any = faiss.knn_gpu
    rows_QK: np.ndarray = search(_resources[0], vectors_QD, vectors_ND, num, **how)[1]
    return rows_QK
