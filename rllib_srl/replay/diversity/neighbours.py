"""Search the k nearest among up to millions of unit vectors, with additions and removals.

    set(ids, vectors)  remove(ids)              ids are slots: small integers, reused
    distances(vectors, k)  nearest(vectors, k)  exact up to `exact_up_to` vectors, then inverted lists
    centroid()  cluster_share(vectors)          mean of all; share of all in the same coarse cluster

    size       0 ... 32 ... 256 ... exact_up_to ... x 8 ... x 8 ...
    clusters         fitted, then again at each 8-fold growth
    lists                           fitted, then again at each 8-fold growth

Results do not depend on the order of insertions: the similarities of the candidates are recomputed in float64, row by
row, ties are ordered by id, and the mean is a sum of integers. An index restored from its state (its fits) and its
vectors therefore gives the same results as the saved one. A different thread count of faiss or BLAS may change which
candidates an approximate search finds.

Fitting blocks the caller: on one core about 2 s at 20,000 vectors of 256 numbers, half a minute at 160,000, minutes
beyond a million.

Coarse clusters: spherical k-means, with assignments that do not depend on the batch.

    centroid_CD = fit_centroids(vectors_ND, C, seed)    label_N = nearest_centroids(vectors_ND, centroid_CD)

A matrix product rounds differently for one row and for a thousand. If rounding could decide between two centroids,
they are compared again in float64, row by row, so an index rebuilt from its vectors has the same assignments.

Approximate search: FAISS inverted lists with incremental additions and deletions.

    vectors --fit_centroids--> C centroids --> each vector in the list of its nearest centroid
    query   --> the `num_probes` lists nearest to it --> candidates

The lists hold half-precision copies; `Neighbours` keeps the vectors and ranks the candidates with them. The time of a
deletion is proportional to the number of deleted vectors (a hash map from id to place). On a GPU (device "gpu", beyond
`exact_up_to` only) the lists are copied there at the first search after a change; no test covers this path.

Sources: Douze et al. 2024, arXiv 2401.08281 (FAISS); Sivic and Zisserman 2003 (inverted lists of clusters); Dhillon and
Modha 2001, "Concept decompositions for large sparse text data using clustering", section 3 (spherical k-means).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from rllib_srl.replay.diversity.embedders import normalised

_TIE = 1e-5  # larger than the rounding error of a float32 inner product of unit vectors
_MOST_SIMILARITIES = 1 << 23  # similarities held at once: 32 MiB


def fit_centroids(vectors_ND: np.ndarray, num_clusters: int, seed: int, num_rounds: int = 8) -> np.ndarray:
    """Fit C unit centroids by spherical k-means, [C, D] float32.

    Args:
        vectors_ND: unit vectors, N >= C.
        num_clusters: C.
        seed: of the choice of vectors for the initial centroids.
        num_rounds: rounds of assigning and averaging. An empty cluster restarts at the vector least similar to its
            centroid.
    """
    generator = np.random.default_rng(seed)
    centroid_CD = vectors_ND[np.sort(generator.choice(len(vectors_ND), num_clusters, replace=False))]
    for _ in range(num_rounds):
        label_N = nearest_centroids(vectors_ND, centroid_CD)
        size_C = np.bincount(label_N, minlength=num_clusters)
        order = np.argsort(label_N, kind="stable")
        sum_CD = np.zeros((num_clusters, vectors_ND.shape[1]), np.float64)
        ends = np.cumsum(size_C)
        for cluster in np.flatnonzero(size_C):  # one at a time: a sorted copy of all vectors may not fit in memory
            sum_CD[cluster] = vectors_ND[order[ends[cluster] - size_C[cluster] : ends[cluster]]].sum(0, np.float64)
        empty = np.flatnonzero(size_C == 0)
        if len(empty):
            similarity_N = np.einsum("nd,nd->n", vectors_ND, centroid_CD[label_N])
            sum_CD[empty] = vectors_ND[np.argsort(similarity_N, kind="stable")[: len(empty)]]
        length_C1 = np.linalg.norm(sum_CD, axis=1, keepdims=True)
        centroid_CD = (sum_CD / np.where(length_C1 > 0, length_C1, 1)).astype(np.float32)
    return centroid_CD


def nearest_centroids(vectors_ND: np.ndarray, centroid_CD: np.ndarray) -> np.ndarray:
    """Return the index of the most similar centroid of each vector, int64 [N]; the first one of ties."""
    label_N = np.empty(len(vectors_ND), np.int64)
    block = max(1, _MOST_SIMILARITIES // len(centroid_CD))
    for start in range(0, len(vectors_ND), block):
        rows_KD = vectors_ND[start : start + block]
        similarity_KC = rows_KD @ centroid_CD.T
        best_K = similarity_KC.max(axis=1)
        label_K = similarity_KC.argmax(axis=1)
        close_KC = similarity_KC >= best_K[:, None] - _TIE
        for row in np.flatnonzero(close_KC.sum(axis=1) > 1):
            rivals = np.flatnonzero(close_KC[row])
            exact = (centroid_CD[rivals].astype(np.float64) * rows_KD[row]).sum(axis=1)
            label_K[row] = rivals[exact.argmax()]
        label_N[start : start + block] = label_K
    return label_N


_TRAIN_PER_LIST = 40  # training vectors per centroid; faiss recommends at least 39
_NUM_ROUNDS = 6
_NUM_QUERIES = 256  # for choosing the number of probes
_VECTORS_AT_ONCE = 16_384


class InvertedLists:
    """A FAISS index of unit vectors by integer id.

    Invariant: the list of a vector depends on the vector and the centroids alone. The thread count of faiss is not
    changed.
    """

    def __init__(self, centroid_CD: np.ndarray, num_probes: int, device: str) -> None:
        """Create empty lists for trained centroids."""
        import faiss

        self._faiss: Any = faiss
        self._device = device
        self.centroid_CD, self.num_probes = np.ascontiguousarray(centroid_CD, np.float32), num_probes
        num_lists, dim = self.centroid_CD.shape
        self._quantizer = self._faiss.IndexFlatIP(dim)  # kept alive here: the index holds no reference to it
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
        """Add vectors under new ids."""
        list_K = nearest_centroids(vectors_KD, self.centroid_CD)
        vectors_KD, ids_K = np.ascontiguousarray(vectors_KD, np.float32), np.ascontiguousarray(ids_K, np.int64)
        pointer = self._faiss.swig_ptr
        self._index.add_core(len(ids_K), pointer(vectors_KD), pointer(ids_K), pointer(list_K))
        self._gpu_copy = None

    def remove(self, ids_K: np.ndarray) -> None:
        """Remove vectors.

        Raises:
            RuntimeError: an id was not in the index.
        """
        ids_K = np.ascontiguousarray(ids_K, np.int64)
        selector = self._faiss.IDSelectorArray(len(ids_K), self._faiss.swig_ptr(ids_K))
        num_removed = self._index.remove_ids(selector)
        if num_removed != len(ids_K):
            raise RuntimeError(f"{num_removed} of {len(ids_K)} vectors were removed from the index")
        self._gpu_copy = None

    def candidates(self, vectors_QD: np.ndarray, num: int) -> np.ndarray:
        """Return the ids of approximately the `num` most similar vectors per query, [Q, num], padded with -1."""
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
    """Check that faiss is installed and supports the device.

    Raises:
        ValueError: faiss is missing, or the device is "gpu" and faiss has no GPU support or no GPU is visible.
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
    """Fit inverted lists to rows of `vectors_ND`, add these rows, and choose the number of probes for `recall`.

    Args:
        vectors_ND: unit vectors.
        ids_K: row numbers, used as ids; their order must not depend on history.
        recall: target share of the true `num_neighbours` nearest found by a search, averaged over stored vectors.
        num_neighbours: number of neighbours for which the number of probes is chosen.
        seed: of the samples.
        device: "cpu" or "gpu".
    """
    num_lists = 2 ** round(np.log2(4 * np.sqrt(len(ids_K))))
    generator = np.random.default_rng([seed, 1, len(ids_K)])
    sample = np.sort(generator.choice(ids_K, min(len(ids_K), _TRAIN_PER_LIST * num_lists), replace=False))
    lists = InvertedLists(fit_centroids(vectors_ND[sample], num_lists, seed, _NUM_ROUNDS), 1, device)
    for start in range(0, len(ids_K), _VECTORS_AT_ONCE):
        rows = ids_K[start : start + _VECTORS_AT_ONCE]
        lists.add(rows, vectors_ND[rows])
    queries = generator.choice(ids_K, min(_NUM_QUERIES, len(ids_K)), replace=False)
    _choose_probes(lists, vectors_ND, ids_K, vectors_ND[queries], recall, num_neighbours + 1)
    return lists


