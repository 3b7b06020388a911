"""Measure the diversity of items: how much their rewards vary, and how far they lie from their nearest neighbours.

    groups ──embedder──> vectors ──nearest──> novelty and nearest other item of each

    variance    min(1, 4 S), S the variance of the rewards of its last visit: 1 if half of the episodes succeed
    novelty     mean cosine distance to the `NEIGHBOURS` nearest items, at most 1
    diversity   the mean of the two, in [0, 1] ──> shorter intervals, more draws by `srl`, eviction by `least_diverse`

The k nearest are found exactly, by a product of numpy; beyond 32,768 vectors by faiss, if it is installed, and on a GPU
always. The similarities of a few more candidates than asked for are computed again in float64, and ties are ordered by
id, so that both find the same.

Sources: Jiang et al. 2025, arXiv 2509.04575, section on prioritisation (variance and distance); Douze et al. 2024,
arXiv 2401.08281 (faiss).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from rllib_srl.replay.diversity.embedders import Embedder, normalised
from rllib_srl.replay.items import Tables
from rllib_srl.types import Group

NEIGHBOURS = 8

NUMPY_UP_TO = 32_768  # vectors; a flat index of faiss is slower up to here (docs/LOG.md)
CARD_BYTES = 2 * 2**30  # maximum GPU memory of a search: CUDA's context, the copied part of the vectors, scratch
_PART_BYTES = 2**30  # maximum bytes of vectors on the card at once
_SCRATCH_BYTES = 256 * 2**20
_MARGIN = 8  # candidates beyond k, so that rounding does not decide which k are returned
_MOST_SIMILARITIES = 1 << 24  # held at once: 64 MiB
_resources: list[Any] = []  # faiss's on the GPU, made with the first search; at most one


def check_card() -> None:
    """Raise a ValueError if faiss is built for CPUs, sees no GPU here, or finds something else than numpy."""
    import faiss

    needs = "replay diversity.device = 'gpu'"
    if not hasattr(faiss, "StandardGpuResources"):
        raise ValueError(
            f"{needs}; expected faiss built for GPUs in place of faiss-cpu (pip uninstall faiss-cpu; "
            "pip install 'rllib_srl[faiss-gpu]'), or 'cpu'"
        )
    if not faiss.get_num_gpus():
        raise ValueError(f"{needs}; expected a GPU that the memory's process can see, or 'cpu'")
    vectors_ND = np.random.default_rng(0).standard_normal((256, 16)).astype(np.float32)
    if not np.array_equal(_by_faiss(vectors_ND[:8], vectors_ND, 1, "gpu"), _by_numpy(vectors_ND[:8], vectors_ND, 1)):
        raise ValueError(f"{needs}; faiss finds other neighbours on the GPU than numpy; expected 'cpu' here")


def nearest(
    vectors_QD: np.ndarray,
    ids_N: np.ndarray,
    stored_ND: np.ndarray,
    k: int,
    exclude_Q: Sequence[int] | np.ndarray | None = None,
    device: str = "cpu",
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of the k most similar vectors and their cosine similarities, most similar first.

    Both are [Q, k]; if fewer than k vectors are stored, the rest is -1 and nan. Vectors have norm 1 or 0, of cosine 0;
    the ids of the stored ones are ascending. One id per query is left out, such as its own; -1 leaves nothing out.
    """
    ids_QK, similarity_QK = np.full((len(vectors_QD), k), -1), np.full((len(vectors_QD), k), np.nan)
    if not len(ids_N):
        return ids_QK, similarity_QK
    if vectors_QD.shape[1] != stored_ND.shape[1]:
        raise ValueError(f"vectors have {vectors_QD.shape[1]} numbers; expected {stored_ND.shape[1]}, as those stored")
    num = min(len(ids_N), k + 1 + _MARGIN)
    if device == "gpu" or (len(ids_N) > NUMPY_UP_TO and find_spec("faiss") is not None):
        rows_QM = _by_faiss(vectors_QD, stored_ND, num, device)
    else:
        rows_QM = _by_numpy(vectors_QD, stored_ND, num)
    for q, rows_M in enumerate(rows_QM):
        if exclude_Q is not None:
            rows_M = rows_M[ids_N[rows_M] != exclude_Q[q]]
        exact_M = np.clip(stored_ND[rows_M].astype(np.float64) @ vectors_QD[q].astype(np.float64), -1.0, 1.0)
        order = np.lexsort((ids_N[rows_M], -exact_M))[:k]
        ids_QK[q, : len(order)], similarity_QK[q, : len(order)] = ids_N[rows_M][order], exact_M[order]
    return ids_QK, similarity_QK


