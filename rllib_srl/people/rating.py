"""A person's rating of an answer, and what it is worth: the table of schemes is that of the environment `rating`.

    good, bad    scheme "binary"     reward 1, 0
    1 to 5       scheme "ordinal"    reward 0, 1/4, 1/2, 3/4, 1
    none         taken back
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllib_srl.envs.people.schemes import PASS_REWARDS, reward_of
from rllib_srl.people.answer import Answer

TAKEN_BACK = "none"
_GIVEN: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # value -> scheme, and the fields of such a rating
    "good": ("binary", {"up": True}),
    "bad": ("binary", {"up": False}),
    **{str(stars): ("ordinal", {"stars": stars}) for stars in range(1, 6)},
}
VALUES = (*_GIVEN, TAKEN_BACK)
EXPECTED = f"good, bad, 1 to 5, or {TAKEN_BACK} (taken back)"


def check_value(value: str) -> None:
    """Check the value of a rating.

    Raises:
        ValueError: it is none of `VALUES`.
    """
    if value not in VALUES:
        raise ValueError(f"rating = {value!r}; expected {EXPECTED}")


@dataclass(frozen=True)
class Rating:
    """The newest rating of an answer. Invariant: `value` is one of `VALUES`."""

    answer: Answer
    value: str
    rater: str  # "" if unnamed
    rated_at: str  # UTC, ISO 8601
    seq: int  # of the change among all changes of the file, ascending

    @property
    def is_given(self) -> bool:
        """Return whether it was not taken back."""
        return self.value != TAKEN_BACK

    @property
    def is_binary(self) -> bool:
        """Return whether it says good or bad."""
        return self.is_given and _GIVEN[self.value][0] == "binary"

    @property
    def reward(self) -> float | None:
        """Return the reward, in [0, 1]; None if the rating was taken back."""
        if not self.is_given:
            return None
        scheme, fields = _GIVEN[self.value]
        return reward_of(fields, scheme)

    @property
    def pass_reward(self) -> float | None:
        """Return the lowest reward of a pass in its scheme; None if the rating was taken back."""
        return PASS_REWARDS[_GIVEN[self.value][0]] if self.is_given else None