def _choose_probes(
    lists: InvertedLists, vectors_ND: np.ndarray, ids_K: np.ndarray, vectors_QD: np.ndarray, recall: float, num: int
) -> None:
    """Set the smallest number of probes of an increasing series that reaches `recall` for the `num` nearest."""
    num = min(num, len(ids_K))
    least_share = (1 + recall * (num - 1)) / num  # the queries are stored, and each finds itself
    best_QK = np.full((len(vectors_QD), 0), 0, np.float32)
    for start in range(0, len(ids_K), _VECTORS_AT_ONCE):
        new_QB = vectors_QD @ vectors_ND[ids_K[start : start + _VECTORS_AT_ONCE]].T
        similarity_QK = np.concatenate([best_QK, new_QB], axis=1)
        best_QK = np.partition(similarity_QK, -num, axis=1)[:, -num:] if similarity_QK.shape[1] > num else similarity_QK
    least_Q1 = best_QK.min(axis=1, keepdims=True) - 1e-5  # least similarity of a true neighbour, up to rounding
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


GROWTH = 8  # growth factor after which clusters and lists are fitted again
LEAST_CLUSTERED = 32  # vectors; below this number, all are in one cluster
_PER_CLUSTER = 8  # minimum average number of vectors per coarse cluster
_MOST_FITTED = 16_384  # maximum number of vectors for fitting the coarse clusters
_MARGIN = 8  # candidates beyond k, so that rounding does not decide which k are returned
_BLOCK = 1 << 24  # similarities held at once: 64 MiB
_FIXED = float(1 << 30)  # unit of the integer sum of all vectors


