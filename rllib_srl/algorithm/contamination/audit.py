"""Compare the questions of several places, and put down which training questions repeat which evaluation questions.

audit_of(..., train, evaluation)     train, evaluation: [Questions("my_env", {prompt id: (text, answer)}), ...]
audit.shares                        place -> share of its evaluation questions that training repeats
audit.repeats                       place -> names of its training questions that repeat evaluation questions
audit.as_json()                     docs/own-data.md names the fields
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.storage.disk import writing

Encode = Callable[[Sequence[str]], np.ndarray]  # texts to unit vectors, [K, D]


@dataclass(frozen=True)
class Questions:
    """Questions of one place. Invariant: equal answers are equal texts; "" is an answer that is not known."""

    place: str  # id of an environment, or path of a file
    listed: Mapping[str, tuple[str, str]]  # prompt id, or number of a row -> question and answer


@dataclass(frozen=True)
class Audit:
    """The result of a comparison. Invariant: `hits` name rows by their positions in all questions of their side."""

    train: tuple[Questions, ...]
    evaluation: tuple[Questions, ...]
    hits: tuple[Any, ...]  # with `train` and `evaluation`, each with `number`, `text` and `answer`; `method`, `score`
    methods: tuple[str, ...]
    bounds: Mapping[str, float]  # lowest scores of the methods that have one

    @property
    def repeats(self) -> dict[str, frozenset[str]]:
        """Return place -> names of its training questions that repeat evaluation questions, without empty places."""
        return _by_place(self.train, (hit.train for hit in self.hits))

    @property
    def shares(self) -> dict[str, float]:
        """Return place -> share of its evaluation questions that training questions repeat."""
        hit = _by_place(self.evaluation, (one.evaluation for one in self.hits))
        return {each.place: len(hit.get(each.place, ())) / len(each.listed) for each in self.evaluation}

    def example(self) -> str:
        """Return the first pair, as text."""
        return f"{self.hits[0].train.text[:200]!r} and {self.hits[0].evaluation.text[:200]!r}"

    def as_json(self) -> dict[str, Any]:
        """Return everything in JSON types."""
        repeats, shares = self.repeats, self.shares
        num_hit = {each.place: round(shares[each.place] * len(each.listed)) for each in self.evaluation}
        train, evaluation = _names_of(self.train), _names_of(self.evaluation)
        pairs = [(hit, _told(train, hit.train), _told(evaluation, hit.evaluation)) for hit in self.hits]
        return {
            "train": [_about(each) | {"num_hit": len(repeats.get(each.place, ()))} for each in self.train],
            "eval": [_about(each) | {"num_hit": num_hit[each.place]} for each in self.evaluation],
            "methods": list(self.methods),
            **self.bounds,
            "num_hits": dict(Counter(hit.method for hit in self.hits)),
            "hits": [entry(*pair) for pair in pairs],
        }


def entry(hit: Any, train: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pair in JSON types, with what is said of its two rows."""
    return {"method": hit.method, "score": hit.score, "train": dict(train), "eval": dict(evaluation)}


def audit_of(
    comparison: Any,
    train: Sequence[Questions],
    evaluation: Sequence[Questions],
    methods: Collection[str],
    encode: Encode | None,
) -> Audit:
    """Compare all training questions with all evaluation questions.

    Args:
        comparison: of an environment that asks rows of data.
        train: places with at least one question each.
        evaluation: likewise.
        methods: some of `METHODS`.
        encode: sentence encoder, needed by the method "embedding".
    """
    hits = comparison.find(_pairs(train), _pairs(evaluation), methods, encode)
    bounds = {"containment": comparison.containment, "cosine": comparison.cosine}
    return Audit(tuple(train), tuple(evaluation), tuple(hits), tuple(methods), bounds)


def write_text(path: Path, text: str) -> None:
    """Replace a file by `text`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with writing(path):
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        part.replace(path)


def _names_of(side: Sequence[Questions]) -> list[tuple[str, str]]:
    return [(each.place, name) for each in side for name in each.listed]


def _pairs(side: Sequence[Questions]) -> list[tuple[str, str]]:
    return [pair for each in side for pair in each.listed.values()]


def _by_place(side: Sequence[Questions], rows: Iterable[Any]) -> dict[str, frozenset[str]]:
    names = _names_of(side)
    found: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        place, name = names[row.number]
        found[place].add(name)
    return {place: frozenset(ours) for place, ours in found.items()}


def _told(names: Sequence[tuple[str, str]], row: Any) -> dict[str, Any]:
    place, name = names[int(row.number)]
    return {"place": place, "name": name, "question": row.text, "answer": row.answer}


def _about(questions: Questions) -> dict[str, Any]:
    return {"place": questions.place, "num_questions": len(questions.listed)}