def _by_numpy(vectors_QD: np.ndarray, vectors_ND: np.ndarray, num: int) -> np.ndarray:
    """Return the `num` rows with the largest products for each query, unordered, int64 [Q, num]."""
    rows_QM = np.empty((len(vectors_QD), num), np.int64)
    block = max(1, _MOST_SIMILARITIES // len(vectors_ND))
    for start in range(0, len(vectors_QD), block):
        similarity_QN = vectors_QD[start : start + block] @ vectors_ND.T
        rows_QM[start : start + block] = np.argpartition(similarity_QN, -num, axis=1)[:, -num:]
    return rows_QM


def _by_faiss(vectors_QD: np.ndarray, vectors_ND: np.ndarray, num: int, device: str) -> np.ndarray:
    """Return what `_by_numpy` does, by faiss; the vectors are copied to a GPU in parts."""
    import faiss

    search: Any = faiss.knn
    if device == "gpu":
        if not _resources:
            _resources.append(faiss.StandardGpuResources())
            _resources[0].setTempMemory(_SCRATCH_BYTES)
        search = partial(faiss.knn_gpu, _resources[0], vectorsMemoryLimit=_PART_BYTES)
    rows_QM: np.ndarray = search(vectors_QD, vectors_ND, num, metric=faiss.METRIC_INNER_PRODUCT)[1]
    return rows_QM


def diversity(variance_N: np.ndarray, novelty_N: np.ndarray) -> np.ndarray:
    """Return the mean of min(1, 4 S) and the novelty of each item, [N] in [0, 1].

    4 S = 4 p (1 - p) for rewards of 0 and 1; other rewards may have a larger variance, hence the minimum.
    """
    diversity_N: np.ndarray = (np.minimum(1.0, 4.0 * np.asarray(variance_N, np.float64)) + novelty_N) / 2
    return diversity_N


def novelty(similarity_NK: np.ndarray) -> np.ndarray:
    """Return the mean cosine distance of each item to its neighbours, at most 1, [N].

    Similarities are nan where there were fewer than K neighbours. Without neighbours novelty is 1, the distance of
    orthogonal vectors.
    """
    is_there_NK = np.isfinite(similarity_NK)
    num_N = is_there_NK.sum(axis=1)
    total_N = np.where(is_there_NK, 1.0 - similarity_NK, 0.0).sum(axis=1)
    return np.where(num_N > 0, np.minimum(1.0, total_N / np.maximum(num_N, 1)), 1.0)


def measure(
    embedder: Embedder, groups: Sequence[Group], slots: Sequence[int], tables: Tables, device: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors of groups, [P, D], and their novelty among the items in the tables.

    `slots` are those of their own items, -1 where there is none yet.
    """
    vectors_PD = normalised(embedder.embed(groups))
    if not np.isfinite(vectors_PD).all():
        raise ValueError(f"{int((~np.isfinite(vectors_PD)).any(axis=1).sum())} vectors are not finite")
    _, similarity_PK = nearest(vectors_PD, *tables.vectors, NEIGHBOURS, slots, device)
    return vectors_PD, novelty(similarity_PK)