class Neighbours:
    """A set of unit vectors by id with nearest-neighbour search.

    Invariant: distances are cosine distances in [0, 2]; approximate search finds on average the share `recall` of the
    true neighbours; all other results are exact.
    """

    def __init__(
        self,
        dim: int,
        *,
        exact_up_to: int | None = 20_000,
        recall: float = 0.97,
        recall_at: int = 10,
        num_clusters: int = 64,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """Create an empty index.

        Args:
            dim: D.
            exact_up_to: number of vectors up to which search is exact, at least 256; None: always exact, without
                faiss.
            recall: target share of the true neighbours found by approximate search, in (0, 1].
            recall_at: number of neighbours for which `recall` holds, at least 1.
            num_clusters: maximum number of coarse clusters for `cluster_share`, at least 1.
            seed: of all fits.
            device: "cpu" or "gpu", for approximate search.

        Raises:
            ValueError: naming every value out of its range; or faiss or a GPU is needed and missing.
        """
        faults = [
            f"{name} = {value}; expected {expected}"
            for name, value, expected, is_fine in (
                ("dim", dim, "at least 1", dim >= 1),
                ("exact_up_to", exact_up_to, "None or at least 256", exact_up_to is None or exact_up_to >= 256),
                ("recall", recall, "above 0, at most 1", 0 < recall <= 1),
                ("recall_at", recall_at, "at least 1", recall_at >= 1),
                ("num_clusters", num_clusters, "at least 1", num_clusters >= 1),
                ("device", repr(device), "'cpu' or 'gpu'", device in ("cpu", "gpu")),
            )
            if not is_fine
        ]
        if faults:
            raise ValueError("Neighbours: " + "; ".join(faults))
        if exact_up_to is not None or device == "gpu":
            check_faiss(device)
        self._dim, self._exact_up_to, self._device = dim, exact_up_to, device
        self._recall, self._recall_at, self._num_clusters, self._seed = recall, recall_at, num_clusters, seed
        self._clear()

    def _clear(self) -> None:
        self._vectors_ND = np.zeros((0, self._dim), np.float32)
        self._is_stored_N = np.zeros(0, bool)
        self._cluster_N = np.zeros(0, np.int64)
        self._sum_D = np.zeros(self._dim, np.int64)
        self._num = self._lists_fitted_at = self._clusters_fitted_at = 0
        self._lists: InvertedLists | None = None
        self._centroid_CD = np.zeros((1, self._dim), np.float32)
        self._size_C = np.zeros(1, np.int64)

    def __len__(self) -> int:
        """Return the number of vectors."""
        return self._num

    @property
    def is_exact(self) -> bool:
        """Return whether search is exhaustive."""
        return self._lists is None

    @property
    def fitted_at(self) -> tuple[int, int]:
        """Return the numbers of vectors at the last fits of clusters and lists; 0 before the first fit."""
        return self._clusters_fitted_at, self._lists_fitted_at

    def has(self, slot: int) -> bool:
        """Return whether a vector is stored under this id."""
        return 0 <= slot < len(self._is_stored_N) and bool(self._is_stored_N[slot])

    def ids(self) -> np.ndarray:
        """Return all ids, ascending."""
        return np.flatnonzero(self._is_stored_N)

    def vectors(self, ids_K: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the stored vectors, [K, D] float32.

        Raises:
            ValueError: an id has no vector or is given twice.
        """
        return self._vectors_ND[self._known(ids_K)]

    def set(self, ids_K: Sequence[int] | np.ndarray, vectors_KD: np.ndarray) -> None:
        """Store vectors, replacing those under the same ids. Memory is proportional to the largest id.

        Args:
            ids_K: distinct ids, at least 0.
            vectors_KD: vectors of any norm, stored normalised; zero vectors are at distance 1 from all others.

        Raises:
            ValueError: negative or repeated ids, or vectors of a wrong shape or not finite.
        """
        ids_K = np.asarray(ids_K, np.int64).reshape(-1)
        if len(ids_K) and ids_K.min() < 0:
            raise ValueError(f"ids_K has {int((ids_K < 0).sum())} entries below 0; expected slots")
        vectors_KD = self._checked(vectors_KD, len(ids_K))
        self._grow(int(ids_K.max(initial=-1)) + 1)
        self.remove(_distinct(ids_K)[self._is_stored_N[ids_K]])
        self._insert(ids_K, vectors_KD)
        if self._num >= max(LEAST_CLUSTERED, GROWTH * self._clusters_fitted_at):
            self._fit_clusters()
        is_large = self._exact_up_to is not None and self._num > self._exact_up_to
        if is_large and self._num >= GROWTH * self._lists_fitted_at:
            self._fit_lists()

    def remove(self, ids_K: Sequence[int] | np.ndarray) -> None:
        """Remove vectors.

        Raises:
            ValueError: an id has no vector or is given twice.
        """
        ids_K = self._known(ids_K)
        if len(ids_K) == 0:
            return
        if self._lists is not None:
            self._lists.remove(ids_K)
        self._sum_D -= _fixed_sum(self._vectors_ND[ids_K])
        self._size_C -= np.bincount(self._cluster_N[ids_K], minlength=len(self._size_C))
        self._is_stored_N[ids_K] = False
        self._vectors_ND[ids_K] = 0
        self._num -= len(ids_K)

    def nearest(
        self, vectors_QD: np.ndarray, k: int, exclude_ids: Sequence[int] | np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the k most similar vectors and their cosine similarities, most similar first.

        Both are [Q, k]; if fewer than k vectors are stored, the rest is -1 and nan.

        Args:
            vectors_QD: queries, of any norm.
            k: at least 1.
            exclude_ids: one id per query to exclude, such as its own; -1 excludes nothing.

        Raises:
            ValueError: k < 1, arguments whose shapes do not match, or queries that are not finite.
        """
        vectors_QD = self._checked(vectors_QD, None)
        if k < 1:
            raise ValueError(f"k = {k}; expected at least 1")
        exclude_Q = np.full(len(vectors_QD), -1) if exclude_ids is None else np.asarray(exclude_ids, np.int64)
        if len(exclude_Q) != len(vectors_QD):
            raise ValueError(f"exclude_ids has {len(exclude_Q)} entries, vectors_QD has {len(vectors_QD)}")
        if self._num == 0 or len(vectors_QD) == 0:
            return np.full((len(vectors_QD), k), -1), np.full((len(vectors_QD), k), np.nan)
        num = min(self._num, k + 1 + _MARGIN)
        if self._lists is None:
            return self._decide(vectors_QD, self._exact_candidates(vectors_QD, num), exclude_Q, k)
        ids_QK, similarity_QK = self._decide(vectors_QD, self._lists.candidates(vectors_QD, num), exclude_Q, k)
        # The lists probed may hold fewer than k vectors even where more are stored.
        is_stored_Q = (exclude_Q >= 0) & self._is_stored_N[np.clip(exclude_Q, 0, len(self._is_stored_N) - 1)]
        short = np.flatnonzero((ids_QK >= 0).sum(axis=1) < np.minimum(k, self._num - is_stored_Q))
        if len(short):
            found_QK = self._exact_candidates(vectors_QD[short], num)
            ids_QK[short], similarity_QK[short] = self._decide(vectors_QD[short], found_QK, exclude_Q[short], k)
        return ids_QK, similarity_QK

    def distances(
        self, vectors_QD: np.ndarray, k: int, exclude_ids: Sequence[int] | np.ndarray | None = None
    ) -> np.ndarray:
        """Return the cosine distances to the k nearest, [Q, k] ascending, padded with nan.

        Arguments and errors as in `nearest`.
        """
        return 1.0 - self.nearest(vectors_QD, k, exclude_ids)[1]

    def centroid(self) -> np.ndarray:
        """Return the mean of all vectors, [D]; zeros if there are none."""
        return self._sum_D / (_FIXED * max(1, self._num))

    def cluster_share(self, vectors_QD: np.ndarray) -> np.ndarray:
        """Return the share of all vectors that lie in the coarse cluster of each query, [Q] in [0, 1].

        1 if there were never 32 vectors or more (all are one cluster); 0 if no vectors are stored.
        """
        cluster_Q = nearest_centroids(self._checked(vectors_QD, None), self._centroid_CD)
        return self._size_C[cluster_Q] / max(1, self._num)

    def save_state(self) -> dict[str, Any]:
        """Return the fits, as numbers and numpy arrays; the state changes only with a new fit."""
        return {
            "dim": self._dim,
            "clusters_fitted_at": self._clusters_fitted_at,
            "clusters": self._centroid_CD,
            "lists_fitted_at": self._lists_fitted_at,
            "lists": None if self._lists is None else self._lists.centroid_CD,
            "num_probes": 0 if self._lists is None else self._lists.num_probes,
        }

    def load_state(self, state: Mapping[str, Any], ids_K: Sequence[int] | np.ndarray, vectors_KD: np.ndarray) -> None:
        """Restore an index from its saved state and all its vectors.

        Args:
            state: as returned by `save_state`.
            ids_K: ids in any order.
            vectors_KD: the vectors as passed to `set` or returned by `vectors`.

        Raises:
            ValueError: the state has another dimension, or `set` would refuse the vectors.
        """
        if state["dim"] != self._dim:
            raise ValueError(f"the state has dim = {state['dim']}; expected {self._dim}")
        self._clear()
        self._clusters_fitted_at, self._lists_fitted_at = state["clusters_fitted_at"], state["lists_fitted_at"]
        self._centroid_CD = np.array(state["clusters"], np.float32)
        self._size_C = np.zeros(len(self._centroid_CD), np.int64)
        if state["lists"] is not None:
            self._lists = InvertedLists(state["lists"], state["num_probes"], self._device)
        ids_K = _distinct(np.asarray(ids_K, np.int64).reshape(-1))
        self._grow(int(ids_K.max(initial=-1)) + 1)
        self._insert(ids_K, self._checked(vectors_KD, len(ids_K)))

    def _insert(self, ids_K: np.ndarray, vectors_KD: np.ndarray) -> None:
        self._vectors_ND[ids_K], self._is_stored_N[ids_K] = vectors_KD, True
        self._sum_D += _fixed_sum(vectors_KD)
        self._cluster_N[ids_K] = cluster_K = nearest_centroids(vectors_KD, self._centroid_CD)
        self._size_C += np.bincount(cluster_K, minlength=len(self._size_C))
        self._num += len(ids_K)
        if self._lists is not None:
            self._lists.add(ids_K, vectors_KD)

    def _fit_clusters(self) -> None:
        ids_N = self.ids()
        num_clusters = max(1, min(self._num_clusters, len(ids_N) // _PER_CLUSTER))
        generator = np.random.default_rng([self._seed, 0, len(ids_N)])
        sample = np.sort(generator.choice(ids_N, min(len(ids_N), _MOST_FITTED), replace=False))
        self._centroid_CD = fit_centroids(self._vectors_ND[sample], num_clusters, self._seed)
        for start in range(0, len(ids_N), _MOST_FITTED):
            rows = ids_N[start : start + _MOST_FITTED]
            self._cluster_N[rows] = nearest_centroids(self._vectors_ND[rows], self._centroid_CD)
        self._size_C = np.bincount(self._cluster_N[ids_N], minlength=num_clusters)
        self._clusters_fitted_at = self._num

    def _fit_lists(self) -> None:
        ids_N = self.ids()
        self._lists = None  # free the old lists before building the new ones, to limit peak memory
        self._lists = trained(self._vectors_ND, ids_N, self._recall, self._recall_at, self._seed, self._device)
        self._lists_fitted_at = self._num

    def _exact_candidates(self, vectors_QD: np.ndarray, num: int) -> np.ndarray:
        """Return the ids of the `num` most similar vectors of each query, unordered."""
        ids_QK = np.empty((len(vectors_QD), num), np.int64)
        num_slots = int(self.ids()[-1]) + 1
        dead_N = np.flatnonzero(~self._is_stored_N[:num_slots])
        block = max(1, _BLOCK // num_slots)
        for start in range(0, len(vectors_QD), block):
            similarity_QN = vectors_QD[start : start + block] @ self._vectors_ND[:num_slots].T
            similarity_QN[:, dead_N] = -np.inf
            ids_QK[start : start + block] = np.argpartition(similarity_QN, -num, axis=1)[:, -num:]
        return ids_QK

    def _decide(
        self, vectors_QD: np.ndarray, ids_QK: np.ndarray, exclude_Q: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Order candidates by similarity in float64, ties by id, and return the first k."""
        is_found_QK = (ids_QK >= 0) & (ids_QK != exclude_Q[:, None])
        similarity_QK = np.full(ids_QK.shape, -np.inf)
        for row, query_D in enumerate(vectors_QD.astype(np.float64)):
            products_KD = self._vectors_ND[ids_QK[row]] * query_D
            similarity_QK[row] = np.clip(products_KD.sum(axis=1), -1.0, 1.0)
        similarity_QK[~is_found_QK] = -np.inf
        order_QK = np.lexsort((ids_QK, -similarity_QK), axis=1)[:, :k]
        ids_QK, similarity_QK = (np.take_along_axis(array, order_QK, axis=1) for array in (ids_QK, similarity_QK))
        missing_QK = np.isneginf(similarity_QK)
        ids_QK[missing_QK], similarity_QK[missing_QK] = -1, np.nan
        short = ((0, 0), (0, k - ids_QK.shape[1]))
        return np.pad(ids_QK, short, constant_values=-1), np.pad(similarity_QK, short, constant_values=np.nan)

    def _grow(self, num_slots: int) -> None:
        size = len(self._is_stored_N)
        if num_slots > size:
            for name in ("_vectors_ND", "_is_stored_N", "_cluster_N"):
                old = getattr(self, name)
                new = np.zeros((max(num_slots, 2 * size), *old.shape[1:]), old.dtype)
                new[:size] = old
                setattr(self, name, new)

    def _known(self, ids_K: Sequence[int] | np.ndarray) -> np.ndarray:
        ids_K = _distinct(np.asarray(ids_K, np.int64).reshape(-1))
        inside = ids_K[(ids_K >= 0) & (ids_K < len(self._is_stored_N))]
        if len(inside) < len(ids_K) or not self._is_stored_N[inside].all():
            unknown = [slot for slot in ids_K.tolist() if slot not in set(inside[self._is_stored_N[inside]].tolist())]
            raise ValueError(f"no vector is stored under {len(unknown)} of {len(ids_K)} ids, such as {unknown[0]}")
        return ids_K

    def _checked(self, vectors_KD: np.ndarray, num: int | None) -> np.ndarray:
        vectors_KD = np.asarray(vectors_KD)
        if vectors_KD.ndim != 2 or vectors_KD.shape[1] != self._dim or num not in (None, len(vectors_KD)):
            rows = "any number of" if num is None else num
            raise ValueError(f"vectors have shape {vectors_KD.shape}; expected {rows} rows of {self._dim}")
        if not np.isfinite(vectors_KD).all():
            raise ValueError(f"{int((~np.isfinite(vectors_KD)).any(axis=1).sum())} vectors are not finite")
        return normalised(vectors_KD)


def _distinct(ids_K: np.ndarray) -> np.ndarray:
    num = len(np.unique(ids_K))
    if num < len(ids_K):
        raise ValueError(f"ids_K has {len(ids_K)} entries, {num} of them distinct; expected each once")
    return ids_K


def _fixed_sum(vectors_KD: np.ndarray) -> np.ndarray:
    """Return the sum in units of 2^-30, as integers, so that it does not depend on the order."""
    total_D = np.zeros(vectors_KD.shape[1], np.int64)
    for start in range(0, len(vectors_KD), _MOST_FITTED):
        total_D += np.rint(vectors_KD[start : start + _MOST_FITTED] * np.float64(_FIXED)).astype(np.int64).sum(axis=0)
    return total_D
