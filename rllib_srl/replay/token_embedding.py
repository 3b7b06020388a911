"""Which tokens of a group make which vector: what every embedding of token ids shares.

    one group:   | few-shot header | question | answer 0 |         item vector    <- question
                 | few-shot header | question | answer 1 | ...     episode vector <- what the policy wrote

An item is a prompt, so its vector is the prompt's, history included, and does not move when the policy's answers do
(`answer_weight` mixes them in). What all prompts of an environment begin with, such as solved examples, is most of
their tokens and says nothing about any of them: it is found as the longest common prefix and left out
(`PromptHeaders`). An episode's vector is of what the policy wrote, its turns laid end to end: the prompt is the same
for all episodes of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.types import Group


@dataclass(frozen=True)
class EmbeddedGroups:
    """The vectors of some groups.

    Invariant: rows have length 1, or 0 where there was nothing to embed; the episodes of group p are the rows
    `offsets[p]:offsets[p + 1]` of `episodes_BD`.
    """

    items_PD: np.ndarray  # float32
    episodes_BD: np.ndarray  # float32
    offsets: np.ndarray  # int64 [P + 1]

    def episodes(self, p: int) -> np.ndarray:
        """Return the vectors of the episodes of group `p`, [G, D]."""
        return self.episodes_BD[self.offsets[p] : self.offsets[p + 1]]


class PromptHeaders:
    """What all prompts of an environment begin with, learned as they come: their longest common prefix.

    Invariant: a header only ever shrinks, and there is none before two different prompts have been seen. Prompts with
    a history teach nothing, for they begin with the whole of another prompt.
    """

    def __init__(self) -> None:
        self._prefix: dict[str, np.ndarray] = {}
        self._is_known: dict[str, bool] = {}

    def learn(self, groups: Sequence[Group]) -> None:
        """Shrink the header of each group's environment to what its prompt shares with it."""
        for group in groups:
            if group.prompt.history:
                continue
            name, tokens = group.prompt.env_id, prompt_tokens(group)
            known = self._prefix.setdefault(name, tokens)
            shared = _num_shared(known, tokens)
            if shared < max(len(known), len(tokens)):
                self._prefix[name] = known[:shared].copy()
                self._is_known[name] = True

    def strip(self, group: Group) -> np.ndarray:
        """Return the tokens of the prompt after the header; all of them where nothing would be left."""
        tokens = prompt_tokens(group)
        if not self._is_known.get(group.prompt.env_id, False):
            return tokens
        shared = _num_shared(self._prefix[group.prompt.env_id], tokens)
        return tokens[shared:] if shared < len(tokens) else tokens

    def get_state(self) -> dict[str, Any]:
        """Return the headers."""
        return {
            name: {"tokens": prefix.tolist(), "is_known": self._is_known.get(name, False)}
            for name, prefix in self._prefix.items()
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self._prefix = {name: np.array(entry["tokens"], np.int32) for name, entry in state.items()}
        self._is_known = {name: bool(entry["is_known"]) for name, entry in state.items()}


def prompt_tokens(group: Group) -> np.ndarray:
    """Return the tokens before the first that the policy wrote; all of them if it wrote none."""
    mask = group.loss_mask_N[: group.offsets[1]]
    return group.token_ids_N[: int(mask.argmax()) if mask.any() else len(mask)]


def _num_shared(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def normalised(vectors_KD: np.ndarray) -> np.ndarray:
    """Return float32 rows of length 1; a row of zeros stays, and a row of length 1 keeps its bits."""
    vectors_KD = np.ascontiguousarray(vectors_KD, np.float32)
    length_K1 = np.sqrt(np.square(vectors_KD, dtype=np.float64).sum(axis=1, keepdims=True))
    length_K1[(np.abs(length_K1 - 1) < 1e-6) | (length_K1 == 0)] = 1
    return (vectors_KD / length_K1).astype(np.float32)


class TokenEmbedder:
    """The part that n-grams and sentences share: which tokens make which vector."""

    def __init__(self, answer_weight: float) -> None:
        self._answer_weight, self._headers = answer_weight, PromptHeaders()

    def embed(self, groups: Sequence[Group]) -> EmbeddedGroups:
        """Return one vector an item and one an episode; the headers learn from these groups first."""
        self._headers.learn(groups)
        offsets = np.concatenate([[0], np.cumsum([group.size for group in groups], dtype=np.int64)])
        streams = [self._headers.strip(group) for group in groups]
        for group in groups:
            ends = np.cumsum(group.num_loss_tokens_G())[:-1]
            streams += np.split(group.token_ids_N[group.loss_mask_N], ends)
        vectors = self.vectors(streams)
        items_PD, episodes_BD = vectors[: len(groups)], vectors[len(groups) :]
        if self._answer_weight > 0 and len(groups):
            mean_PD = np.add.reduceat(episodes_BD, offsets[:-1]) / np.diff(offsets)[:, None]
            items_PD = normalised((1 - self._answer_weight) * items_PD + self._answer_weight * mean_PD)
        return EmbeddedGroups(items_PD, episodes_BD, offsets)

    def get_state(self) -> dict[str, Any]:
        """Return what later vectors depend on, as JSON holds it."""
        return {"headers": self._headers.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self._headers.set_state(state["headers"])

    def vectors(self, streams: Sequence[np.ndarray]) -> np.ndarray:
        """Return one vector a stream of token ids, [len(streams), D]."""
        raise NotImplementedError


def weight_faults(answer_weight: float) -> list[str]:
    """Return one line if the weight is out of its range."""
    return [] if 0 <= answer_weight <= 1 else [f"answer_weight = {answer_weight}; expected 0 to 1"]


def refuse(what: str, faults: Sequence[str]) -> None:
    """Raise `ValueError` naming all faults, if there are any."""
    if faults:
        raise ValueError(f"{what}: " + "; ".join(faults))
