"""Search the k nearest among up to millions of unit vectors, with additions and removals.

    set(ids, vectors)  remove(ids)       ids are slots: small integers, reused
    nearest(vectors, k)                  ids and cosine similarities
    centroid()  cluster_share(vectors)   mean of all; share of all in the same coarse cluster

    size        0 ... 32 ... 256 ... 2,048 ... 16,384 ... exact_up_to ... 131,072 ...
    clusters       fitted, and again at each 8-fold growth
    search      exact, by a matrix product .............. inverted lists of faiss, trained once

Results do not depend on the order of insertions: a vector lies in the row of its id, the similarities of the candidates
are recomputed in float64, row by row, ties are ordered by id, and the mean is a sum of integers. An index restored from
its state (its fits) and its vectors therefore gives the same results as the saved one. A different number of threads
may change a fit, and which candidates an approximate search finds.

Exact search is a product of numpy: a flat index of faiss takes more time beyond a few thousand vectors (docs/LOG.md).
Beyond `exact_up_to`, faiss has half-precision copies of the vectors, each in the list of its nearest centroid; a search
scans the lists nearest to the query and ranks what it finds by the vectors themselves.

Fitting blocks the caller: for clusters and lists together about a second, at 32,768 vectors of 256 numbers.

Sources: Dhillon and Modha 2001, "Concept decompositions for large sparse text data using clustering", section 3
(spherical k-means); Douze et al. 2024, arXiv 2401.08281 (faiss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from rllib_srl.replay.diversity.card import nearest_rows
from rllib_srl.replay.diversity.embedders import normalised

EXACT_UP_TO = 32_768  # vectors; at twice as many of 256 numbers, a search takes 1 % of a quick-start's iteration
GROWTH = 8  # growth factor after which the clusters are fitted again
LEAST_CLUSTERED = 32  # vectors; below this number, all are in one cluster
_PER_CLUSTER = 8  # minimum average number of vectors per coarse cluster
_FITTED_PER_CENTROID = 256  # maximum number of vectors per centroid that a fit uses
_PER_LIST = 64  # vectors per list when the lists are trained; faiss recommends at least 39
_PROBED = 16  # one list in so many is searched
_MARGIN = 8  # candidates beyond k, so that rounding does not decide which k are returned
_WIDTH = 64  # columns of which the largest similarity is taken first
_MOST_SIMILARITIES = 1 << 24  # held at once: 64 MiB
_ROWS = 4096  # vectors converted to float64 at once
_QUERIES = 64  # queries whose candidates are ranked at once
_FIXED = float(1 << 30)  # unit of the integer sum of all vectors


def check_faiss() -> None:
    """Check that faiss is installed.

    Raises:
        ValueError: it is not.
    """
    if find_spec("faiss") is None:
        raise ValueError("faiss is not installed; expected faiss-cpu (pip install 'rllib_srl[cpu]')")


def _faiss() -> Any:
    """Return the module faiss, imported with the first fit; its type stubs are incomplete."""
    import faiss

    return faiss


def fit_centroids(vectors_ND: np.ndarray, num_centroids: int, seed: int) -> np.ndarray:
    """Fit C unit centroids by spherical k-means, [C, D] float32, N >= C; `seed` is any number of at least 0."""
    most = -(-len(vectors_ND) // num_centroids)  # all of them: faiss drops vectors beyond `most` per centroid
    kmeans = _faiss().Kmeans(
        vectors_ND.shape[1],
        num_centroids,
        niter=8,
        seed=seed % 2**31,  # faiss takes a signed number of 32 bits
        spherical=True,
        min_points_per_centroid=1,  # below this number faiss prints a warning
        max_points_per_centroid=most,
    )
    kmeans.train(vectors_ND)
    centroid_CD: np.ndarray = kmeans.centroids
    return centroid_CD


def nearest_centroids(vectors_ND: np.ndarray, centroid_CD: np.ndarray) -> np.ndarray:
    """Return the index of the most similar centroid of each vector, int64 [N]; the first one of ties.

    A product rounds differently for one row and for a thousand. In float64 this does not decide between two centroids,
    so an index rebuilt from its vectors has the same assignments.
    """
    label_N = np.empty(len(vectors_ND), np.int64)
    centroid_DC = centroid_CD.T.astype(np.float64)
    for start in range(0, len(vectors_ND), _ROWS):
        rows_KD = vectors_ND[start : start + _ROWS].astype(np.float64)
        label_N[start : start + _ROWS] = (rows_KD @ centroid_DC).argmax(axis=1)
    return label_N


class Neighbours:
    """A set of unit vectors by id with nearest-neighbour search.

    Invariant: similarities are cosines in [-1, 1]; all results are exact, except which neighbours a search beyond
    `exact_up_to` vectors finds.
    """

    def __init__(
        self, dim: int, *, exact_up_to: int = EXACT_UP_TO, num_clusters: int = 64, seed: int = 0, device: str = "cpu"
    ) -> None:
        """Create an empty index.

        Args:
            dim: D.
            exact_up_to: number of vectors up to which search is exact, at least 64.
            num_clusters: maximum number of coarse clusters for `cluster_share`, at least 1.
            seed: of all fits.
            device: "cpu", or "gpu": candidates are found on a GPU, exactly at any size (`check_card` first).

        Raises:
            ValueError: naming every value out of its range; or faiss is missing.
        """
        ranges = {"dim": (dim, 1), "exact_up_to": (exact_up_to, _PER_LIST), "num_clusters": (num_clusters, 1)}
        faults = [f"{name} = {value}; expected at least {low}" for name, (value, low) in ranges.items() if value < low]
        if faults:
            raise ValueError("Neighbours: " + "; ".join(faults))
        check_faiss()
        self._dim, self._exact_up_to, self._num_clusters, self._seed = dim, exact_up_to, num_clusters, seed
        self._device = device
        self._clear()

    def _clear(self) -> None:
        self._vectors_ND = np.zeros((0, self._dim), np.float32)
        self._is_stored_N = np.zeros(0, bool)
        self._cluster_N = np.zeros(0, np.int64)
        self._sum_D = np.zeros(self._dim, np.int64)
        self._num = self._clusters_fitted_at = 0
        self._centroid_CD = np.zeros((1, self._dim), np.float32)
        self._size_C = np.zeros(1, np.int64)
        self._list_centroid_LD = np.zeros((0, self._dim), np.float32)
        self._lists: Any = None  # faiss.IndexIVF of all vectors, once there were more than `exact_up_to`

    def __len__(self) -> int:
        """Return the number of vectors."""
        return self._num

    @property
    def is_exact(self) -> bool:
        """Return whether search is exact."""
        return self._lists is None or self._num <= self._exact_up_to

    @property
    def fits(self) -> tuple[int, int]:
        """Return a value that changes with every fit: number of vectors at that of the clusters; number of lists."""
        return self._clusters_fitted_at, len(self._list_centroid_LD)

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
        vectors_KD: np.ndarray = self._vectors_ND[self._known(ids_K)]
        return vectors_KD

    def set(self, ids_K: Sequence[int] | np.ndarray, vectors_KD: np.ndarray) -> None:
        """Store vectors, replacing those under the same ids. Memory is proportional to the largest id.

        Args:
            ids_K: distinct ids, at least 0.
            vectors_KD: vectors of any norm, stored normalised; zero vectors are at distance 1 from all others.

        Raises:
            ValueError: negative or repeated ids, or vectors of a wrong shape or not finite.
        """
        ids_K = _distinct(ids_K)
        if len(ids_K) and ids_K.min() < 0:
            raise ValueError(f"ids_K has {int((ids_K < 0).sum())} entries below 0; expected slots")
        vectors_KD = self._checked(vectors_KD, len(ids_K))
        self._grow(int(ids_K.max(initial=-1)) + 1)
        self.remove(ids_K[self._is_stored_N[ids_K]])
        self._insert(ids_K, vectors_KD)
        if self._num >= max(LEAST_CLUSTERED, GROWTH * self._clusters_fitted_at):
            self._fit_clusters()
        if self._num > self._exact_up_to and self._lists is None and self._device == "cpu":
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
            self._lists.remove_ids(ids_K)
        self._sum_D -= _fixed_sum(self._vectors_ND[ids_K])
        self._size_C -= np.bincount(self._cluster_N[ids_K], minlength=len(self._size_C))
        self._is_stored_N[ids_K] = False
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
        num = min(self._num, k + 1 + _MARGIN)
        if self.is_exact:
            return self._ranked(vectors_QD, self._exact_candidates(vectors_QD, num), exclude_Q, k)
        ids_QK = self._lists.search(vectors_QD, num)[1]
        is_short_Q = (ids_QK < 0).any(axis=1)  # the lists searched hold fewer than `num` vectors
        ids_QK[is_short_Q] = self._exact_candidates(vectors_QD[is_short_Q], num)
        return self._ranked(vectors_QD, ids_QK, exclude_Q, k)

    def centroid(self) -> np.ndarray:
        """Return the mean of all vectors, [D]; zeros if there are none."""
        return self._sum_D / (_FIXED * max(1, self._num))

    def cluster_share(self, vectors_QD: np.ndarray) -> np.ndarray:
        """Return the share of all vectors that lie in the coarse cluster of each query, [Q] in [0, 1].

        1 if there were never 32 vectors or more (all are one cluster); 0 if no vectors are stored.
        """
        cluster_Q = nearest_centroids(self._checked(vectors_QD, None), self._centroid_CD)
        share_Q: np.ndarray = self._size_C[cluster_Q] / max(1, self._num)
        return share_Q

    def save_state(self) -> dict[str, Any]:
        """Return the fits, as numbers and numpy arrays; the state changes only with a new fit."""
        return {
            "dim": self._dim,
            "clusters_fitted_at": self._clusters_fitted_at,
            "clusters": self._centroid_CD,
            "lists": None if self._lists is None else self._list_centroid_LD,
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
        self._clusters_fitted_at = state["clusters_fitted_at"]
        self._centroid_CD = np.array(state["clusters"], np.float32)
        self._size_C = np.zeros(len(self._centroid_CD), np.int64)
        if state["lists"] is not None and self._device == "cpu":
            self._create_lists(np.array(state["lists"], np.float32))
        ids_K = _distinct(ids_K)
        self._grow(int(ids_K.max(initial=-1)) + 1)
        self._insert(ids_K, self._checked(vectors_KD, len(ids_K)))

    # --- fits ------------------------------------------------------------------------------------

    def _insert(self, ids_K: np.ndarray, vectors_KD: np.ndarray) -> None:
        self._vectors_ND[ids_K], self._is_stored_N[ids_K] = vectors_KD, True
        self._sum_D += _fixed_sum(vectors_KD)
        self._cluster_N[ids_K] = cluster_K = nearest_centroids(vectors_KD, self._centroid_CD)
        self._size_C += np.bincount(cluster_K, minlength=len(self._size_C))
        self._num += len(ids_K)
        if self._lists is not None:
            self._add_to_lists(ids_K, vectors_KD)

    def _fit_clusters(self) -> None:
        ids_N = self.ids()
        self._centroid_CD = self._fitted(max(1, min(self._num_clusters, self._num // _PER_CLUSTER)))
        for start in range(0, len(ids_N), _ROWS):
            rows = ids_N[start : start + _ROWS]
            self._cluster_N[rows] = nearest_centroids(self._vectors_ND[rows], self._centroid_CD)
        self._size_C = np.bincount(self._cluster_N[ids_N], minlength=len(self._centroid_CD))
        self._clusters_fitted_at = self._num

    def _fit_lists(self) -> None:
        ids_N = self.ids()
        self._create_lists(self._fitted(self._exact_up_to // _PER_LIST))
        for start in range(0, len(ids_N), _ROWS):
            rows = ids_N[start : start + _ROWS]
            self._add_to_lists(rows, self._vectors_ND[rows])

    def _fitted(self, num_centroids: int) -> np.ndarray:
        """Fit centroids to a sample of the vectors that depends on their ids and the seed alone."""
        generator = np.random.default_rng([self._seed, num_centroids, self._num])
        size = min(self._num, _FITTED_PER_CENTROID * num_centroids)
        sample = np.sort(generator.choice(self.ids(), size, replace=False))
        return fit_centroids(self._vectors_ND[sample], num_centroids, self._seed)

    def _create_lists(self, centroid_LD: np.ndarray) -> None:
        faiss = _faiss()
        quantizer = faiss.IndexFlatIP(self._dim)
        quantizer.add(centroid_LD)
        self._list_centroid_LD = centroid_LD
        self._lists = faiss.IndexIVFScalarQuantizer(
            quantizer, self._dim, len(centroid_LD), faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
        )
        self._lists.is_trained = True
        self._lists.nprobe = max(1, len(centroid_LD) // _PROBED)
        self._lists.set_direct_map_type(faiss.DirectMap.Hashtable)  # a removal does not scan all vectors

    def _add_to_lists(self, ids_K: np.ndarray, vectors_KD: np.ndarray) -> None:
        """Add vectors to the lists of their nearest centroids, in float64: faiss would assign them in float32."""
        list_K = nearest_centroids(vectors_KD, self._list_centroid_LD)
        self._lists.add_core(len(ids_K), *map(_faiss().swig_ptr, (vectors_KD, ids_K, list_K)))

    # --- search ----------------------------------------------------------------------------------

    def _exact_candidates(self, vectors_QD: np.ndarray, num: int) -> np.ndarray:
        """Return the ids of the `num` most similar vectors of each query, unordered."""
        ids_QK = np.empty((len(vectors_QD), num), np.int64)
        if ids_QK.size == 0:
            return ids_QK
        if self._device == "gpu":
            ids_N = self.ids()
            ids_QK[:] = ids_N[nearest_rows(vectors_QD, self._vectors_ND[ids_N], num)]
            return ids_QK
        num_rows = -(-(int(self.ids()[-1]) + 1) // _WIDTH) * _WIDTH
        is_free_N = ~self._is_stored_N[:num_rows]
        block = max(1, _MOST_SIMILARITIES // num_rows)
        for start in range(0, len(vectors_QD), block):
            similarity_QN = vectors_QD[start : start + block] @ self._vectors_ND[:num_rows].T
            similarity_QN[:, is_free_N] = -np.inf
            ids_QK[start : start + block] = _largest(similarity_QN, num)
        return ids_QK

    def _ranked(
        self, vectors_QD: np.ndarray, ids_QK: np.ndarray, exclude_Q: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Order candidates by similarity in float64, ties by id, and return the first k."""
        similarity_QK = np.empty(ids_QK.shape)
        for start in range(0, len(ids_QK), _QUERIES):
            part = slice(start, start + _QUERIES)
            products_QKD = self._vectors_ND[ids_QK[part]] * vectors_QD[part, None].astype(np.float64)
            similarity_QK[part] = np.clip(products_QKD.sum(axis=2), -1.0, 1.0)
        similarity_QK[ids_QK == exclude_Q[:, None]] = -np.inf
        order_QK = np.lexsort((ids_QK, -similarity_QK), axis=1)[:, :k]
        ids_QK, similarity_QK = (np.take_along_axis(array, order_QK, axis=1) for array in (ids_QK, similarity_QK))
        is_missing_QK = np.isneginf(similarity_QK)
        ids_QK[is_missing_QK], similarity_QK[is_missing_QK] = -1, np.nan
        short = ((0, 0), (0, k - ids_QK.shape[1]))
        return np.pad(ids_QK, short, constant_values=-1), np.pad(similarity_QK, short, constant_values=np.nan)

    # --- arguments -------------------------------------------------------------------------------

    def _grow(self, num_slots: int) -> None:
        size = len(self._is_stored_N)
        if num_slots > size:
            new_size = -(-max(num_slots, 2 * size) // _WIDTH) * _WIDTH
            for name in ("_vectors_ND", "_is_stored_N", "_cluster_N"):
                old = getattr(self, name)
                new = np.zeros((new_size, *old.shape[1:]), old.dtype)
                new[:size] = old
                setattr(self, name, new)

    def _known(self, ids_K: Sequence[int] | np.ndarray) -> np.ndarray:
        ids_K = _distinct(ids_K)
        unknown = [slot for slot in ids_K.tolist() if not self.has(slot)]
        if unknown:
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


def _largest(similarity_QN: np.ndarray, num: int) -> np.ndarray:
    """Return the columns of the `num` largest entries of each row, [Q, num] unordered; N is a multiple of `_WIDTH`.

    They lie in the `num` blocks of columns with the largest maxima: to partition all columns takes 3 times as long.
    """
    block_QBW = similarity_QN.reshape(len(similarity_QN), -1, _WIDTH)
    if block_QBW.shape[1] <= num:
        return np.argpartition(similarity_QN, -num, axis=1)[:, -num:]
    block_QK = np.argpartition(block_QBW.max(axis=2), -num, axis=1)[:, -num:]
    rivals_QR = np.take_along_axis(block_QBW, block_QK[:, :, None], axis=1).reshape(len(similarity_QN), -1)
    at_QK = np.argpartition(rivals_QR, -num, axis=1)[:, -num:]
    return np.take_along_axis(block_QK, at_QK // _WIDTH, axis=1) * _WIDTH + at_QK % _WIDTH


def _distinct(ids_K: Sequence[int] | np.ndarray) -> np.ndarray:
    ids_K = np.asarray(ids_K, np.int64).reshape(-1)
    num = len(np.unique(ids_K))
    if num < len(ids_K):
        raise ValueError(f"ids_K has {len(ids_K)} entries, {num} of them distinct; expected each once")
    return ids_K


def _fixed_sum(vectors_KD: np.ndarray) -> np.ndarray:
    """Return the sum in units of 2^-30, as integers, so that it does not depend on the order."""
    total_D = np.zeros(vectors_KD.shape[1], np.int64)
    for start in range(0, len(vectors_KD), _ROWS):
        total_D += np.rint(vectors_KD[start : start + _ROWS] * np.float64(_FIXED)).astype(np.int64).sum(axis=0)
    return total_D
