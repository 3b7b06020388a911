"""From groups to vectors, by name: what diversity measures.

    ngram      token n-grams, hashed            no model; the default
    sentence   a sentence encoder's             needs its weights and the policy's tokenizer
    policy     the policy's own hidden states   computed by the learner, received with a later call

A user's own embedding is one registered constructor: `EMBEDDINGS["mine"] = MyEmbedder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rllib_srl.replay.ngrams import NgramEmbedder
from rllib_srl.replay.sentences import SentenceEncoder
from rllib_srl.replay.token_embedding import EmbeddedGroups, normalised, refuse
from rllib_srl.types import Group


class Embedder(Protocol):
    """Something that turns groups into vectors.

    Invariant: equal groups and an equal state give equal vectors in every process.
    """

    @property
    def dim(self) -> int | None:
        """Return D, None as long as it is not known."""

    def embed(self, groups: Sequence[Group]) -> EmbeddedGroups:
        """Return one vector an item and one an episode."""

    def get_state(self) -> dict[str, Any]:
        """Return what later vectors depend on, as JSON holds it."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called."""


class PolicyEmbedder:
    """Vectors that come from the policy itself: hidden states that the learner computes, received with a later call.

    Invariant: all vectors have the dimension of the first.
    """

    def __init__(self) -> None:
        self._dim: int | None = None

    @property
    def dim(self) -> int | None:
        """Return D, None before the first vector."""
        return self._dim

    def embed(self, groups: Sequence[Group]) -> EmbeddedGroups:
        """Refuse: nothing can be embedded before the learner has seen the groups.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("hidden states come from the learner; pass them to receive()")

    def receive(self, items_PD: np.ndarray, episodes_BD: np.ndarray, offsets: np.ndarray) -> EmbeddedGroups:
        """Return the learner's vectors, normalised.

        Args:
            items_PD: hidden state of each prompt, at its last token or averaged.
            episodes_BD: of each episode, groups laid end to end.
            offsets: [P + 1], cuts the episodes into groups.

        Raises:
            ValueError: dimensions or numbers that do not align.
        """
        dim = self._dim or items_PD.shape[1]
        faults = [
            f"{name} has {array.shape[1]} dimensions; expected {dim}"
            for name, array in (("items_PD", items_PD), ("episodes_BD", episodes_BD))
            if array.shape[1] != dim
        ]
        if len(offsets) != len(items_PD) + 1 or int(offsets[-1]) != len(episodes_BD):
            faults.append(
                f"offsets cut {int(offsets[-1])} episodes into {len(offsets) - 1} groups; "
                f"got {len(episodes_BD)} episodes and {len(items_PD)} items"
            )
        refuse("PolicyEmbedder", faults)
        self._dim = dim
        return EmbeddedGroups(normalised(items_PD), normalised(episodes_BD), np.asarray(offsets, np.int64))

    def get_state(self) -> dict[str, Any]:
        """Return the dimension."""
        return {"dim": self._dim}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self._dim = state["dim"]


EMBEDDINGS: dict[str, Callable[..., Embedder]] = {
    "ngram": NgramEmbedder,
    "sentence": SentenceEncoder,
    "policy": PolicyEmbedder,
}


def make_embedder(name: str, **settings: Any) -> Embedder:
    """Return the embedder of that name.

    Args:
        name: a key of `EMBEDDINGS`.
        settings: of its constructor.

    Raises:
        ValueError: an unknown name, or settings out of their range.
    """
    if name not in EMBEDDINGS:
        raise ValueError(f"embedding = {name!r}; expected one of {sorted(EMBEDDINGS)}")
    return EMBEDDINGS[name](**settings)
