"""Human feedback: an environment whose answers people rate, through files or an object in memory.

    Question: Which is largest: 17, 93 or 40?
    Answer: 93                                      asked.jsonl    {"id": "8c1f...", "prompt": ..., "answer": "93", ...}
                                                    ratings.jsonl  {"id": "8c1f...", "up": true, "stars": 4}
                                                    scheme "hybrid": reward 0.8

`scheme` says what a rating holds and what it is worth: see `schemes.py`.

`source` is a directory in which environments append to asked.jsonl and people (or programs) to ratings.jsonl, or an
object "package.module:name" with the two methods of `Source`, such as a `RatingQueue`. Many processes may share a
directory.

A step waits up to `deadline_s` for the rating. A rating may be changed (the last line counts) or taken back
({"id": ..., "taken_back": true}) until the environment has read it. A later rating does not change the episode, which
ended as `env_timeout` (dropped from its group) or with the earlier rating. It still grades the item: `LateRatings`
lists prompts with their late ratings, each in [0, 1] and each once, for `algo.rate` (setting
`replay_rating_scale = "normalised"`):

    late = LateRatings("ratings", scheme="ordinal")
    for _ in range(100):
        algo.train()
        algo.rate({Prompt("rating", prompt_id).key: rating for prompt_id, rating in late.new().items()})

`deadline_s` should be below the runner's `env_timeout_s`, which would also end the step as `env_timeout`, but leave a
thread behind.

Both files are append-only:

    asked.jsonl      {"id": "8c1f", "prompt_id": "17, 93, 40", "prompt": "...", "answer": "93"}     request
                     {"id": "8c1f", "used": {"up": true, "stars": 4}}                            closed; null: unrated
    ratings.jsonl    {"id": "8c1f", "stars": 4}     {"id": "8c1f", "stars": 2}     {"id": "8c1f", "taken_back": true}

Each line is one write to a file opened for appending, so lines of several processes do not mix. An incomplete line is
read later. A broken line is skipped, logged with file, line and field, and counted.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Protocol

from rllib_srl.envs.people.outside import GradedOutside
from rllib_srl.envs.people.schemes import PASS_REWARDS, SCHEMES, Moving, faults_of_rating, needed_by, reward_of
from rllib_srl.envs.settings import OneOf, Settings, Within, read_settings

logger = logging.getLogger(__name__)

ASKED, RATINGS = "asked.jsonl", "ratings.jsonl"


class Lines:
    """The complete lines of a growing file. Invariant: each line is returned once."""

    def __init__(self, path: Path):
        self.path, self.position, self.number = path, 0, 0
        self.num_broken = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the rows written since the last call, without broken ones."""
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
                self.broken(f"not valid JSON ({error})")
            return None
        if not isinstance(row, dict) or not isinstance(row.get("id"), str):
            self.broken("field id is missing; expected a mapping with the id of an answer")
            return None
        return row

    def broken(self, why: str) -> None:
        """Count and log the last line read."""
        self.num_broken += 1
        logger.warning("%s, line %d: %s; left out", self.path, self.number, why)


