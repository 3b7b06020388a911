"""Searchable documents, and question files over them.

    corpus    .jsonl  {"title": "Oslo", "text": "..."}      or Search-R1's {"contents": "\\"Oslo\\"\\n..."}
    questions .jsonl  {"question": "...", "answer": "..."}  or {"question": ..., "golden_answers": ["...", "..."]}

The ranking of documents is in envs/search/indexes.py.

Source: Jin et al., 2025, arXiv 2503.09516 (Search-R1: the files).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from rllib_srl.envs.rows import usable
from rllib_srl.envs.search.facts import Document, facts
from rllib_srl.envs.search.indexes import DenseIndex, Index, WordIndex

INDEXES = ("bm25", "faiss")

T = TypeVar("T")


@dataclass(frozen=True)
class Answered:
    """A question of a file. Invariant: there is at least one answer, and none is empty."""

    question: str
    answers: tuple[str, ...]


class Corpus:
    """Documents and an index over their titles and texts.

    Invariant: read-only after construction, so instances may share it.
    """

    def __init__(self, documents: Sequence[Document], index: str = "bm25", encoder: str = "hashing") -> None:
        """Index the documents.

        Args:
            documents: at least one
            index: a name of `INDEXES`
            encoder: of an index of vectors, see envs/search/indexes.py

        Raises:
            ValueError: the encoder is unknown, or a package it needs is not installed.
        """
        self.documents = tuple(documents)
        texts = [f"{one.title} {one.text}" for one in documents]
        self._index: Index = WordIndex(texts) if index == "bm25" else DenseIndex(texts, encoder)

    def search(self, query: str, num_results: int) -> list[Document]:
        """Return the documents that match a query, best first."""
        return [self.documents[position] for position in self._index.best(query, num_results)]


@lru_cache(maxsize=4)
def generated_corpus(seed: int, index: str = "bm25", encoder: str = "hashing") -> Corpus:
    """Return the corpus of generated facts."""
    return Corpus(facts(seed).documents(), index, encoder)


@lru_cache(maxsize=4)
def corpus_of_file(
    path: str, skip_broken: bool, index: str = "bm25", encoder: str = "hashing"
) -> tuple[Corpus, tuple[str, ...]]:
    """Return the corpus of a file, and error messages for the rows that are left out. Raises as `rows_of`."""
    documents, faults = rows_of(path, _document, skip_broken)
    return Corpus(documents, index, encoder), faults


@lru_cache(maxsize=4)
def questions_of_file(path: str, skip_broken: bool) -> tuple[tuple[Answered, ...], tuple[str, ...]]:
    """Return the distinct questions of a file, and errors for the rows that are left out. Raises as `rows_of`."""
    rows, faults = rows_of(path, _answered, skip_broken)
    return tuple({row.question: row for row in reversed(rows)}.values())[::-1], faults


def rows_of(path: str, read: Callable[[Any], T], skip_broken: bool) -> tuple[list[T], tuple[str, ...]]:
    """Read a file of JSON objects, one per line.

    Raises:
        ValueError: there is no such file, no row in it, or a broken row (naming file, row and field), unless skipped.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"file {path!r} cannot be read ({error}); expected JSON objects, one a line") from None
    rows: list[T] = []
    faults: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(read(json.loads(line)))
        except (ValueError, RecursionError) as error:
            faults.append(f"{path}, row {number}: {error}")
    remedy = "fix the rows, or set broken_rows = 'skip'"
    expected = "JSON objects, one a line"
    return usable(rows, faults, path, skips_broken=skip_broken, remedy=remedy, expected=expected)


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
    given = row.get(field)
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list) or not answers or not all(isinstance(one, str) and one.strip() for one in answers):
        raise ValueError(f"field {field!r}; expected text, or a list of at least one text")
    return Answered(" ".join(question.split()), tuple(one.strip() for one in answers))
