"""Searchable documents, and question files over them.

    corpus    .jsonl  {"title": "Oslo", "text": "..."}      or Search-R1's {"contents": "\\"Oslo\\"\\n..."}
    questions .jsonl  {"question": "...", "answer": "..."}  or {"question": ..., "golden_answers": ["...", "..."]}

Documents are ranked by BM25 over case-folded words; equal scores are ordered by position.

Sources: Jin et al., 2025, arXiv 2503.09516 (Search-R1: the files); Robertson and Zaragoza, 2009 (BM25, the variant of
Lucene); Lù, 2024, arXiv 2407.03618 (the package bm25s).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from rllib_srl.envs.rows import usable_rows
from rllib_srl.envs.search.facts import Document, facts

_WORD = re.compile(r"\w+")
_MOST_QUERY_WORDS = 200


@dataclass(frozen=True)
class Answered:
    """A question of a file. Invariant: there is at least one answer, and none is empty."""

    question: str
    answers: tuple[str, ...]


class Corpus:
    """Documents that are found by the words of their titles and texts.

    Invariant: read-only after construction, so instances may share it.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        import bm25s

        self.documents = tuple(documents)
        self._index = bm25s.BM25(method="lucene")
        self._index.index([_words(f"{document.title} {document.text}") for document in documents], show_progress=False)

    def search(self, query: str, num_results: int) -> list[Document]:
        """Return the documents that share words with a query, best first; its first 200 words count."""
        asked = _words(query)[:_MOST_QUERY_WORDS]
        if not asked:
            return []
        score_D = self._index.get_scores(asked)
        best_D = np.argsort(-score_D, kind="stable")[:num_results]
        return [self.documents[position] for position in best_D if score_D[position] > 0]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


@lru_cache(maxsize=4)
def generated_corpus(seed: int) -> Corpus:
    """Return the corpus of generated facts."""
    return Corpus(facts(seed).documents())


@lru_cache(maxsize=4)
def corpus_of_file(path: str, skips_broken: bool) -> tuple[Corpus, tuple[str, ...]]:
    """Return the corpus of a file, and error messages for the rows that are left out. Raises as `usable_rows`."""
    documents, errors = usable_rows(path, _document, skips_broken=skips_broken)
    return Corpus(documents), errors


@lru_cache(maxsize=4)
def questions_of_file(path: str, skips_broken: bool) -> tuple[tuple[Answered, ...], tuple[str, ...]]:
    """Return the distinct questions of a file, and errors for the rows that are left out. Raises as `usable_rows`."""
    rows, errors = usable_rows(path, _answered, skips_broken=skips_broken)
    return tuple({row.question: row for row in reversed(rows)}.values())[::-1], errors


def _text_in(row: Any, field: str) -> str:
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"field {field!r} is missing or empty; expected text")
    return value.strip()


def _document(row: Any) -> Document:
    if isinstance(row, dict) and "contents" in row:
        title, _, text = _text_in(row, "contents").partition("\n")
        return Document(title.strip('" ') or "untitled", text.strip() or title)
    return Document(_text_in(row, "title"), _text_in(row, "text"))


def _answered(row: Any) -> Answered:
    question = _text_in(row, "question")
    field = next((name for name in ("golden_answers", "answers", "answer") if name in row), "answer")
    value = row.get(field)
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ValueError(f"field {field!r}; expected text, or a list of at least one text")
    return Answered(" ".join(question.split()), tuple(answer.strip() for answer in answers))