class RatingFiles:
    """A source of ratings in files: see `rllib_srl.envs.people.rating.Source`.

    Invariant: results depend on the complete lines of ratings.jsonl alone, not on the reader or the time of reading.
    """

    def __init__(self, directory: Path, needed: tuple[str, ...], moving: Moving | None = None):
        """Use the files of `directory`, which is created if it does not exist.

        Args:
            directory: of asked.jsonl and ratings.jsonl
            needed: required fields of a rating
            moving: statistics of `normalised`
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.needed, self._moving = directory, needed, moving
        self._ratings = Lines(directory / RATINGS)
        self._newest: dict[str, dict[str, Any]] = {}
        self._normalised: dict[str, float] = {}

    @property
    def num_broken(self) -> int:
        """Return the number of skipped lines of ratings."""
        return self._ratings.num_broken

    def ask(self, request: Mapping[str, Any]) -> None:
        """Append a line to asked.jsonl."""
        append(self.directory / ASKED, request)

    def rating_of(self, request_id: str) -> Mapping[str, Any] | None:
        """Return the newest rating of an answer."""
        self.read()
        return self._newest.get(request_id)

    def normalised(self, request_id: str) -> float:
        """Return the newest rating of an answer, normalised by all ratings before it in the file."""
        return self._normalised[request_id]

    def read(self) -> list[str]:
        """Read new lines; return the ids they rate."""
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
    """Ratings that reached no episode, each returned once, also across processes that read one after the other.

    Invariant: `_open` holds the ids whose newest rating was neither used nor returned, as far as is known.
    """

    def __init__(self, directory: Path, needed: tuple[str, ...]):
        """Use the files of `directory`."""
        self._files, self._needed = RatingFiles(directory, needed), needed
        self._asked = Lines(directory / ASKED)
        self._prompts: dict[str, str] = {}
        self._used: dict[str, Any] = {}
        self._open: set[str] = set()

    def new(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return prompt id and rating of all ratings that came after their answer was closed, and mark them as used."""
        self._open.update(self._files.read())
        for row in self._asked.new():
            if "used" in row:
                self._used[row["id"]] = row["used"]
            elif isinstance(row.get("prompt_id"), str):
                self._prompts[row["id"]] = row["prompt_id"]
        late = []
        for request_id in sorted(self._open & self._used.keys()):  # the episodes of the others are still running
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
    """Append one JSON line in one write, so that lines of other processes do not mix with it."""
    line = (json.dumps(row) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


_POLL_S = 0.02


class Source(Protocol):
    """Receives answers to be rated, and returns ratings."""

    def ask(self, request: Mapping[str, Any]) -> None:
        """Submit an answer: a mapping with "id", "prompt_id", "prompt" and "answer"; later one with "id" and "used"."""

    def rating_of(self, request_id: str) -> Mapping[str, Any] | None:
        """Return the newest rating of an answer, None while there is none; must not block."""


@dataclass(frozen=True)
class RatingSettings(Settings):
    """Settings of `Rating`. Invariant: as in `Settings`."""

    world: str = "compare"  # the inner environment: an entry point, or "package.module:Class"
    world_config: dict[str, Any] = field(default_factory=dict)
    source: str = ""  # a directory, or "package.module:name"
    scheme: Annotated[str, OneOf(*SCHEMES)] = "ordinal"
    deadline_s: Annotated[float, Within(0, 7 * 86400, is_open=True)] = 8.0  # for a rating to arrive
    momentum: Annotated[float, Within(0, 0.9999)] = 0.95  # of the moving moments: weight of the past at each rating

    def faults(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        return [] if self.source else ['source is not set; expected a directory, or "package.module:name"']


class RatingQueue:
    """A `Source` in memory, for a program that rates in the same process (num_env_runners = 0).

    Invariant: `asked` holds every submitted answer, by id.
    """

    def __init__(self, rate: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] | None = None):
        """Take a function that rates each submitted answer, or None to rate later with `rate`."""
        self.asked: dict[str, Mapping[str, Any]] = {}
        self._ratings: dict[str, Mapping[str, Any]] = {}
        self._rate = rate

    def ask(self, request: Mapping[str, Any]) -> None:
        """Store an answer, and rate it if there is a function."""
        if "answer" not in request:
            return
        self.asked[request["id"]] = request
        if self._rate is not None and (rating := self._rate(request)) is not None:
            self.rate(request["id"], **rating)

    def rate(self, request_id: str, **rating: Any) -> None:
        """Rate an answer, or change its rating."""
        self._ratings[request_id] = rating

    def rating_of(self, request_id: str) -> Mapping[str, Any] | None:
        """Return the newest rating."""
        return self._ratings.get(request_id)


class Rating(GradedOutside):
    """An environment whose answers people rate.

    Invariant: an answer is submitted once and closed once, even if it stays unrated.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        settings: RatingSettings = read_settings(RatingSettings, env_config, type(self).__name__)
        super().__init__(settings.world, settings.world_config)
        self.settings = settings
        self.source = _source(settings)
        self._moving = Moving(settings.momentum)
        self.pass_reward = PASS_REWARDS[settings.scheme]

    def graded(self, prompt_id: str, prompt: str, answer: str) -> tuple[float, dict[str, Any]] | None:
        """Submit the answer, and wait for its rating; an empty answer is not submitted."""
        if not answer:
            return 0.0, {"rating": "empty"}
        request_id = uuid.uuid4().hex
        self.source.ask({"id": request_id, "prompt_id": prompt_id, "prompt": prompt, "answer": answer})
        rating = self._awaited(request_id)
        self.source.ask({"id": request_id, "used": None if rating is None else dict(rating)})
        if rating is None:
            return None
        given = {f"rating_{name}": rating[name] for name in ("up", "stars") if name in rating}
        return self._reward(request_id, rating), {"rating": request_id, **given}

    def _awaited(self, request_id: str) -> Mapping[str, Any] | None:
        needed = needed_by(self.settings.scheme)
        deadline = time.monotonic() + self.settings.deadline_s
        while True:
            rating: Mapping[str, Any] | None = self.source.rating_of(request_id)
            if rating is not None and not rating.get("taken_back"):
                if faults := faults_of_rating(rating, needed):
                    raise ValueError(f"rating of {request_id}: " + "; ".join(faults))
                return rating
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(_POLL_S, left))

    def _reward(self, request_id: str, rating: Mapping[str, Any]) -> float:
        if self.settings.scheme != "normalised":
            return reward_of(rating, self.settings.scheme)
        if isinstance(self.source, RatingFiles):
            return self.source.normalised(request_id)  # over all ratings of the file, the same in every process
        return self._moving.normalised(rating["stars"])


class LateRatings:
    """Ratings that reached no episode: those after the deadline, and changes after a rating was used.

    Invariant: a rating is returned once, also by another object over the same directory.
    """

    def __init__(self, directory: str | Path, scheme: str = "ordinal"):
        """Read the `source` directory of environments with the `scheme`."""
        self._files, self._scheme = LateFiles(Path(directory), needed_by(scheme)), scheme

    def new(self) -> dict[str, float]:
        """Return prompt id -> mean of its late ratings since the last call, in [0, 1] for every scheme."""
        found: dict[str, list[float]] = {}
        for prompt_id, rating in self._files.new():
            reward = reward_of(rating, "ordinal" if self._scheme == "normalised" else self._scheme)
            found.setdefault(prompt_id, []).append((reward + 1) / 2 if self._scheme == "hybrid" else reward)
        return {prompt_id: sum(each) / len(each) for prompt_id, each in found.items()}


def _source(settings: RatingSettings) -> Any:
    """Return the source of ratings.

    Raises:
        ValueError: it cannot be imported, or is not a source.
    """
    if ":" not in settings.source:
        moving = Moving(settings.momentum) if settings.scheme == "normalised" else None
        return RatingFiles(Path(settings.source), needed_by(settings.scheme), moving)
    module, _, name = settings.source.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"source = {settings.source!r} cannot be imported ({why})") from error
    if not all(callable(getattr(found, method, None)) for method in ("ask", "rating_of")):
        kind = type(found).__name__
        raise ValueError(f"source = {settings.source!r} is a {kind}; expected methods ask and rating_of")
    return found
