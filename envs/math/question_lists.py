"""Questions of data as lists: read from a file or a data set of the hub, and compared with each other.

    COMPARISON.read("", "exam.csv")              Data: rows with question and answer
    COMPARISON.find(train, evaluation, ...)      which questions of one list repeat which of the other

Environments that ask rows of data have `comparison`, so that a run finds both by the name of its environment.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllib_srl.envs.math.contamination import (
    CONTAINMENT,
    COSINE,
    Encode,
    Hit,
    Row,
    answer_key,
    find_contamination,
    key_of,
)
from rllib_srl.envs.math.data_place import local_file
from rllib_srl.envs.math.question_rows import RowFault, problem_of, rows_of

_MAX_FAULTS_SHOWN = 20


@dataclass
class Data:
    """A file of questions. Invariant: `rows` are those that can be used, `bad_rows` has a line for each other one."""

    path: Path
    rows: list[Row] = field(default_factory=list)
    raw: dict[int, Any] = field(default_factory=dict)  # rows as read, by number
    bad_rows: list[str] = field(default_factory=list)

    def about(self) -> dict[str, Any]:
        """Return what an audit has of the file."""
        return {"path": str(self.path), "num_rows": len(self.rows), "bad_rows": self.bad_rows}


class Comparison:
    """Reads and compares questions. Invariant: it has no state."""

    containment = CONTAINMENT
    cosine = COSINE

    def read(
        self,
        hub_id: str,
        path: str,
        question: str = "",
        answer: str = "",
        skips: bool = False,
        remedy: str = "fix them",
    ) -> Data:
        """Read the questions of a file or of a data set of the hub.

        Args:
            hub_id: of a data set, "" for a file.
            path: of the file, or a split or file in the data set.
            question: column of the question, if it has none of the known names.
            answer: column of the answer, likewise.
            skips: leave out rows without a question.
            remedy: what to do about such rows, for the error message.

        Raises:
            ValueError: there is no such data, it has no question, or rows have none and `skips` is False.
        """
        found = Data(local_file(hub_id, path))
        for number, row in rows_of(found.path):
            try:
                problem = problem_of(row, question, answer, has_reward=True)  # so that a row needs no answer
            except RowFault as fault:
                found.bad_rows.append(f"row {number}, {fault}")
                continue
            found.rows.append(Row(number, problem.question, answer_key(problem)))
            found.raw[number] = row
        if found.bad_rows and not skips:
            more = len(found.bad_rows) - _MAX_FAULTS_SHOWN
            lines = found.bad_rows[:_MAX_FAULTS_SHOWN] + ([f"and {more} more rows"] if more > 0 else [])
            raise ValueError(f"file {str(found.path)!r}: {'; '.join(lines)}; {remedy}")
        if not found.rows:
            raise ValueError(f"file {str(found.path)!r} has no rows to compare; expected questions")
        return found

    def key_of(self, answer: str) -> str:
        """Return a text that is equal for equal answers."""
        return key_of(answer)

    def find(
        self,
        train: Sequence[tuple[str, str]],
        evaluation: Sequence[tuple[str, str]],
        methods: Collection[str],
        encode: Encode | None,
    ) -> list[Hit]:
        """Return every pair that asks the same; rows are numbered by their positions, from 0.

        Args:
            train: question and answer of training rows; equal answers are equal texts, "" is not known.
            evaluation: likewise.
            methods: some of `METHODS`.
            encode: sentence encoder, needed by the method "embedding".
        """
        ours, theirs = ([Row(at, *pair) for at, pair in enumerate(side)] for side in (train, evaluation))
        return find_contamination(ours, theirs, methods, encode)


COMPARISON = Comparison()
