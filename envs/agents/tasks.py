"""The tasks of an agent: rows of a file or of a data set, or numbers.

Tasks("tasks.jsonl")      a prompt id is a hash of its row; a fixed share is held out, by hash
Tasks.of(rows)            the same for rows by prompt id
Tasks("")                 {"seed": 17}: a prompt id is a number; even numbers train, odd ones are held out
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rllib_srl.envs import text
from rllib_srl.envs.math.data_files import rows_of


class Tasks:
    """Tasks by prompt id. Invariant: the splits share no task."""

    def __init__(self, path: str = "", heldout_path: str = "") -> None:
        """Read the files.

        Args:
            path: .jsonl, .json, .csv or .parquet; "" for numbers.
            heldout_path: file of the held-out tasks; "": a fixed share of those of `path`.

        Raises:
            ValueError: a file cannot be read, has a row that is not an object, or has no rows.
        """
        self._rows: dict[str, dict[str, dict[str, Any]]] = {split: {} for split in text.SPLITS}
        self._is_numbered = not path
        if not path:
            if heldout_path:
                raise ValueError("heldout_path is given without path; expected both, or path alone")
            return
        self._divide(_read(path), _read(heldout_path) if heldout_path else None)

    @classmethod
    def of(cls, rows: Mapping[str, dict[str, Any]]) -> Tasks:
        """Return the tasks of rows by prompt id, of which a fixed share is held out."""
        tasks = cls()
        tasks._is_numbered = False
        tasks._divide(rows, None)
        return tasks

    def _divide(self, train: Mapping[str, dict[str, Any]], heldout: Mapping[str, dict[str, Any]] | None) -> None:
        if heldout is not None:
            self._rows["heldout"] = dict(heldout)
            self._rows["train"] = {row_id: row for row_id, row in train.items() if row_id not in heldout}
            return
        for prompt_id, row in train.items():
            self._rows[text.split_of(prompt_id)][prompt_id] = row

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield the prompt ids of a split, each once, in an order drawn from `seed`; numbers are without end."""
        text.check_split(split)
        if self._is_numbered:
            generator = random.Random(f"{split}:{seed}")
            while True:
                yield str(2 * generator.getrandbits(30) + text.SPLITS.index(split))
        ids = sorted(self._rows[split])
        for number in text.shuffled(len(ids), f"{split}:{seed}"):
            yield ids[number]

    def task(self, prompt_id: str) -> dict[str, Any]:
        """Return a task.

        Raises:
            ValueError: there is no such task.
        """
        if self._is_numbered:
            if not (prompt_id.isascii() and prompt_id.isdigit()):
                raise ValueError(f"prompt_id = {prompt_id!r}; expected a number, as path is not set")
            return {"seed": int(prompt_id)}
        for rows in self._rows.values():
            if prompt_id in rows:
                return copy.deepcopy(rows[prompt_id])
        raise ValueError(f"prompt_id = {prompt_id!r}; expected one of the {sum(map(len, self._rows.values()))} tasks")


def ids_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rows by prompt id, a hash of their contents; equal rows are one."""
    by_id: dict[str, dict[str, Any]] = {}
    for row in rows:
        written = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
        by_id.setdefault(hashlib.blake2b(written.encode("utf-8", "replace"), digest_size=12).hexdigest(), dict(row))
    return by_id


def _read(path: str) -> dict[str, dict[str, Any]]:
    rows = []
    for number, row in rows_of(Path(path).expanduser()):
        if not isinstance(row, Mapping):
            raise ValueError(f"path = {path!r}: row {number} is {row!r:.80}; expected an object")
        rows.append(json.loads(json.dumps(row, ensure_ascii=False, default=str)))
    if not rows:
        raise ValueError(f"path = {path!r} has no rows; expected tasks")
    return ids_of(rows)
