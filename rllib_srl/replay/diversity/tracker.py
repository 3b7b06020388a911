"""Measure the diversity of items: how much their rewards vary, and how far they lie from all other items.

    groups ──embedder──> vectors ──nearest──> novelty and nearest other item of each

    variance    min(1, 4 S), S the variance of the rewards of its last visit: 1 if half of the episodes succeed
    novelty     mean cosine distance to the `NEIGHBOURS` nearest items, at most 1
    diversity   the mean of the two, in [0, 1] ──> shorter intervals, more draws by `srl`, eviction by `least_diverse`

A buffer has a tracker only if something needs it (`ReplaySettings.embedding_used`).

Source: Jiang et al. 2025, arXiv 2509.04575, section on prioritisation (variance and distance).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rllib_srl.replay.diversity.embedders import EMBEDDINGS, normalised
from rllib_srl.replay.diversity.neighbours import check_card, nearest
from rllib_srl.replay.items import Tables
from rllib_srl.types import Group

NEIGHBOURS = 8


class Measured(NamedTuple):
    """A group's prompt compared with the other items."""

    novelty: float
    vector_D: np.ndarray


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


class DiversityTracker:
    """The embedder of a buffer, and the comparison of its prompts with the vectors in the tables."""

    def __init__(self, embedding: str, model_dir: Path | None, device: str) -> None:
        """Create the embedder.

        Args:
            embedding: name of the embedding.
            model_dir: directory of the policy.
            device: "cpu" or "gpu", where neighbours are searched.
        """
        if device == "gpu":
            check_card()
        self._device = device
        self.embedder = EMBEDDINGS.named(embedding)()
        self.embedder.model_dir = model_dir

    def measure(self, groups: Sequence[Group], slots: Sequence[int], tables: Tables) -> list[Measured]:
        """Measure groups; `slots` are those of their items, -1 for items that do not exist yet.

        Raises:
            ValueError: the embedding gives vectors that are not finite, or of another dimension than before.
        """
        if not groups:
            return []
        vectors_PD = normalised(self.embedder.embed(groups))
        if not np.isfinite(vectors_PD).all():
            raise ValueError(f"{int((~np.isfinite(vectors_PD)).any(axis=1).sum())} vectors are not finite")
        _, similarity_PK = nearest(vectors_PD, *tables.vectors, NEIGHBOURS, slots, self._device)
        return list(map(Measured, novelty(similarity_PK).tolist(), vectors_PD))
