"""The k nearest among up to millions of unit vectors, which come and go.

    set(ids, vectors)  remove(ids)              ids are slots: small integers, reused
    distances(vectors, k)  nearest(vectors, k)  exact up to `exact_up_to` vectors, then inverted lists
    centroid()  cluster_share(vectors)          mean of all; share of all in the same coarse cluster

    size       0 ... 32 ... 256 ... exact_up_to ... x 8 ... x 8 ...
    clusters         fitted, then again at each 8-fold growth
    lists                           fitted, then again at each 8-fold growth

Answers do not depend on the order in which vectors came: similarities of the candidates are computed again in float64,
row by row, and equal ones are ordered by id; the mean is a sum of integers. An index restored from its state (what was
fitted) and its vectors therefore answers as the one that was saved; a change of faiss's or the BLAS's thread count may
change which candidates an approximate search finds.

On a GPU (device "gpu", past `exact_up_to` only) the lists are copied there at the first search after a change. The
tests do not cover that path, for they have no GPU.

Fitting stops the caller: on one core about 2 s at 20,000 vectors of 256 numbers, half a minute at 160,000, minutes
beyond a million.

Source: Douze et al. 2024, arXiv 2401.08281 (FAISS).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rllib_srl.replay import clusters
from rllib_srl.replay.inverted_lists import InvertedLists, check_faiss, trained
from rllib_srl.replay.token_embedding import normalised

GROWTH = 8  # after which what was fitted is fitted again
LEAST_CLUSTERED = 32  # vectors; below, all are in one cluster
_PER_CLUSTER = 8  # vectors a coarse cluster has on average, at least
_MOST_FITTED = 16_384  # vectors the coarse clusters are fitted to
_MARGIN = 8  # candidates beyond k, so that rounding does not decide who is among the k
_BLOCK = 1 << 24  # similarities held at once: 64 MiB
_FIXED = float(1 << 30)  # unit of the integer sum of all vectors


class Neighbours:
    """A set of unit vectors by id, and who is near whom.

    Invariant: distances are cosine distances in [0, 2]; approximate search finds on average the share `recall` of the
    true neighbours, everything else is exact.
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
        """Start empty.

        Args:
            dim: D.
            exact_up_to: vectors up to which search is exact; None: always, and faiss is not needed.
            recall: share of the true neighbours that approximate search should find, in (0, 1].
            recall_at: number of neighbours for which that holds.
            num_clusters: coarse clusters that `cluster_share` tells apart, at most.
            seed: of everything that is fitted.
            device: "cpu" or "gpu", for approximate search.

        Raises:
            ValueError: naming every value out of its range; faiss or a GPU that is needed and missing.
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
        """Say whether search compares with every vector."""
        return self._lists is None

    @property
    def fitted_at(self) -> tuple[int, int]:
        """Return the sizes at which clusters and lists were last fitted, 0 before; changes with each fit."""
        return self._clusters_fitted_at, self._lists_fitted_at

    def has(self, slot: int) -> bool:
        """Say whether a vector is stored under this id."""
        return 0 <= slot < len(self._is_stored_N) and bool(self._is_stored_N[slot])

    def ids(self) -> np.ndarray:
        """Return all ids, ascending."""
        return np.flatnonzero(self._is_stored_N)

    def vectors(self, ids_K: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the stored vectors, [K, D] float32.

        Raises:
            ValueError: an id without a vector, or twice.
        """
        return self._vectors_ND[self._known(ids_K)]

    def set(self, ids_K: Sequence[int] | np.ndarray, vectors_KD: np.ndarray) -> None:
        """Store vectors, in place of those already under the same ids; memory grows to the largest id.

        Args:
            ids_K: distinct, at least 0.
            vectors_KD: of any length, kept normalised; zeros are at distance 1 from everything.

        Raises:
            ValueError: ids that are negative or twice, vectors of another shape or not finite.
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
        """Forget vectors.

        Raises:
            ValueError: an id without a vector, or twice.
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

        Both are [Q, k]; where fewer than k vectors are stored the rest is -1 and nan.

        Args:
            vectors_QD: queries, of any length.
            k: at least 1.
            exclude_ids: one id a query that is not to be found, such as its own; -1 excludes nothing.

        Raises:
            ValueError: arguments that do not align, or queries that are not finite.
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
        """Return the cosine distances to the k nearest, [Q, k] ascending, nan where fewer than k are stored.

        Arguments and errors are those of `nearest`.
        """
        return 1.0 - self.nearest(vectors_QD, k, exclude_ids)[1]

    def centroid(self) -> np.ndarray:
        """Return the mean of all vectors, [D]; zeros where there are none."""
        return self._sum_D / (_FIXED * max(1, self._num))

    def cluster_share(self, vectors_QD: np.ndarray) -> np.ndarray:
        """Return the share of all vectors that lie in the coarse cluster of each query, [Q] in [0, 1].

        1 where fewer than 32 vectors were ever stored (all are one cluster), 0 where none are.
        """
        cluster_Q = clusters.assign(self._checked(vectors_QD, None), self._centroid_CD)
        return self._size_C[cluster_Q] / max(1, self._num)

    def save_state(self) -> dict[str, Any]:
        """Return what was fitted, as numbers and numpy arrays; it changes only when something is fitted again."""
        return {
            "dim": self._dim,
            "clusters_fitted_at": self._clusters_fitted_at,
            "clusters": self._centroid_CD,
            "lists_fitted_at": self._lists_fitted_at,
            "lists": None if self._lists is None else self._lists.centroid_CD,
            "num_probes": 0 if self._lists is None else self._lists.num_probes,
        }

    def load_state(self, state: Mapping[str, Any], ids_K: Sequence[int] | np.ndarray, vectors_KD: np.ndarray) -> None:
        """Become the index that `save_state` was called on, given all its vectors.

        Args:
            state: of `save_state`.
            ids_K: in any order.
            vectors_KD: as they were set, or as `vectors` returned them.

        Raises:
            ValueError: a state of another dimension, or vectors that `set` would refuse.
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
        self._cluster_N[ids_K] = cluster_K = clusters.assign(vectors_KD, self._centroid_CD)
        self._size_C += np.bincount(cluster_K, minlength=len(self._size_C))
        self._num += len(ids_K)
        if self._lists is not None:
            self._lists.add(ids_K, vectors_KD)

    def _fit_clusters(self) -> None:
        ids_N = self.ids()
        num_clusters = max(1, min(self._num_clusters, len(ids_N) // _PER_CLUSTER))
        generator = np.random.default_rng([self._seed, 0, len(ids_N)])
        sample = np.sort(generator.choice(ids_N, min(len(ids_N), _MOST_FITTED), replace=False))
        self._centroid_CD = clusters.fit(self._vectors_ND[sample], num_clusters, self._seed)
        for start in range(0, len(ids_N), _MOST_FITTED):
            rows = ids_N[start : start + _MOST_FITTED]
            self._cluster_N[rows] = clusters.assign(self._vectors_ND[rows], self._centroid_CD)
        self._size_C = np.bincount(self._cluster_N[ids_N], minlength=num_clusters)
        self._clusters_fitted_at = self._num

    def _fit_lists(self) -> None:
        ids_N = self.ids()
        self._lists = None  # what is replaced need not be in memory beside what replaces it
        self._lists = trained(self._vectors_ND, ids_N, self._recall, self._recall_at, self._seed, self._device)
        self._lists_fitted_at = self._num

    def _exact_candidates(self, vectors_QD: np.ndarray, num: int) -> np.ndarray:
        """Return the ids of the `num` most similar vectors of each query, in no order."""
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
        """Order candidates by similarity in float64, equal ones by id, and keep the first k."""
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
    """Return the sum in units of 2^-30: integers add up to the same in any order."""
    total_D = np.zeros(vectors_KD.shape[1], np.int64)
    for start in range(0, len(vectors_KD), _MOST_FITTED):
        total_D += np.rint(vectors_KD[start : start + _MOST_FITTED] * np.float64(_FIXED)).astype(np.int64).sum(axis=0)
    return total_D
