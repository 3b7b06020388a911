"""Answers and ratings as two files that only grow, in a directory which many processes may share.

    asked.jsonl      {"id": "8c1f", "prompt_id": "17, 93, 40", "prompt": "...", "answer": "93"}     put up
                     {"id": "8c1f", "used": {"up": true, "stars": 4}}                            closed; null: unrated
    ratings.jsonl    {"id": "8c1f", "stars": 4}     {"id": "8c1f", "stars": 2}     {"id": "8c1f", "taken_back": true}

Each line is one write to a file opened for appending, so lines of several processes do not mix. A line that is not
whole yet is read later. A broken line is left out, named with file, line and field in the log, and counted.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

ASKED, RATINGS = "asked.jsonl", "ratings.jsonl"
_FIELDS = {  # field -> what it may hold, and whether a value is such
    "up": ("true or false", lambda value: isinstance(value, bool)),
    "stars": (
        "a number from 1 to 5",
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value <= 5,
    ),
}
_NEEDED = {"binary": ("up",), "ordinal": ("stars",), "normalised": ("stars",), "hybrid": ("up", "stars")}


class Normaliser(Protocol):
    """Moving statistics, as `envs.rating.Moving`."""

    def normalised(self, stars: float) -> float:
        """Return a rating against those before it, and take it in."""


def needed_by(scheme: str) -> tuple[str, ...]:
    """Return the fields that a rating must hold."""
    return _NEEDED[scheme]


def faults_of_rating(rating: Mapping[str, Any], needed: tuple[str, ...]) -> list[str]:
    """Return one line for each field that is missing or holds what it may not."""
    return [
        f"{name} = {rating.get(name)!r}; expected {_FIELDS[name][0]}"
        for name in needed
        if not _FIELDS[name][1](rating.get(name))
    ]


class Lines:
    """The whole lines of a file that grows. Invariant: a line is handed out once."""

    def __init__(self, path: Path):
        self.path, self.position, self.number = path, 0, 0
        self.num_broken = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the rows written since the last call, those left out that are broken."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as stream:
            stream.seek(self.position)
            grown = stream.read()
        whole, _, _ = grown.rpartition(b"\n")
        if not whole and not grown.startswith(b"\n"):
            return []
        self.position += len(whole) + 1
        rows = []
        for line in whole.split(b"\n"):
            self.number += 1
            if (row := self._row(line)) is not None:
                rows.append(row)
        return rows

    def _row(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if line.strip():
                self.broken(f"no JSON ({error})")
            return None
        if not isinstance(row, dict) or not isinstance(row.get("id"), str):
            self.broken("field id is missing; expected a mapping with the id of an answer")
            return None
        return row

    def broken(self, why: str) -> None:
        """Count and name the line that was read last."""
        self.num_broken += 1
        logger.warning("%s, line %d: %s; left out", self.path, self.number, why)


class RatingFiles:
    """A source of ratings: see `envs.rating.Source`.

    Invariant: what it returns depends on the whole lines of ratings.jsonl alone, not on who reads when.
    """

    def __init__(self, directory: Path, needed: tuple[str, ...], moving: Normaliser | None = None):
        """Use the files of `directory`, which is made if it is not there.

        Args:
            directory: where asked.jsonl and ratings.jsonl are, or will be
            needed: fields that a rating must hold
            moving: what `normalised` is computed with
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.needed, self._moving = directory, needed, moving
        self._ratings = Lines(directory / RATINGS)
        self._newest: dict[str, dict[str, Any]] = {}
        self._normalised: dict[str, float] = {}

    @property
    def num_broken(self) -> int:
        """Return how many lines of ratings were left out."""
        return self._ratings.num_broken

    def ask(self, request: Mapping[str, Any]) -> None:
        """Append a line to asked.jsonl."""
        append(self.directory / ASKED, request)

    def rating_of(self, request_id: str) -> Mapping[str, Any] | None:
        """Return the newest rating of an answer."""
        self.read()
        return self._newest.get(request_id)

    def normalised(self, request_id: str) -> float:
        """Return the newest rating of an answer against all ratings before it in the file."""
        return self._normalised[request_id]

    def read(self) -> list[str]:
        """Take in new lines; return the ids they rate."""
        found = []
        for row in self._ratings.new():
            if not row.get("taken_back"):
                if faults := faults_of_rating(row, self.needed):
                    self._ratings.broken(f"rating of {row['id']}: " + "; ".join(faults))
                    continue
                if self._moving is not None:
                    self._normalised[row["id"]] = self._moving.normalised(row["stars"])
            self._newest[row["id"]] = row
            found.append(row["id"])
        return found


class LateFiles:
    """Ratings that no episode got, each handed out once: also across processes that read one after the other.

    Invariant: `_open` holds the ids whose newest rating was neither used nor handed out, as far as is known.
    """

    def __init__(self, directory: Path, needed: tuple[str, ...]):
        """Use the files of `directory`."""
        self._files, self._needed = RatingFiles(directory, needed), needed
        self._asked = Lines(directory / ASKED)
        self._prompts: dict[str, str] = {}
        self._used: dict[str, Any] = {}
        self._open: set[str] = set()

    def new(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return prompt id and rating of what came after its answer was closed, and close it with that rating."""
        self._open.update(self._files.read())
        for row in self._asked.new():
            if "used" in row:
                self._used[row["id"]] = row["used"]
            elif isinstance(row.get("prompt_id"), str):
                self._prompts[row["id"]] = row["prompt_id"]
        late = []
        for request_id in sorted(self._open & self._used.keys()):  # of the others, the episode is still under way
            rating = self._files.rating_of(request_id)
            self._open.discard(request_id)
            if rating is None or rating.get("taken_back") or self._is_used(rating, request_id):
                continue
            self._files.ask({"id": request_id, "used": dict(rating)})
            if request_id in self._prompts:
                late.append((self._prompts[request_id], rating))
        return late

    def _is_used(self, rating: Mapping[str, Any], request_id: str) -> bool:
        used = self._used[request_id]
        return isinstance(used, dict) and all(rating.get(name) == used.get(name) for name in self._needed)


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append one JSON line in one write, which other processes' lines do not cut."""
    line = (json.dumps(row) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
