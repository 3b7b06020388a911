"""Vectors without a model: signed hashing of token n-grams.

Source: Weinberger et al. 2009, arXiv 0902.2206.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rllib_srl.replay.token_embedding import TokenEmbedder, normalised, refuse, weight_faults

_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class NgramEmbedder(TokenEmbedder):
    """Signed hashing of token n-grams: no model, no tokenizer, microseconds an episode.

    v[h(gram) mod D] += s(gram) over all n-grams of the given orders, then divided by |v|. Inner products are those of
    the n-gram counts in expectation over hash functions.

    Invariant: a vector depends on the token ids, `dim`, `orders` and `seed` alone.

    Source: Weinberger et al. 2009, arXiv 0902.2206 section 2.
    """

    def __init__(
        self, dim: int = 256, orders: Sequence[int] = (1, 2, 3), seed: int = 0, answer_weight: float = 0.0
    ) -> None:
        """Set up the hash.

        Args:
            dim: D, at least 2.
            orders: lengths of the n-grams, each at least 1.
            seed: of the hash function.
            answer_weight: share of the episodes' mean vector in the item's, in [0, 1].

        Raises:
            ValueError: naming every value out of its range.
        """
        faults = [] if dim >= 2 else [f"dim = {dim}; expected at least 2"]
        if not orders or min(orders) < 1:
            faults.append(f"orders = {tuple(orders)}; expected lengths of at least 1")
        refuse("NgramEmbedder", faults + weight_faults(answer_weight))
        super().__init__(answer_weight)
        self._dim, self._orders, self._seed = dim, sorted(set(orders)), np.uint64(seed)

    @property
    def dim(self) -> int:
        """Return D."""
        return self._dim

    def vectors(self, streams: Sequence[np.ndarray]) -> np.ndarray:
        """Return one vector a stream of token ids, [len(streams), D]; n-grams do not reach across streams."""
        tokens_N = np.concatenate([*streams, np.empty(0, np.int32)]).astype(np.uint64)
        row_N = np.repeat(np.arange(len(streams)), [len(stream) for stream in streams])
        sums = np.zeros(len(streams) * self._dim)
        hash_N = np.full(len(tokens_N), self._seed, np.uint64)
        for order in range(1, self._orders[-1] + 1):
            start = len(tokens_N) - order + 1
            if start <= 0:
                break
            # hash_N[i] is that of the gram of length `order` that begins at token i.
            hash_N = _mixed(hash_N[:start] * _MIX[0] + tokens_N[order - 1 :] + np.uint64(1))
            if order in self._orders:
                inside = row_N[:start] == row_N[order - 1 :]
                bucket = (hash_N >> np.uint64(8)) % np.uint64(self._dim)
                cell = (row_N[:start] * self._dim + bucket.astype(np.int64))[inside]
                sign = 1.0 - 2.0 * (hash_N & np.uint64(1)).astype(np.float64)[inside]
                sums += np.bincount(cell, weights=sign, minlength=len(sums))
        return normalised(sums.reshape(len(streams), self._dim))


def _mixed(hash_N: np.ndarray) -> np.ndarray:
    """Return the finaliser of splitmix64, which spreads every bit over all others."""
    hash_N = (hash_N ^ (hash_N >> np.uint64(30))) * _MIX[1]
    hash_N = (hash_N ^ (hash_N >> np.uint64(27))) * _MIX[2]
    return hash_N ^ (hash_N >> np.uint64(31))
