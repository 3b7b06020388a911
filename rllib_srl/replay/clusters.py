"""Coarse clusters of unit vectors: spherical k-means, and assignments that do not depend on the batch.

    centroid_CD = fit(vectors_ND, C, seed)          label_N = assign(vectors_ND, centroid_CD)

A matrix product rounds differently for one row and for a thousand. Where that could decide between two centroids the
decision is taken again in float64, row by row, so that an index rebuilt from its vectors puts each where it was.

Source: Dhillon and Modha 2001, "Concept decompositions for large sparse text data using clustering", section 3.
"""

from __future__ import annotations

import numpy as np

_TIE = 1e-5  # larger than the rounding error of a float32 inner product of unit vectors
_BLOCK = 1 << 23  # similarities held at once: 32 MiB


def fit(vectors_ND: np.ndarray, num_clusters: int, seed: int, num_rounds: int = 8) -> np.ndarray:
    """Return centroids of length 1, [C, D] float32, that maximise the similarity of each vector to its own.

    Args:
        vectors_ND: unit vectors, N >= C.
        num_clusters: C.
        seed: of the vectors that the first centroids are.
        num_rounds: of assigning and averaging. A centroid without vectors becomes the one least like its own.
    """
    generator = np.random.default_rng(seed)
    centroid_CD = vectors_ND[np.sort(generator.choice(len(vectors_ND), num_clusters, replace=False))]
    for _ in range(num_rounds):
        label_N = assign(vectors_ND, centroid_CD)
        size_C = np.bincount(label_N, minlength=num_clusters)
        order = np.argsort(label_N, kind="stable")
        sum_CD = np.zeros((num_clusters, vectors_ND.shape[1]), np.float64)
        ends = np.cumsum(size_C)
        for cluster in np.flatnonzero(size_C):  # one at a time, for a sorted copy of all vectors may not fit
            sum_CD[cluster] = vectors_ND[order[ends[cluster] - size_C[cluster] : ends[cluster]]].sum(0, np.float64)
        empty = np.flatnonzero(size_C == 0)
        if len(empty):
            similarity_N = np.einsum("nd,nd->n", vectors_ND, centroid_CD[label_N])
            sum_CD[empty] = vectors_ND[np.argsort(similarity_N, kind="stable")[: len(empty)]]
        length_C1 = np.linalg.norm(sum_CD, axis=1, keepdims=True)
        centroid_CD = (sum_CD / np.where(length_C1 > 0, length_C1, 1)).astype(np.float32)
    return centroid_CD


def assign(vectors_ND: np.ndarray, centroid_CD: np.ndarray) -> np.ndarray:
    """Return the centroid most similar to each vector, int64 [N]; of equal ones the first."""
    label_N = np.empty(len(vectors_ND), np.int64)
    block = max(1, _BLOCK // len(centroid_CD))
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
