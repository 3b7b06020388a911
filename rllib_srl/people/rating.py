"""A person's rating of an answer, and its reward under each scheme.

    scheme        values                          reward
    ""            good, bad, 1 to 5               as "binary" or "ordinal", whichever the value is of
    binary        good, bad                       1, 0
    ordinal       1 to 5                          0, 1/4, 1/2, 3/4, 1
    hybrid        good 1 ... good 5, bad 1 ...    stars / 5, -stars / 5: good 4 is 0.8, bad 2 is -0.4
    normalised    1 to 5                          (stars - mean) / standard deviation, both moving over the rater's
                                                  first stars of each answer rated before this one
    all           none                            taken back
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

TAKEN_BACK = "none"
THUMBS = ("good", "bad")
STARS = ("1", "2", "3", "4", "5")
MOMENTUM = 0.95  # weight of the past in the moving mean and variance at each rating
NORMALISED = "normalised"


class Scheme(NamedTuple):
    """The values of a rating, and their meaning."""

    values: tuple[str, ...]
    words: str  # the values, for people
    neutral: float  # reward of an answer that is neither good nor bad
    good: float  # lowest reward of a good answer


SCHEMES = {
    "": Scheme((*THUMBS, *STARS), "good, bad, 1 to 5", 0.5, 0.75),
    "binary": Scheme(THUMBS, "good, bad", 0.5, 1.0),
    "ordinal": Scheme(STARS, "1 to 5", 0.5, 0.75),
    NORMALISED: Scheme(STARS, "1 to 5", 0.0, 1.0),
    "hybrid": Scheme(
        tuple(f"{thumb} {stars}" for thumb in THUMBS for stars in STARS), "good 1 to good 5, bad 1 to bad 5", 0.0, 0.2
    ),
}
NAMED_SCHEMES = tuple(SCHEMES)[1:]


def expected(scheme: str = "") -> str:
    """Return in words the values of a scheme and the one that takes a rating back."""
    return f"{SCHEMES[scheme].words}, or {TAKEN_BACK} (taken back)"


def check_value(value: str, scheme: str = "") -> None:
    """Raise a ValueError unless a value is one of the scheme, or `TAKEN_BACK`."""
    if value != TAKEN_BACK and value not in SCHEMES[scheme].values:
        raise ValueError(f"rating = {value!r}; expected {expected(scheme)}")


def fixed_reward(value: str) -> float:
    """Return the reward of a value that was not taken back; it is the same in all schemes except "normalised"."""
    if value in THUMBS:
        return float(value == "good")
    thumb, _, stars = value.rpartition(" ")
    if thumb:
        return (1 if thumb == "good" else -1) * int(stars) / 5
    return (int(stars) - 1) / 4


def normalised(stars: int, earlier: Iterable[int]) -> float:
    """Return (stars - mean) / standard deviation, both moving over `earlier` stars.

    They start with the moments of stars drawn uniformly from 1 to 5 (mean 3, variance 2); after a rating x

        d = x - mean,   mean += (1 - m) d,   variance = m (variance + (1 - m) d^2),   m = `MOMENTUM`

    Source: Finch 2009, "Incremental calculation of weighted mean and variance", section 9.
    """
    mean, variance = 3.0, 2.0
    for one in earlier:
        difference = one - mean
        mean += (1 - MOMENTUM) * difference
        variance = MOMENTUM * (variance + (1 - MOMENTUM) * difference**2)
    return float((stars - mean) / max(variance, 1e-6) ** 0.5)


@dataclass(frozen=True)
class Answer:
    """An answer that people rate: one episode of a stored group, as text.

    Invariant: `answer_id` and `fingerprint` together identify it permanently; a run that is resumed and plays something
    else under the same group id gives another fingerprint.
    """

    group_id: str
    episode: int  # position in the stored group
    key: str  # key of the prompt
    fingerprint: str  # `replay.ratings.fingerprint`
    env_id: str
    domain: str
    version: int  # version of the policy that wrote its last token
    prompt: str
    answer: str

    @property
    def answer_id(self) -> str:
        """Return the id that people see: group id and episode, such as "12.3/0"."""
        return f"{self.group_id}/{self.episode}"


@dataclass(frozen=True)
class Rating:
    """The newest rating of an answer. Invariant: `value` is one of its scheme, or `TAKEN_BACK`."""

    answer: Answer
    value: str
    rater: str  # "" if unnamed
    rated_at: str  # UTC, ISO 8601
    seq: int  # number of this change among all changes of the file, ascending
    reward: float | None  # None: it was taken back
    scheme: str = ""

    @property
    def is_given(self) -> bool:
        return self.value != TAKEN_BACK

    @property
    def is_binary(self) -> bool:
        return self.value in THUMBS

    @property
    def quality(self) -> float | None:
        """Return how good the answer is, in [0, 1], in any scheme; None if the rating was taken back."""
        if not self.is_given:
            return None
        return (1 + fixed_reward(self.value)) / 2 if self.scheme == "hybrid" else fixed_reward(self.value)

    @property
    def pass_reward(self) -> float | None:
        """Return the lowest reward of a pass; None if it was taken back or is "normalised", which has no fixed one."""
        if not self.is_given or self.scheme == NORMALISED:
            return None
        return SCHEMES["binary" if self.is_binary else self.scheme].good

    @property
    def shown(self) -> str:
        """Return the rating with its reward, as people see it."""
        return f"{self.value} (reward {shown_reward(self.reward)})" if self.is_given else TAKEN_BACK


def shown_reward(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3g}"
