"""Track the diversity of a buffer's items: embed groups, measure distances to the stored vectors, and rank them.

    groups -> embedder -> vectors -> neighbours, centroid, clusters -> raw parts -> calibrators -> diversity in [0, 1]

Items are compared with the vectors stored before the current call. New vectors enter the index when the call is
committed, so a failed call leaves the index unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.diversity.card import check_card
from rllib_srl.replay.diversity.embedders import EmbeddedGroups, PolicyEmbedder, make_embedder
from rllib_srl.replay.diversity.measures import (
    Calibrator,
    centroid_distance,
    combine,
    episode_spread,
    episodic_novelty,
    group_variance,
    novelty,
    rarity,
)
from rllib_srl.replay.diversity.neighbours import Neighbours
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store.items import ItemStore
from rllib_srl.types import Group

CALIBRATED_OVER = 512  # capacity of each calibrator


@dataclass(frozen=True)
class Measured:
    """The diversity measures of one visited item. Invariant: `vector_D` is None exactly if no vector is known yet."""

    parts: dict[str, float]  # raw values by the names of `measures.PARTS`
    vector_D: np.ndarray | None = None
    nearest: tuple[int, float] | None = None  # slot and cosine similarity of the closest other item
    distance_G: tuple[float, ...] = ()  # distance of each episode to the centre of its group

    def fields(self) -> dict[str, float]:
        """Return the raw parts as fields of the item table, without the variance, which the visit writes."""
        names = {"novelty": "novelty", "centroid": "centroid", "rarity": "rarity", "episodic": "spread"}
        return {names[part]: value for part, value in self.parts.items() if part in names}


class DiversityTracker:
    """The embedder, the calibrators and the vector index of a buffer.

    Invariant: after a commit, the index holds exactly the vectors of the journal.
    """

    def __init__(self, settings: ReplaySettings, model_dir: Path | None, seed: int) -> None:
        """Create a tracker without vectors.

        Args:
            settings: of the memory.
            model_dir: directory of the policy; the sentence encoder needs its tokenizer.
            seed: of the calibrators and the index.
        """
        self._settings, self._seed = settings, seed
        if settings.diversity_device == "gpu":
            check_card()
        extra = {"tokenizer": model_dir} if settings.embedding == "sentence" else {}
        self._embedder = make_embedder(settings.embedding, **extra)
        if "episodic" in settings.diversity_parts and not callable(getattr(self._embedder, "vectors", None)):
            raise ValueError(
                f"diversity_parts has 'episodic' with embedding = {settings.embedding!r}; expected an embedder with a "
                "method vectors(streams), for the turns of an episode"
            )
        self._calibrators = {
            part: Calibrator(seed=seed + at, capacity=CALIBRATED_OVER)
            for at, part in enumerate(settings.diversity_parts)
        }
        self._neighbours: Neighbours | None = None
        self._set: dict[int, np.ndarray] = {}  # pending, by slot
        self._removed: set[int] = set()  # pending
        self._fitted: Mapping[str, Any] | None = None  # saved fit of the index, as JSON types
        self._fits = (0, 0)  # of the index when `_fitted` was saved

    # --- measuring -------------------------------------------------------------------------------

    def measure(self, groups: Sequence[Group], slots: Sequence[int]) -> list[Measured]:
        """Measure visited items.

        Args:
            groups: finished groups.
            slots: slots of their items, -1 for items that do not exist yet.
        """
        variances = [{"variance": group_variance(group.rewards_G)} for group in groups]
        if isinstance(self._embedder, PolicyEmbedder) or not groups:  # its vectors arrive later, see `receive`
            return [Measured(parts) for parts in variances]
        embedded = self._embedder.embed(groups)
        measured = self._compared(embedded, slots, variances)
        if "episodic" in self._settings.diversity_parts:
            for one, group in zip(measured, groups, strict=True):
                one.parts["episodic"] = self._episodic(group, one.parts["novelty"])
        return measured

    def receive(self, vectors: Mapping[int, np.ndarray], store: ItemStore) -> dict[int, Measured]:
        """Measure items from vectors that the learner computed; return the measures by slot.

        Args:
            vectors: slot -> float32 [G, D], one row per episode.
            store: provides the variance of the items.
        """
        if not vectors or not isinstance(self._embedder, PolicyEmbedder):
            return {}
        slots, blocks = list(vectors), [np.asarray(block, np.float32) for block in vectors.values()]
        offsets = np.concatenate([[0], np.cumsum([len(block) for block in blocks], dtype=np.int64)])
        items_PD = np.stack([block.mean(axis=0) for block in blocks])
        embedded = self._embedder.receive(items_PD, np.concatenate(blocks), offsets)
        variances = [{"variance": min(1.0, 4.0 * float(store.items[slot]["variance"]))} for slot in slots]
        return dict(zip(slots, self._compared(embedded, slots, variances), strict=True))

    def _compared(
        self, embedded: EmbeddedGroups, slots: Sequence[int], parts: Sequence[dict[str, float]]
    ) -> list[Measured]:
        """Add to the parts of each item those that compare it with the stored vectors."""
        index = self._index(embedded.items_PD.shape[1])
        own_P = np.array([slot if index.has(slot) else -1 for slot in slots])
        ids_PK, similarity_PK = index.nearest(embedded.items_PD, self._settings.neighbours, own_P)
        columns = {
            "novelty": novelty(1.0 - similarity_PK),
            "centroid": centroid_distance(embedded.items_PD, index.centroid()),
            "rarity": rarity(index.cluster_share(embedded.items_PD)),
        }
        return [
            Measured(
                parts={**parts[p], **{name: float(column[p]) for name, column in columns.items()}},
                vector_D=embedded.items_PD[p],
                nearest=(int(ids_PK[p, 0]), float(similarity_PK[p, 0])) if ids_PK[p, 0] >= 0 else None,
                distance_G=tuple(episode_spread(embedded.episodes(p)).tolist()),
            )
            for p in range(len(slots))
        ]

    def _episodic(self, group: Group, item_novelty: float) -> float:
        """Return the mean `episodic_novelty` of a group's episodes."""
        turns = [turns_of(group, g) for g in range(group.size)]
        vectors = self._embedder.vectors([turn for episode in turns for turn in episode])  # type: ignore[attr-defined]
        ends = np.cumsum([len(episode) for episode in turns])[:-1]
        return float(np.mean([episodic_novelty(block, item_novelty) for block in np.split(vectors, ends)]))

    def rank(self, parts: Sequence[Mapping[str, float]]) -> np.ndarray:
        """Add the raw parts of items to the calibrators and return the items' diversity, [P] in [0, 1].

        Args:
            parts: raw parts of each item, with the same names for all items.
        """
        ranks = []
        for name, calibrator in self._calibrators.items():
            if parts and name in parts[0]:
                values_P = np.array([of_item[name] for of_item in parts])
                calibrator.add(values_P)
                ranks.append(calibrator.rank(values_P))
        return combine(ranks) if ranks else np.full(len(parts), 0.5)

    # --- the index -------------------------------------------------------------------------------

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
        """Apply the pending changes to the index; a new fit is stored with the state of the next commit."""
        index = self._neighbours
        if index is not None and self._removed:
            index.remove([slot for slot in sorted(self._removed) if index.has(slot)])
        if self._set:
            slots = sorted(self._set)
            self._index(len(self._set[slots[0]])).set(slots, np.stack([self._set[slot] for slot in slots]))
        self.rollback()
        self._keep_fit()

    def rollback(self) -> None:
        """Drop the pending changes since the last commit."""
        self._set, self._removed = {}, set()

    def load(self, vectors: Iterable[tuple[int, np.ndarray]], fitted: Mapping[str, Any] | None) -> None:
        """Load all vectors of a journal and the fit of the index.

        `fitted` lags one commit behind. If the vectors of the last commit caused a new fit, it is computed again here.
        """
        pairs = list(vectors)
        slots = [slot for slot, _ in pairs]
        if fitted is not None:
            block = np.stack([vector for _, vector in pairs]) if pairs else np.empty((0, fitted["dim"]), np.float32)
            self._fitted, index = fitted, self._index(block.shape[1])
            index.load_state(unpacked(fitted), slots, block)
            self._fits = index.fits
            index.set([], block[:0])
        elif pairs:
            block = np.stack([vector for _, vector in pairs])
            self._index(block.shape[1]).set(slots, block)
        self._keep_fit()

    def vectors(self) -> list[tuple[int, np.ndarray]]:
        """Return the slot and the vector of each item that has one, as `load` takes them."""
        if self._neighbours is None:
            return []
        ids_N = self._neighbours.ids()
        return list(zip(ids_N.tolist(), self._neighbours.vectors(ids_N), strict=True))

    def _keep_fit(self) -> None:
        index = self._neighbours
        if index is not None and index.fits != self._fits:
            self._fitted, self._fits = packed(index.save_state()), index.fits

    def get_state(self) -> dict[str, Any]:
        """Return the state that later measures depend on, without the vectors, as JSON types."""
        return {
            "embedder": self._embedder.get_state(),
            "calibrators": {name: calibrator.get_state() for name, calibrator in self._calibrators.items()},
            "fitted": self._fitted,  # cached per fit, because it may be large
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `get_state`, without the index; parts that the state lacks keep empty calibrators."""
        self._embedder.set_state(state["embedder"])
        for name, calibrator in self._calibrators.items():
            if name in state["calibrators"]:
                calibrator.set_state(state["calibrators"][name])

    def check(self, store: ItemStore) -> None:
        """Check that exactly the items with `has_vector` have a vector.

        Raises:
            ValueError: the slots differ.
        """
        slots_N = store.slots()
        wanted = slots_N[store.items[slots_N]["has_vector"]].tolist()
        held = [] if self._neighbours is None else np.sort(self._neighbours.ids()).tolist()
        if wanted != held:
            raise ValueError(f"{len(held)} vectors are held; expected those of {len(wanted)} items with has_vector")

    def _index(self, dim: int) -> Neighbours:
        if self._neighbours is None:
            self._neighbours = Neighbours(dim, seed=self._seed, device=self._settings.diversity_device)
        return self._neighbours


def turns_of(group: Group, g: int) -> list[np.ndarray]:
    """Return the token ids of each turn the policy wrote in episode `g`."""
    span = slice(group.offsets[g], group.offsets[g + 1])
    mask_T = group.loss_mask_N[span]
    cuts = np.flatnonzero(np.diff(mask_T)) + 1
    return np.split(group.token_ids_N[span], cuts)[1::2]  # a stream begins outside the mask, so the pieces alternate


def packed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its arrays as hexadecimal text, for JSON. `unpacked` reverses it."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {"shape": list(value.shape), "float32": np.ascontiguousarray(value, "<f4").tobytes().hex()}
        return value

    return {name: plain(value) for name, value in state.items()}


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state that `packed` encoded, with its arrays restored."""

    def whole(value: Any) -> Any:
        if isinstance(value, Mapping) and "float32" in value:
            return np.frombuffer(bytes.fromhex(value["float32"]), "<f4").reshape(value["shape"]).copy()
        return value

    return {name: whole(value) for name, value in state.items()}
