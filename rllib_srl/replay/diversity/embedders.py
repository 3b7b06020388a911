"""Embed prompts as vectors, from which novelty is measured.

    ngram              signed hashing of token n-grams          no model; the default
    contrib.sentence   a sentence encoder on the decoded text   needs its weights and the policy's tokenizer

Register your own embedding by its constructor, which takes no arguments: `EMBEDDINGS["mine"] = MyEmbedder`.

An item is a prompt, so its vector is that of the prompt, history included, not of the policy's answers. A beginning
shared by all prompts of an environment, such as few-shot examples, may be most of their tokens but does not distinguish
them; it is detected as their longest common prefix and removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.common.rules import Rules
from rllib_srl.types import Group


class Embedder:
    """Base class of embeddings: of the prompt's tokens without the header; subclasses implement `vectors`.

    The header is the longest common prefix of an environment's prompts. Invariant: it only shrinks, and there is none
    before two different prompts have been seen. Prompts with a history are ignored, because they begin with all of
    another prompt. Equal groups and equal state give equal vectors in every process.
    """

    model_dir: Path | None = None  # the policy's directory, for its tokenizer; the memory sets it

    def __init__(self) -> None:
        self._prefixes: dict[str, tuple[np.ndarray, bool]] = {}  # the prefix, and whether it is a header already

    def embed(self, groups: Sequence[Group]) -> np.ndarray:
        """Return one vector for the prompt of each group, float32 [P, D], of norm 1 or 0; first update the headers."""
        self.learn(groups)
        return self.vectors([self.strip(group) for group in groups])

    def vectors(self, streams: Sequence[np.ndarray]) -> np.ndarray:
        """Return one vector for each stream of token ids, [len(streams), D]."""
        raise NotImplementedError

    def learn(self, groups: Sequence[Group]) -> None:
        """Shrink the header of each group's environment to the prefix it shares with the group's prompt."""
        for group in groups:
            if group.prompt.history:
                continue
            tokens = prompt_tokens(group)
            prefix, _ = self._prefixes.setdefault(group.prompt.env_id, (tokens, False))
            num = _num_shared(prefix, tokens)
            if num < max(len(prefix), len(tokens)):
                self._prefixes[group.prompt.env_id] = (prefix[:num].copy(), True)

    def strip(self, group: Group) -> np.ndarray:
        """Return the tokens of the prompt after the header; all of them if none would be left."""
        tokens = prompt_tokens(group)
        prefix, is_header = self._prefixes.get(group.prompt.env_id, (tokens, False))
        num = _num_shared(prefix, tokens) if is_header else 0
        return tokens[num:] if num < len(tokens) else tokens

    def get_state(self) -> dict[str, Any]:
        headers = {name: [prefix.tolist(), is_header] for name, (prefix, is_header) in self._prefixes.items()}
        return {"headers": headers}

    def set_state(self, state: Mapping[str, Any]) -> None:
        headers = state["headers"].items()
        self._prefixes = {name: (np.array(ids, np.int32), is_header) for name, (ids, is_header) in headers}


def prompt_tokens(group: Group) -> np.ndarray:
    """Return the tokens before the first one that the policy wrote; all of them if it wrote none."""
    mask = group.loss_mask_N[: group.offsets[1]]
    return group.token_ids_N[: int(mask.argmax()) if mask.any() else len(mask)]


def _num_shared(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def normalised(vectors_KD: np.ndarray) -> np.ndarray:
    """Return the rows as float32 with norm 1; zero rows stay zero, and rows of norm 1 keep their bits."""
    vectors_KD = np.ascontiguousarray(vectors_KD, np.float32)
    length_K1 = np.sqrt(np.square(vectors_KD, dtype=np.float64).sum(axis=1, keepdims=True))
    length_K1[(np.abs(length_K1 - 1) < 1e-6) | (length_K1 == 0)] = 1
    unit_KD: np.ndarray = (vectors_KD / length_K1).astype(np.float32)
    return unit_KD


_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class NgramEmbedder(Embedder):
    """Signed hashing of token n-grams: no model, no tokenizer, microseconds per prompt.

    v[h(gram) mod D] += s(gram) over all n-grams of the given orders, then v / |v|. Before normalisation, inner products
    equal those of the n-gram counts in expectation over hash functions.

    Source: Weinberger et al. 2009, arXiv 0902.2206 section 2.
    """

    dim = 256  # D
    orders: tuple[int, ...] = (1, 2, 3)  # lengths of the n-grams, ascending

    def vectors(self, streams: Sequence[np.ndarray]) -> np.ndarray:
        """Return one vector for each stream of token ids, [len(streams), D]; n-grams do not cross stream borders."""
        tokens_N = np.concatenate([*streams, np.empty(0, np.int32)]).astype(np.uint64)
        row_N = np.repeat(np.arange(len(streams)), [len(stream) for stream in streams])
        sums = np.zeros(len(streams) * self.dim)
        hash_N = np.zeros(len(tokens_N), np.uint64)
        for order in range(1, self.orders[-1] + 1):
            start = len(tokens_N) - order + 1
            if start <= 0:
                break
            # hash_N[i] is the hash of the n-gram of length `order` that begins at token i.
            hash_N = _mixed(hash_N[:start] * _MIX[0] + tokens_N[order - 1 :] + np.uint64(1))
            if order in self.orders:
                inside = row_N[:start] == row_N[order - 1 :]
                bucket = (hash_N >> np.uint64(8)) % np.uint64(self.dim)
                cell = (row_N[:start] * self.dim + bucket.astype(np.int64))[inside]
                sign = 1.0 - 2.0 * (hash_N & np.uint64(1)).astype(np.float64)[inside]
                sums += np.bincount(cell, weights=sign, minlength=len(sums))
        return normalised(sums.reshape(len(streams), self.dim))


def _mixed(hash_N: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64, which mixes every bit into all others."""
    hash_N = (hash_N ^ (hash_N >> np.uint64(30))) * _MIX[1]
    hash_N = (hash_N ^ (hash_N >> np.uint64(27))) * _MIX[2]
    mixed_N: np.ndarray = hash_N ^ (hash_N >> np.uint64(31))
    return mixed_N


EMBEDDINGS: Rules[Callable[[], Embedder]] = Rules("embedding", {"ngram": NgramEmbedder})
