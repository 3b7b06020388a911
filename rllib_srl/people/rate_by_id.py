"""Set the rating of one answer by its id, also of an answer that has left the memory but was rated before."""

from __future__ import annotations

from dataclasses import dataclass

from rllib_srl.people.rating import check_value, shown_reward
from rllib_srl.people.rating_store import RatingStore
from rllib_srl.people.stored_answers import StoredAnswers


@dataclass(frozen=True)
class Change:
    """A rating that was set. `is_new`: it differs from `before`; `is_unused`: the answer is gone from the memory."""

    answer_id: str
    before: str
    value: str
    is_new: bool
    is_unused: bool
    reward: float | None

    def __str__(self) -> str:
        unused = "; unused: the answer is not in the memory any more" if self.is_unused else ""
        before = f" (it was {self.before})" if self.is_new else " already"
        reward = "" if self.reward is None else f", reward {shown_reward(self.reward)}"
        return f"rated {self.answer_id} {self.value}{before}{reward}{unused}"


def rate_by_id(store: RatingStore, answers: StoredAnswers, answer_id: str, value: str, rater: str = "") -> Change:
    """Set the rating of one answer; it is durable on return.

    Raises:
        ValueError: the value is unknown, or there is no such answer.
        RatingsError: nothing was stored.
    """
    check_value(value, store.scheme)
    answer = answers.find(answer_id)
    gone = store.of_answer(answer_id) if answer is None else None
    rated = answer or (gone.answer if gone else None)
    if rated is None:
        raise ValueError(f"id = {answer_id!r} is no answer in the memory of the run; expected one that srl rate shows")
    before = store.value_of(rated)
    is_new = store.rate(rated, value, rater)
    found = store.rating_of(rated)
    return Change(answer_id, before, value, is_new, answer is None, found.reward if found else None)
