"""A person's rating of an answer as a text, and what it is worth under each scheme.

    scheme        values                          reward
    ""            good, bad, 1 to 5               as "binary" or "ordinal", whichever the value is of
    binary        good, bad                       1, 0
    ordinal       1 to 5                          0, 1/4, 1/2, 3/4, 1
    normalised    1 to 5                          stars in standard deviations of the rater's earlier stars
    hybrid        good 1 ... good 5, bad 1 ...    stars / 5, -stars / 5: good 4 is 0.8, bad 2 is -0.4
    all           none                            taken back

The formulas are in `schemes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllib_srl.people.schemes import NEUTRAL_REWARDS, PASS_REWARDS, SCHEMES, Moving, quality_of, reward_of

TAKEN_BACK = "none"
_STARS = tuple(map(str, range(1, 6)))
_THUMBS = ("good", "bad")
VALUES: Mapping[str, tuple[str, ...]] = {  # scheme -> values, without `TAKEN_BACK`
    "": (*_THUMBS, *_STARS),
    "binary": _THUMBS,
    "ordinal": _STARS,
    "normalised": _STARS,
    "hybrid": tuple(f"{thumb} {stars}" for thumb in _THUMBS for stars in _STARS),
}
_WORDS = {
    "": "good, bad, 1 to 5", "binary": "good, bad", "ordinal": "1 to 5", "normalised": "1 to 5",
    "hybrid": "good 1 to good 5, bad 1 to bad 5",
}  # fmt: skip


def words_of(scheme: str) -> str:
    """Return the values of a scheme in words."""
    return _WORDS[scheme]


def expected(scheme: str = "") -> str:
    """Return the values of a scheme, and that which takes a rating back, in words."""
    return f"{_WORDS[scheme]}, or {TAKEN_BACK} (taken back)"


def check_value(value: str, scheme: str = "") -> None:
    """Check the value of a rating.

    Raises:
        ValueError: it is not a value of the scheme.
    """
    if value != TAKEN_BACK and value not in VALUES[scheme]:
        raise ValueError(f"rating = {value!r}; expected {expected(scheme)}")


def check_scheme(scheme: str) -> str:
    """Return a scheme, "" for none in particular.

    Raises:
        ValueError: it is unknown.
    """
    if scheme and scheme not in SCHEMES:
        raise ValueError(f"scheme = {scheme!r}; expected one of {', '.join(SCHEMES)}")
    return scheme


def fields_of(value: str) -> dict[str, Any]:
    """Return the fields of a rating that was not taken back: {"up": True, "stars": 4} of "good 4"."""
    words = value.split()
    thumb = {"up": words[0] == "good"} if words[0] in _THUMBS else {}
    return thumb | ({"stars": int(words[-1])} if words[-1] in _STARS else {})


def scheme_of(value: str, scheme: str = "") -> str:
    """Return the scheme of a value."""
    return scheme or ("binary" if value in _THUMBS else "ordinal")


def reward_under(value: str, scheme: str, moving: Moving) -> float | None:
    """Return the reward of a value, None if it takes a rating back; `moving` is the rater's, and is moved on."""
    if value == TAKEN_BACK:
        return None
    if scheme == "normalised":
        return moving.normalised(fields_of(value)["stars"])
    return reward_of(fields_of(value), scheme_of(value, scheme))


def neutral_reward(scheme: str) -> float:
    """Return the reward of an answer that is neither good nor bad."""
    return NEUTRAL_REWARDS[scheme or "binary"]


def good_reward(scheme: str) -> float:
    """Return the lowest reward of a good answer; `normalised`: a standard deviation above the rater's mean."""
    found = PASS_REWARDS[scheme or "ordinal"]
    return 1.0 if found is None else found


@dataclass(frozen=True)
class Answer:
    """An answer that people rate: one episode of a stored group, as text.

    Invariant: `answer_id` and `fingerprint` together identify it for good; a run that is resumed and plays something
    else under the same group id gives another fingerprint.
    """

    group_id: str
    episode: int  # position in the stored group
    key: str  # of the prompt
    fingerprint: str  # `replay.ratings.fingerprint`
    env_id: str
    domain: str
    version: int  # of the policy that wrote its last token
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
    seq: int  # of the change among all changes of the file, ascending
    reward: float | None  # None: it was taken back
    scheme: str = ""

    @property
    def is_given(self) -> bool:
        """Return whether it was not taken back."""
        return self.value != TAKEN_BACK

    @property
    def is_binary(self) -> bool:
        """Return whether it says good or bad, and no more."""
        return self.value in _THUMBS

    @property
    def quality(self) -> float | None:
        """Return how good the answer is, in [0, 1]; None if the rating was taken back."""
        return quality_of(fields_of(self.value), scheme_of(self.value, self.scheme)) if self.is_given else None

    @property
    def pass_reward(self) -> float | None:
        """Return the lowest reward of a pass in its scheme; None if it was taken back, or the scheme has none."""
        return PASS_REWARDS[scheme_of(self.value, self.scheme)] if self.is_given else None


def shown_reward(reward: float | None) -> str:
    """Return a reward as people see it."""
    return "-" if reward is None else f"{reward:.3g}"
