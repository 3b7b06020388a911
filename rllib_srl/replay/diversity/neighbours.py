"""Search the k nearest of unit vectors, exactly: a product of numpy; beyond 32,768 vectors, or on a GPU, faiss.

Results do not depend on the order of insertions: a vector lies in the row of its id, the similarities of a few more
candidates than asked for are computed again in float64, and ties are ordered by id.

faiss-gpu brings CUDA 12, torch CUDA 13: two CUDA runtimes in a process that uses both on a GPU; the memory's process
does not. Nothing here ran on a GPU.

Source: Douze et al. 2024, arXiv 2401.08281 (faiss).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from rllib_srl.replay.diversity.embedders import normalised

NUMPY_UP_TO = 32_768  # vectors; a flat index of faiss is slower up to here (docs/LOG.md)
CARD_BYTES = 2 * 2**30  # what a search takes of a GPU at most: CUDA's context, the copied part of the vectors, scratch
_PART_BYTES = 2**30  # of vectors on the card at once
_SCRATCH_BYTES = 256 * 2**20
_MARGIN = 8  # candidates beyond k, so that rounding does not decide which k are returned
_MOST_SIMILARITIES = 1 << 24  # held at once: 64 MiB
_resources: list[Any] = []  # faiss's on the GPU, made with the first search; at most one


def check_card() -> None:
    """Check that faiss can search on a GPU of this process.

    Raises:
        ValueError: faiss is built for CPUs, sees no GPU, or computes something else than numpy.
    """
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


class Neighbours:
    """A set of unit vectors by id, which are small integers. Invariant: every result is exact."""

    def __init__(self, dim: int, device: str = "cpu") -> None:
        """Create an empty set of vectors of `dim` numbers, searched on "cpu" or "gpu"."""
        self._device = device
        self._vectors_ND = np.zeros((0, dim), np.float32)
        self._is_stored_N = np.zeros(0, bool)

    def __len__(self) -> int:
        return int(self._is_stored_N.sum())

    def ids(self) -> np.ndarray:
        return np.flatnonzero(self._is_stored_N)

    def set(self, ids_K: Sequence[int] | np.ndarray, vectors_KD: np.ndarray) -> None:
        """Store vectors, normalised, in place of those under the same ids; zero vectors are at distance 1 from all.

        Raises:
            ValueError: vectors of another dimension, or not finite.
        """
        vectors_KD = self._checked(vectors_KD)
        ids_K = np.asarray(ids_K, np.int64)
        if (size := int(ids_K.max(initial=-1)) + 1) > len(self._is_stored_N):
            more = max(size, 2 * len(self._is_stored_N)) - len(self._is_stored_N)
            self._vectors_ND = np.pad(self._vectors_ND, ((0, more), (0, 0)))
            self._is_stored_N = np.pad(self._is_stored_N, (0, more))
        self._vectors_ND[ids_K], self._is_stored_N[ids_K] = vectors_KD, True

    def remove(self, ids_K: Sequence[int] | np.ndarray) -> None:
        """Remove the vectors of some ids, where they have one."""
        ids_K = np.asarray(ids_K, np.int64)
        self._is_stored_N[ids_K[ids_K < len(self._is_stored_N)]] = False

    def nearest(
        self, vectors_QD: np.ndarray, k: int, exclude_Q: Sequence[int] | np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the k most similar vectors and their cosine similarities, most similar first.

        Both are [Q, k]; if fewer than k vectors are stored, the rest is -1 and nan.

        Args:
            vectors_QD: queries, of any norm.
            k: at least 1.
            exclude_Q: one id per query that is left out, such as its own; -1 leaves nothing out.
        """
        vectors_QD, ids_N = self._checked(vectors_QD), self.ids()
        ids_QK, similarity_QK = np.full((len(vectors_QD), k), -1), np.full((len(vectors_QD), k), np.nan)
        if not len(ids_N):
            return ids_QK, similarity_QK
        stored_ND, num = self._vectors_ND[ids_N], min(len(ids_N), k + 1 + _MARGIN)
        if self._device == "gpu" or len(ids_N) > NUMPY_UP_TO:
            rows_QM = _by_faiss(vectors_QD, stored_ND, num, self._device)
        else:
            rows_QM = _by_numpy(vectors_QD, stored_ND, num)
        for q, rows_M in enumerate(rows_QM):
            if exclude_Q is not None:
                rows_M = rows_M[ids_N[rows_M] != exclude_Q[q]]
            exact_M = np.clip(stored_ND[rows_M].astype(np.float64) @ vectors_QD[q].astype(np.float64), -1.0, 1.0)
            order = np.lexsort((ids_N[rows_M], -exact_M))[:k]
            ids_QK[q, : len(order)], similarity_QK[q, : len(order)] = ids_N[rows_M][order], exact_M[order]
        return ids_QK, similarity_QK

    def _checked(self, vectors_KD: np.ndarray) -> np.ndarray:
        vectors_KD = np.asarray(vectors_KD)
        dim = self._vectors_ND.shape[1]
        if vectors_KD.ndim != 2 or vectors_KD.shape[1] != dim:
            raise ValueError(f"vectors have shape {vectors_KD.shape}; expected rows of {dim}")
        if not np.isfinite(vectors_KD).all():
            raise ValueError(f"{int((~np.isfinite(vectors_KD)).any(axis=1).sum())} vectors are not finite")
        return normalised(vectors_KD)


def _by_numpy(vectors_QD: np.ndarray, vectors_ND: np.ndarray, num: int) -> np.ndarray:
    """Return the `num` rows with the largest products for each query, unordered, int64 [Q, num]."""
    rows_QM = np.empty((len(vectors_QD), num), np.int64)
    block = max(1, _MOST_SIMILARITIES // len(vectors_ND))
    for start in range(0, len(vectors_QD), block):
        similarity_QN = vectors_QD[start : start + block] @ vectors_ND.T
        rows_QM[start : start + block] = np.argpartition(similarity_QN, -num, axis=1)[:, -num:]
    return rows_QM


def _by_faiss(vectors_QD: np.ndarray, vectors_ND: np.ndarray, num: int, device: str) -> np.ndarray:
    """Return the same by faiss; the vectors are copied to a GPU in parts."""
    import faiss

    search: Any = faiss.knn
    if device == "gpu":
        if not _resources:
            _resources.append(faiss.StandardGpuResources())
            _resources[0].setTempMemory(_SCRATCH_BYTES)
        search = partial(faiss.knn_gpu, _resources[0], vectorsMemoryLimit=_PART_BYTES)
    rows_QM: np.ndarray = search(vectors_QD, vectors_ND, num, metric=faiss.METRIC_INNER_PRODUCT)[1]
    return rows_QM
