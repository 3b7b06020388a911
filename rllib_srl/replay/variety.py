"""The diversity of a buffer's items: their vectors, how far each lies from the rest, and its rank among the others.

    groups -> embedder -> vectors -> neighbours, centroid, clusters -> raw parts -> calibrators -> diversity in [0, 1]

Items are compared with what was stored before the call that brought them. Vectors enter the index when that call is
committed, so that one that fails leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.diversity import (
    Calibrator,
    centroid_distance,
    combine,
    episode_spread,
    episodic_novelty,
    group_variance,
    novelty,
    rarity,
)
from rllib_srl.replay.embedding import EmbeddedGroups, PolicyEmbedder, make_embedder
from rllib_srl.replay.memory import MemoryStore
from rllib_srl.replay.neighbours import Neighbours
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import Group

CALIBRATED_OVER = 512  # values a rank is taken among


@dataclass(frozen=True)
class Measured:
    """What diversity knows of one visited item. Invariant: `vector_D` is None exactly where no vector is known yet."""

    parts: dict[str, float]  # raw, by the names of `diversity.PARTS`
    vector_D: np.ndarray | None = None
    nearest: tuple[int, float] | None = None  # slot and cosine similarity of the closest other item
    distance_G: tuple[float, ...] = ()  # of each episode to the centre of its group

    def fields(self) -> dict[str, float]:
        """Return the raw parts as fields of the item table, the variance aside, which the visit writes."""
        names = {"novelty": "novelty", "centroid": "centroid", "rarity": "rarity", "episodic": "spread"}
        return {names[part]: value for part, value in self.parts.items() if part in names}


class Variety:
    """Measures items and keeps their vectors.

    Invariant: after a commit, the index holds exactly the vectors of the journal.
    """

    def __init__(self, settings: ReplaySettings, model_dir: Path | None, seed: int) -> None:
        """Start without vectors.

        Args:
            settings: of the memory.
            model_dir: of the policy, whose tokenizer the sentence encoder needs.
            seed: of calibrators and index.
        """
        self._settings, self._seed = settings, seed
        extra = {"tokenizer": model_dir} if settings.embedding == "sentence" else {}
        self._embedder = make_embedder(settings.embedding, **extra)
        self._calibrators = {
            part: Calibrator(seed=seed + at, capacity=CALIBRATED_OVER)
            for at, part in enumerate(settings.diversity_parts)
        }
        self._neighbours: Neighbours | None = None
        self._set: dict[int, np.ndarray] = {}
        self._removed: set[int] = set()
        self._fitted: Mapping[str, Any] | None = None  # what the index is fitted to, as JSON types
        self._fitted_at: tuple[int, int] | None = None

    @property
    def comes_later(self) -> bool:
        """Say whether vectors arrive after the groups: hidden states, from the learner."""
        return isinstance(self._embedder, PolicyEmbedder)

    # --- measuring -------------------------------------------------------------------------------

    def measure(self, groups: Sequence[Group], slots: Sequence[int]) -> list[Measured]:
        """Measure visited items.

        Args:
            groups: that were played.
            slots: of their items, -1 for those that do not exist yet.
        """
        variances = [{"variance": group_variance(group.rewards_G)} for group in groups]
        if self.comes_later or not groups:
            return [Measured(parts) for parts in variances]
        embedded = self._embedder.embed(groups)
        measured = self._placed(embedded, slots, variances)
        if "episodic" in self._settings.diversity_parts:
            for one, group in zip(measured, groups, strict=True):
                one.parts["episodic"] = self._episodic(group, one.parts["novelty"])
        return measured

    def receive(self, vectors: Mapping[int, np.ndarray], store: MemoryStore) -> dict[int, Measured]:
        """Measure items whose episodes' vectors have arrived, by slot.

        Args:
            vectors: slot -> float32 [G, D].
            store: the table, which knows their variance.
        """
        if not vectors or not isinstance(self._embedder, PolicyEmbedder):
            return {}
        slots, blocks = list(vectors), [np.asarray(block, np.float32) for block in vectors.values()]
        offsets = np.concatenate([[0], np.cumsum([len(block) for block in blocks], dtype=np.int64)])
        items_PD = np.stack([block.mean(axis=0) for block in blocks])
        embedded = self._embedder.receive(items_PD, np.concatenate(blocks), offsets)
        variances = [{"variance": min(1.0, 4.0 * float(store.items[slot]["variance"]))} for slot in slots]
        return dict(zip(slots, self._placed(embedded, slots, variances), strict=True))

    def _placed(
        self, embedded: EmbeddedGroups, slots: Sequence[int], parts: Sequence[dict[str, float]]
    ) -> list[Measured]:
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
        """Return the mean over episodes of how little their turns repeat each other, times novelty."""
        turns = [turns_of(group, g) for g in range(group.size)]
        vectors = self._embedder.vectors([turn for episode in turns for turn in episode])  # type: ignore[attr-defined]
        ends = np.cumsum([len(episode) for episode in turns])[:-1]
        return float(np.mean([episodic_novelty(block, item_novelty) for block in np.split(vectors, ends)]))

    def rank(self, parts: Sequence[Mapping[str, float]]) -> np.ndarray:
        """Take the raw parts of some items into the calibrators and return their diversity, [P] in [0, 1].

        Args:
            parts: of each item, of all the same ones.
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
        """Give an item its vector, with the next commit."""
        self._set[slot] = vector_D

    def forget(self, slot: int) -> None:
        """Take an item's vector away, with the next commit."""
        self._set.pop(slot, None)
        self._removed.add(slot)

    def is_gone(self, slot: int) -> bool:
        """Say whether the item that `measure` found at a slot has been removed since the last commit."""
        return slot in self._removed

    def commit(self) -> None:
        """Bring the index up to date; what it is fitted to anew is in the state of the next commit."""
        index = self._neighbours
        if index is not None and self._removed:
            index.remove([slot for slot in sorted(self._removed) if index.has(slot)])
        if self._set:
            slots = sorted(self._set)
            self._index(len(self._set[slots[0]])).set(slots, np.stack([self._set[slot] for slot in slots]))
        self.rollback()
        self._keep_fit()

    def rollback(self) -> None:
        """Forget what was asked for since the last commit."""
        self._set, self._removed = {}, set()

    def load(self, vectors: Iterable[tuple[int, np.ndarray]], fitted: Mapping[str, Any] | None) -> None:
        """Take all vectors of a journal, and what the index had been fitted to at the last commit but one.

        If the last commit brought the vectors that had it fitted anew, they are all here, and so it is fitted again.
        """
        pairs = list(vectors)
        slots = [slot for slot, _ in pairs]
        if fitted is not None:
            block = np.stack([vector for _, vector in pairs]) if pairs else np.empty((0, fitted["dim"]), np.float32)
            self._fitted, index = fitted, self._index(block.shape[1])
            index.load_state(unpacked(fitted), slots, block)
            self._fitted_at = index.fitted_at
            index.set([], block[:0])
        elif pairs:
            block = np.stack([vector for _, vector in pairs])
            self._index(block.shape[1]).set(slots, block)
        self._keep_fit()

    def _keep_fit(self) -> None:
        index = self._neighbours
        if index is not None and index.fitted_at != (self._fitted_at or (0, 0)):
            self._fitted, self._fitted_at = packed(index.save_state()), index.fitted_at

    def get_state(self) -> dict[str, Any]:
        """Return what later measures depend on, the vectors aside, as JSON types."""
        return {
            "embedder": self._embedder.get_state(),
            "calibrators": {name: calibrator.get_state() for name, calibrator in self._calibrators.items()},
            "fitted": self._fitted,  # made once a fit, for it may be large
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called, the index aside; a part that was not asked for then starts afresh."""
        self._embedder.set_state(state["embedder"])
        for name, calibrator in self._calibrators.items():
            if name in state["calibrators"]:
                calibrator.set_state(state["calibrators"][name])

    def check(self, store: MemoryStore) -> None:
        """Check that exactly the items with `has_vector` have one.

        Raises:
            ValueError: they do not.
        """
        slots_N = store.slots()
        wanted = slots_N[store.items[slots_N]["has_vector"]].tolist()
        held = [] if self._neighbours is None else np.sort(self._neighbours.ids()).tolist()
        if wanted != held:
            raise ValueError(f"{len(held)} vectors are held; expected those of {len(wanted)} items with has_vector")

    def _index(self, dim: int) -> Neighbours:
        if self._neighbours is None:
            exact = self._settings.exact_neighbours
            self._neighbours = Neighbours(dim, exact_up_to=exact, seed=self._seed, device=self._settings.index_device)
        return self._neighbours


def turns_of(group: Group, g: int) -> list[np.ndarray]:
    """Return the token ids of each turn the policy wrote in episode `g`."""
    span = slice(group.offsets[g], group.offsets[g + 1])
    mask_T = group.loss_mask_N[span]
    cuts = np.flatnonzero(np.diff(mask_T)) + 1
    return np.split(group.token_ids_N[span], cuts)[1::2]  # a stream begins off the mask, so pieces alternate


def packed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its arrays as hexadecimal text, for JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {"shape": list(value.shape), "float32": np.ascontiguousarray(value, "<f4").tobytes().hex()}
        return value

    return {name: plain(value) for name, value in state.items()}


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `packed`."""

    def whole(value: Any) -> Any:
        if isinstance(value, Mapping) and "float32" in value:
            return np.frombuffer(bytes.fromhex(value["float32"]), "<f4").reshape(value["shape"]).copy()
        return value

    return {name: whole(value) for name, value in state.items()}
