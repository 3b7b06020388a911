"""Approximate search among many vectors: FAISS inverted lists that take additions and deletions as they come.

    vectors --clusters.fit--> C centroids --> each vector in the list of its nearest centroid
    query   --> the `num_probes` lists nearest to it --> candidates

The lists hold half-precision copies; the caller keeps the vectors and decides between candidates with them.
Deleting costs time proportional to what is deleted (a hash map from id to place). The only room that imports faiss.

Sources: Sivic and Zisserman 2003 (inverted lists of clusters); Douze et al. 2024, arXiv 2401.08281 (FAISS).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np

from rllib_srl.replay import clusters

_TRAIN_PER_LIST = 40  # vectors a centroid is fitted to; faiss asks for 39 at least
_NUM_ROUNDS = 6
_NUM_QUERIES = 256  # for choosing the number of probes
_BLOCK = 16_384  # vectors handled at once


class InvertedLists:
    """An index of unit vectors by integer id.

    Invariant: which list a vector is in depends on the vector and the centroids alone; faiss's thread count is left
    as it is.
    """

    def __init__(self, centroid_CD: np.ndarray, num_probes: int, device: str) -> None:
        """Start empty, with trained centroids."""
        import faiss

        self._faiss: Any = faiss
        self._device = device
        self.centroid_CD, self.num_probes = np.ascontiguousarray(centroid_CD, np.float32), num_probes
        num_lists, dim = self.centroid_CD.shape
        self._quantizer = self._faiss.IndexFlatIP(dim)  # kept here, for the index holds no reference to it
        self._quantizer.add(self.centroid_CD)
        self._index = self._faiss.IndexIVFScalarQuantizer(
            self._quantizer, dim, num_lists, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
        )
        self._index.is_trained = True
        self._index.set_direct_map_type(self._faiss.DirectMap.Hashtable)
        self._gpu_copy: Any = None

    def __len__(self) -> int:
        """Return the number of vectors."""
        return int(self._index.ntotal)

    def add(self, ids_K: np.ndarray, vectors_KD: np.ndarray) -> None:
        """Add vectors whose ids are not there."""
        list_K = clusters.assign(vectors_KD, self.centroid_CD)
        vectors_KD, ids_K = np.ascontiguousarray(vectors_KD, np.float32), np.ascontiguousarray(ids_K, np.int64)
        pointer = self._faiss.swig_ptr
        self._index.add_core(len(ids_K), pointer(vectors_KD), pointer(ids_K), pointer(list_K))
        self._gpu_copy = None

    def remove(self, ids_K: np.ndarray) -> None:
        """Remove vectors."""
        ids_K = np.ascontiguousarray(ids_K, np.int64)
        selector = self._faiss.IDSelectorArray(len(ids_K), self._faiss.swig_ptr(ids_K))
        num_removed = self._index.remove_ids(selector)
        if num_removed != len(ids_K):
            raise RuntimeError(f"{num_removed} of {len(ids_K)} vectors were removed from the index")
        self._gpu_copy = None

    def candidates(self, vectors_QD: np.ndarray, num: int) -> np.ndarray:
        """Return the ids of about the `num` most similar vectors of each query, [Q, num]; -1 where there are fewer."""
        index = self._searched()
        index.nprobe = self.num_probes
        return index.search(np.ascontiguousarray(vectors_QD, np.float32), num)[1]

    def _searched(self) -> Any:
        if self._device == "cpu":
            return self._index
        if self._gpu_copy is None:
            self._resources = self._faiss.StandardGpuResources()
            self._gpu_copy = self._faiss.index_cpu_to_gpu(self._resources, 0, self._index)
        return self._gpu_copy


def check_faiss(device: str) -> None:
    """Check that inverted lists can be made.

    Raises:
        ValueError: faiss is missing, or a GPU is asked for that its build or the machine lacks.
    """
    if find_spec("faiss") is None:
        raise ValueError(
            "faiss is not installed; expected faiss-cpu or faiss-gpu (pip install 'rllib_srl[cpu]'), "
            "or exact_up_to = None for exact search at every size"
        )
    if device == "gpu":
        import faiss

        if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() == 0:
            raise ValueError("device = 'gpu'; expected faiss-gpu and a visible GPU (pip install 'rllib_srl[gpu]')")


def trained(
    vectors_ND: np.ndarray, ids_K: np.ndarray, recall: float, num_neighbours: int, seed: int, device: str
) -> InvertedLists:
    """Return lists of some rows of `vectors_ND`, by row number, with as many probes as `recall` takes.

    Args:
        vectors_ND: unit vectors.
        ids_K: rows, in an order that does not depend on history.
        recall: share of the true `num_neighbours` nearest that a search finds, averaged over stored vectors.
        num_neighbours: that the number of probes is chosen for.
        seed: of the samples.
        device: "cpu" or "gpu".
    """
    num_lists = 2 ** round(np.log2(4 * np.sqrt(len(ids_K))))
    generator = np.random.default_rng([seed, 1, len(ids_K)])
    sample = np.sort(generator.choice(ids_K, min(len(ids_K), _TRAIN_PER_LIST * num_lists), replace=False))
    lists = InvertedLists(clusters.fit(vectors_ND[sample], num_lists, seed, _NUM_ROUNDS), 1, device)
    for start in range(0, len(ids_K), _BLOCK):
        rows = ids_K[start : start + _BLOCK]
        lists.add(rows, vectors_ND[rows])
    queries = generator.choice(ids_K, min(_NUM_QUERIES, len(ids_K)), replace=False)
    _choose_probes(lists, vectors_ND, ids_K, vectors_ND[queries], recall, num_neighbours + 1)
    return lists


def _choose_probes(
    lists: InvertedLists, vectors_ND: np.ndarray, ids_K: np.ndarray, vectors_QD: np.ndarray, recall: float, num: int
) -> None:
    """Set the least number of probes, of a growing series, that finds the share `recall` of the `num` nearest."""
    num = min(num, len(ids_K))
    least_share = (1 + recall * (num - 1)) / num  # the queries are stored, and each finds itself
    best_QK = np.full((len(vectors_QD), 0), 0, np.float32)
    for start in range(0, len(ids_K), _BLOCK):
        similarity_QK = np.concatenate([best_QK, vectors_QD @ vectors_ND[ids_K[start : start + _BLOCK]].T], axis=1)
        best_QK = np.partition(similarity_QK, -num, axis=1)[:, -num:] if similarity_QK.shape[1] > num else similarity_QK
    least_Q1 = best_QK.min(axis=1, keepdims=True) - 1e-5  # of a true neighbour, up to rounding
    for probes in _probe_numbers(len(lists.centroid_CD)):
        lists.num_probes = probes
        ids_QK = lists.candidates(vectors_QD, num)
        similarity_QK = np.stack([vectors_ND[ids] @ query for ids, query in zip(ids_QK, vectors_QD, strict=True)])
        if ((similarity_QK >= least_Q1) & (ids_QK >= 0)).mean() >= least_share:
            break


def _probe_numbers(num_lists: int) -> Iterator[int]:
    probes = 1
    while probes < num_lists:
        yield probes
        probes += max(1, probes // 5)
    yield num_lists
