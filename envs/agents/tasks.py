"""The tasks of an agent: rows of a file, or numbers.

    Tasks("tasks.jsonl")      a prompt id is a hash of its row; a fixed share is held out, by hash
    Tasks("")                 {"seed": 17}: a prompt id is a number; even numbers train, odd ones are held out
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rllib_srl.envs import text
from rllib_srl.envs.math.question_rows import rows_of


class Tasks:
    """Tasks by prompt id. Invariant: the splits share no task."""

    def __init__(self, path: str = "", heldout_path: str = "") -> None:
        """Read the files.

        Args:
            path: .jsonl, .json, .csv or .parquet; "" for numbers.
            heldout_path: file of the held-out tasks; "": a fixed share of those of `path`.

        Raises:
            ValueError: a file cannot be read, has a row that is no object, or has no rows.
        """
        self._rows: dict[str, dict[str, dict[str, Any]]] = {split: {} for split in text.SPLITS}
        self._is_numbered = not path
        if not path:
            if heldout_path:
                raise ValueError("heldout_path is given without path; expected both, or path alone")
            return
        if heldout_path:
            self._rows["heldout"] = _read(heldout_path)
            every = _read(path)
            self._rows["train"] = {one: row for one, row in every.items() if one not in self._rows["heldout"]}
        else:
            for prompt_id, row in _read(path).items():
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
                raise ValueError(f"prompt_id = {prompt_id!r}; expected a number: there is no file of tasks")
            return {"seed": int(prompt_id)}
        for rows in self._rows.values():
            if prompt_id in rows:
                return json.loads(json.dumps(rows[prompt_id]))  # type: ignore[no-any-return]
        raise ValueError(f"prompt_id = {prompt_id!r}; expected one of the {sum(map(len, self._rows.values()))} tasks")


def _read(path: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for number, row in rows_of(Path(path).expanduser()):
        if not isinstance(row, Mapping):
            raise ValueError(f"path = {path!r}: row {number} is {row!r:.80}; expected an object")
        written = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
        found[hashlib.blake2b(written.encode("utf-8", "replace"), digest_size=12).hexdigest()] = json.loads(written)
    if not found:
        raise ValueError(f"path = {path!r} has no rows; expected tasks")
    return found
