"""Answers that people rate: human feedback as one more environment.

    Question: Which is largest: 17, 93 or 40?
    Answer: 93                                      asked.jsonl    {"id": "8c1f...", "prompt": ..., "answer": "93", ...}
                                                    ratings.jsonl  {"id": "8c1f...", "up": true, "stars": 4}
                                                    scheme "hybrid": reward 0.8

    scheme        a rating holds     reward
    binary        up                 1 for up, 0 for down
    ordinal       stars, 1 to 5      (stars - 1) / 4
    normalised    stars              (stars - mean) / standard deviation, both moving over the ratings before it
    hybrid        up and stars       stars / 5 for up, -stars / 5 for down: up with 4 is 0.8, down with 2 is -0.4

`source` is a directory in which worlds append to asked.jsonl and people (or programs) to ratings.jsonl, or an object
"package.module:name" with the two methods of `Source`, such as a `RatingQueue`. Many processes may share a directory.

A step waits up to `deadline_s` for the rating. A rating may be changed (the last line counts) or taken back
({"id": ..., "taken_back": true}) until the world has read it. What comes later reaches no episode: the episode ended as
`env_timeout` (left out of its group) or with the rating it had. It still grades the item: `LateRatings` lists prompts
with their late ratings, each in [0, 1] and each once, for `algo.rate` (setting `replay_rating_scale = "normalised"`):

    late = LateRatings("ratings", scheme="ordinal")
    for _ in range(100):
        algo.train()
        algo.rate({Prompt("rating", prompt_id).key: rating for prompt_id, rating in late.new().items()})

`deadline_s` should be below the runner's `env_timeout_s`, which would end the step as `env_timeout` as well, at the
cost of a thread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from envs.outside import GradedOutside
from envs.question import read_settings
from envs.rating_files import LateFiles, RatingFiles, faults_of_rating, needed_by

SCHEMES = ("binary", "ordinal", "normalised", "hybrid")
_POLL_S = 0.02


class Source(Protocol):
    """Where answers go to be rated, and ratings come from."""

    def ask(self, request: Mapping[str, Any]) -> None:
        """Put up an answer: a mapping with "id", "prompt_id", "prompt" and "answer"; later one with "id" and "used"."""

    def rating_of(self, request_id: str) -> Mapping[str, Any] | None:
        """Return the newest rating of an answer, None while there is none; it must not wait."""


@dataclass(frozen=True)
class RatingSettings:
    """Settings of `Rating`. Invariant: `faults` is empty for the settings of a world that exists."""

    world: str = "compare"  # the world that asks: an entry point, or "package.module:Class"
    world_config: dict = field(default_factory=dict)
    source: str = ""  # a directory, or "package.module:name"
    scheme: str = "ordinal"
    deadline_s: float = 8.0  # for a rating to arrive
    momentum: float = 0.95  # of the moving mean and variance: the share that the past keeps at each rating

    def faults(self) -> list[str]:
        """Return one line for each setting out of its range."""
        faults = []
        if not self.source:
            faults.append('source is not set; expected a directory, or "package.module:name"')
        if self.scheme not in SCHEMES:
            faults.append(f"scheme = {self.scheme!r}; expected one of {', '.join(SCHEMES)}")
        if not 0 < self.deadline_s <= 7 * 86400:
            faults.append(f"deadline_s = {self.deadline_s}; expected above 0, at most a week")
        if not 0 <= self.momentum < 1:
            faults.append(f"momentum = {self.momentum}; expected 0 to below 1")
        return faults


@dataclass
class Moving:
    """Moving mean and variance of stars.

    Starts as if stars were drawn evenly from 1 to 5 (mean 3, variance 2); after a rating x

        d = x - mean,   mean += (1 - m) d,   variance = m (variance + (1 - m) d^2)
    """

    momentum: float
    mean: float = 3.0
    variance: float = 2.0

    def normalised(self, stars: float) -> float:
        """Return how many standard deviations `stars` lies above the mean so far, and take it in.

        Source: Finch 2009, "Incremental calculation of weighted mean and variance", section 9.
        """
        difference = stars - self.mean
        normalised = difference / max(self.variance, 1e-6) ** 0.5
        self.mean += (1 - self.momentum) * difference
        self.variance = self.momentum * (self.variance + (1 - self.momentum) * difference**2)
        return normalised


def reward_of(rating: Mapping[str, Any], scheme: str) -> float:
    """Return the reward of a rating, for a scheme that needs no other ratings (all but "normalised").

    Raises:
        ValueError: the rating lacks what the scheme needs.
    """
    if faults := faults_of_rating(rating, needed_by(scheme)):
        raise ValueError("; ".join(faults))
    if scheme == "binary":
        return float(rating["up"])
    if scheme == "hybrid":
        return (1 if rating["up"] else -1) * rating["stars"] / 5
    return (rating["stars"] - 1) / 4


class RatingQueue:
    """A `Source` in memory, for a program that rates in the same process (num_env_runners = 0).

    Invariant: `asked` holds every answer put up so far, by id.
    """

    def __init__(self, rate: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] | None = None):
        """Take a function that rates each answer as it is put up, or None to rate later by `rate`."""
        self.asked: dict[str, Mapping[str, Any]] = {}
        self._ratings: dict[str, Mapping[str, Any]] = {}
        self._rate = rate

    def ask(self, request: Mapping[str, Any]) -> None:
        """Put up an answer, and rate it if a function does."""
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
    """A world whose answers people rate.

    Invariant: an answer is asked for once and closed once, also where nobody rates it.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        settings: RatingSettings = read_settings(RatingSettings, env_config, type(self).__name__)
        super().__init__(settings.world, settings.world_config)
        self.settings = settings
        self.source = _source(settings)
        self._moving = Moving(settings.momentum)

    def graded(self, prompt_id: str, prompt: str, answer: str) -> tuple[float, dict[str, Any]] | None:
        """Put the answer up, and wait for its rating; nobody is asked to rate an empty one."""
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
            rating = self.source.rating_of(request_id)
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
    """The ratings that no episode got: those after the deadline, and changes after a rating was used.

    Invariant: a rating is handed out once, also by another object over the same directory.
    """

    def __init__(self, directory: str | Path, scheme: str = "ordinal"):
        """Read the `source` directory of worlds with the `scheme`."""
        self._files, self._scheme = LateFiles(Path(directory), needed_by(scheme)), scheme

    def new(self) -> dict[str, float]:
        """Return prompt id -> mean of its late ratings since the last call, in [0, 1] whatever the scheme."""
        found: dict[str, list[float]] = {}
        for prompt_id, rating in self._files.new():
            reward = reward_of(rating, "ordinal" if self._scheme == "normalised" else self._scheme)
            found.setdefault(prompt_id, []).append((reward + 1) / 2 if self._scheme == "hybrid" else reward)
        return {prompt_id: sum(each) / len(each) for prompt_id, each in found.items()}


def _source(settings: RatingSettings) -> Any:
    """Return the source of ratings.

    Raises:
        ValueError: it cannot be imported, or is none.
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
