"""The answers that one person rates in one sitting, in order, with undo; a terminal and a browser show them.

Answers without a rating come first, the newest first; then those that have one, with it. Each rating is durable before
it is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rllib_srl.people.rating import TAKEN_BACK, Answer, shown_reward
from rllib_srl.people.rating_store import RatingStore


@dataclass(frozen=True)
class _Step:
    """A reply that can be undone. Invariant: `before` is the value that the answer's rating had."""

    answer: Answer
    before: str
    value: str  # "" if skipped


class RatingQueue:
    """One person's answers and replies in one sitting. Invariant: what was acknowledged is in the store."""

    def __init__(self, store: RatingStore, answers: Callable[[], Iterable[Answer]], rater: str = "") -> None:
        """Prepare a sitting.

        Args:
            store: for the ratings.
            answers: returns all answers, in the order in which they are shown.
            rater: name of the person.
        """
        self._store, self.rater = store, rater
        self._done: list[_Step] = []
        self._waiting: list[Answer] = []  # shown again, the last first
        self._seen: set[tuple[str, str]] = set()
        self.restart(answers)

    def restart(self, answers: Callable[[], Iterable[Answer]]) -> None:
        """Use the answers of now from here on; those shown in this sitting do not come again."""
        self._listed = self._in_order(answers)

    @property
    def current(self) -> Answer | None:
        """Return the answer to rate now; None if there is none left."""
        if not self._waiting and (found := next(self._listed, None)) is not None:
            self._waiting.append(found)
        return self._waiting[-1] if self._waiting else None

    @property
    def num_rated(self) -> int:
        """Return how many answers have a rating of this sitting."""
        return len({step.answer for step in self._done if step.value})

    @property
    def can_undo(self) -> bool:
        """Return whether there is a reply to undo."""
        return bool(self._done)

    def rate(self, value: str) -> str:
        """Rate the current answer, and go on to the next; return what was done, in words.

        Raises:
            ValueError: the value is unknown; the answer stays.
        """
        answer, before = self._current_and_value()
        self._store.rate(answer, value, self.rater)
        self._done.append(_Step(self._waiting.pop(), before, value))
        changed = f" (it was {before})" if before not in (TAKEN_BACK, value) else ""
        found = self._store.rating_of(answer)
        reward = f", reward {shown_reward(found.reward)}" if found and found.is_given else ""
        return f"rated {answer.answer_id} {value}{changed}{reward}"

    def skip(self) -> None:
        """Leave the current answer as it is, and go on to the next."""
        _, before = self._current_and_value()
        self._done.append(_Step(self._waiting.pop(), before, ""))

    def undo(self) -> str:
        """Undo the last reply, and return to its answer; return what was done, in words, "" after a skip."""
        if not self._done:
            return "nothing to undo"
        step = self._done[-1]
        if step.value:
            self._store.rate(step.answer, step.before, self.rater)
        self._done.pop()
        self._waiting.append(step.answer)
        return f"undone: {step.answer.answer_id} is {step.before}" if step.value else ""

    def _current_and_value(self) -> tuple[Answer, str]:
        answer = self.current
        if answer is None:
            raise ValueError("there is no answer left to rate")
        return answer, self._store.value_of(answer)

    def _in_order(self, answers: Callable[[], Iterable[Answer]]) -> Iterator[Answer]:
        """Yield answers without a rating, then those that had one; a rating that comes meanwhile moves its answer."""
        for with_rated in (False, True):
            for answer in answers():
                name = (answer.answer_id, answer.fingerprint)
                if name not in self._seen and (with_rated or self._store.value_of(answer) == TAKEN_BACK):
                    self._seen.add(name)
                    yield answer
