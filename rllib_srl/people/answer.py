"""An answer of a run that people rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One episode of a stored group, as text.

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
