"""Track how novel a buffer's items are: embed groups, compare them with the stored vectors, keep these by slot.

    groups ──embedder──> vectors ──neighbours──> novelty and nearest other item of each

Items are compared with the vectors stored before the current call. New vectors enter the index when the call is
committed, so a failed call leaves the index unchanged. A buffer has a tracker only if something needs it
(`ReplaySettings.embedding_used`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.diversity.embedders import EMBEDDINGS, PolicyEmbedder
from rllib_srl.replay.diversity.measures import NEIGHBOURS, novelty
from rllib_srl.replay.diversity.neighbours import Neighbours, check_card
from rllib_srl.replay.items import Tables
from rllib_srl.types import Group


@dataclass(frozen=True)
class Measured:
    """A group's prompt compared with the other items. Invariant: no vector, no novelty."""

    novelty: float | None = None
    vector_D: np.ndarray | None = None
    nearest: tuple[int, float] | None = None  # slot and cosine similarity of the closest other item


class DiversityTracker:
    """The embedder and the vectors of a buffer. Invariant: after a commit, they are exactly those of the store."""

    def __init__(self, embedding: str, model_dir: Path | None, device: str) -> None:
        """Create a tracker without vectors.

        Args:
            embedding: name of the embedding.
            model_dir: directory of the policy; the sentence encoder needs its tokenizer.
            device: "cpu" or "gpu", where neighbours are searched.
        """
        if device == "gpu":
            check_card()
        self._device = device
        self._embedder = EMBEDDINGS.named(embedding)(**({"tokenizer": model_dir} if embedding == "sentence" else {}))
        self._neighbours: Neighbours | None = None
        self._set: dict[int, np.ndarray] = {}  # pending, by slot
        self._removed: set[int] = set()  # pending

    def measure(self, groups: Sequence[Group], slots: Sequence[int]) -> list[Measured]:
        """Measure groups; `slots` are those of their items, -1 for items that do not exist yet."""
        if isinstance(self._embedder, PolicyEmbedder) or not groups:  # its vectors arrive later, see `receive`
            return [Measured()] * len(groups)
        return self._compared(self._embedder.embed(groups), slots)

    def receive(self, vectors: Mapping[int, np.ndarray]) -> dict[int, Measured]:
        """Measure items by vectors that the learner computed, slot -> float32 [G, D]; return the measures by slot."""
        if not vectors or not isinstance(self._embedder, PolicyEmbedder):
            return {}
        vectors_PD = self._embedder.receive(list(vectors.values()))
        return dict(zip(vectors, self._compared(vectors_PD, list(vectors)), strict=True))

    def _compared(self, vectors_PD: np.ndarray, slots: Sequence[int]) -> list[Measured]:
        slots_PK, similarity_PK = self._index(vectors_PD.shape[1]).nearest(vectors_PD, NEIGHBOURS, slots)
        novelty_P, nearest_P = (
            novelty(similarity_PK).tolist(),
            zip(slots_PK[:, 0].tolist(), similarity_PK[:, 0].tolist()),
        )
        return [
            Measured(new, vector_D, (slot, cosine) if slot >= 0 else None)
            for new, vector_D, (slot, cosine) in zip(novelty_P, vectors_PD, nearest_P, strict=True)
        ]

    # --- vectors ---------------------------------------------------------------------------------

    def put(self, slot: int, vector_D: np.ndarray) -> None:
        """Set the vector of an item at the next commit."""
        self._set[slot] = vector_D

    def forget(self, slot: int) -> None:
        """Remove the vector of an item at the next commit."""
        self._set.pop(slot, None)
        self._removed.add(slot)

    def is_gone(self, slot: int) -> bool:
        """Return whether the item at a slot was removed since the last commit."""
        return slot in self._removed

    def commit(self) -> None:
        """Apply the pending changes to the index."""
        if self._neighbours is not None:
            self._neighbours.remove(sorted(self._removed))
        self.load(self._set.items())
        self.rollback()

    def rollback(self) -> None:
        """Drop the pending changes since the last commit."""
        self._set, self._removed = {}, set()

    def load(self, vectors: Iterable[tuple[int, np.ndarray]]) -> None:
        """Store vectors by slot."""
        if pairs := list(vectors):
            block = np.stack([vector for _, vector in pairs])
            self._index(block.shape[1]).set([slot for slot, _ in pairs], block)

    def vectors(self) -> list[tuple[int, np.ndarray]]:
        """Return the slot and the vector of each item that has one, as `load` takes them."""
        if self._neighbours is None:
            return []
        ids_N = self._neighbours.ids()
        return list(zip(ids_N.tolist(), self._neighbours.vectors(ids_N), strict=True))

    def get_state(self) -> dict[str, Any]:
        """Return the state of the embedder, as JSON types."""
        return self._embedder.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._embedder.set_state(state)

    def check(self, store: Tables) -> None:
        """Check that exactly the items with `has_vector` have a vector.

        Raises:
            ValueError: the slots differ.
        """
        slots_N = store.slots()
        wanted = slots_N[store.items[slots_N]["has_vector"]].tolist()
        held = [slot for slot, _ in self.vectors()]
        if wanted != held:
            raise ValueError(f"{len(held)} vectors are held; expected those of {len(wanted)} items with has_vector")

    def _index(self, dim: int) -> Neighbours:
        if self._neighbours is None:
            self._neighbours = Neighbours(dim, self._device)
        return self._neighbours
