"""Rating in the browser: the sittings of the people who rate, each a queue of answers of the run.

A sitting goes on with the answers of the newest copy of the memory. What it has shown does not come again.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rllib_srl.cli.dashboard.memory_view import MemoryView
from rllib_srl.cli.people.rate import rows_in_words
from rllib_srl.people.rate_by_id import rate_by_id
from rllib_srl.people.rating import TAKEN_BACK, VALUES, Answer
from rllib_srl.people.rating_queue import RatingQueue
from rllib_srl.people.rating_store import RATINGS, RatingStore
from rllib_srl.people.stored_answers import StoredAnswers
from rllib_srl.replay.tools.describe import Decode

MOST_SITTINGS = 32  # kept; the one that was used the longest ago ends first
MOST_LISTED = 50  # ratings on the page


@dataclass(frozen=True)
class Card:
    """What a sitting shows. `value` is the rating that the answer has; `is_stale`: the reply was to another answer."""

    sitting: str
    answer: Answer | None
    value: str
    num_rated: int
    can_undo: bool
    values: tuple[str, ...]
    message: str = ""
    is_stale: bool = False

    @property
    def shown(self) -> str:
        """Return the name of the answer shown, which a reply repeats."""
        return f"{self.answer.answer_id} {self.answer.fingerprint}" if self.answer else ""


class RatingDesk:
    """All sittings of one page. Invariant: used by one thread, that of the memory."""

    def __init__(
        self, directory: Path, memory: MemoryView, decode: Callable[[], Decode], rater: str = "", may_rate: bool = False
    ) -> None:
        """Prepare; nothing is opened or written before the first use.

        Args:
            directory: of the run.
            memory: of the run.
            decode: returns the function token ids -> text; called for each copy of the memory.
            rater: name of the person who rates.
            may_rate: whether ratings may be written; otherwise the file of ratings is not created.
        """
        self._path, self._memory, self._decode = directory / RATINGS, memory, decode
        self._rater, self.may_rate = rater, may_rate
        self._store: RatingStore | None = None
        self._answers: StoredAnswers | None = None
        self._version = -1  # of the copy of the memory that `_answers` reads
        self._sittings: OrderedDict[str, RatingQueue] = OrderedDict()

    def card(self, sitting: str = "") -> Card:
        """Return what a sitting shows; one that is unknown begins anew."""
        queue = self._sittings.get(sitting)
        store, answers = self._opened()
        if queue is None:
            sitting = secrets.token_urlsafe(9)
            queue = self._sittings[sitting] = RatingQueue(store, answers.newest_first, self._rater)
        self._sittings.move_to_end(sitting)
        while len(self._sittings) > MOST_SITTINGS:
            self._sittings.popitem(last=False)
        answer = queue.current
        value = store.shown(answer) if answer else TAKEN_BACK
        return Card(sitting, answer, value, queue.num_rated, queue.can_undo, VALUES[store.scheme])

    def actions(self) -> tuple[str, ...]:
        """Return the replies that there are: values of the run's scheme, skip and undo."""
        store, _ = self._opened()
        return (*VALUES[store.scheme], "skip", "undo")

    def reply(self, sitting: str, shown: str, action: str) -> Card:
        """Do one of `actions` to an answer that was shown, and return what comes next."""
        before = self.card(sitting)
        if before.sitting != sitting or before.shown != shown:  # a second click, an old page, a new start
            said = "the page was older than the sitting; nothing was rated by that reply"
            return _with(before, said, is_stale=True)
        queue = self._sittings[sitting]
        if action == "undo":
            said = queue.undo()
        elif before.answer is None:
            said = "there is no answer left to rate"
        elif action == "skip":
            queue.skip()
            said = ""
        else:
            said = queue.rate(action)
        return _with(self.card(sitting), said)

    def change(self, answer_id: str, value: str) -> str:
        """Set the rating of an answer by its id; return what was done, in words.

        Raises:
            ValueError: there is no such answer, or the value is unknown.
        """
        store, answers = self._opened()
        return str(rate_by_id(store, answers, answer_id, value, self._rater))

    def listed(self) -> list[list[str]]:
        """Return the newest ratings in words, as `cli.people.rate.LISTED` has them; none without a file."""
        if not self._path.exists():
            return []
        store, answers = self._opened()
        newest = sorted(store.all(), key=lambda one: -one.seq)[:MOST_LISTED]
        return list(rows_in_words(newest, answers))

    def close(self) -> None:
        """Close the file of ratings."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _opened(self) -> tuple[RatingStore, StoredAnswers]:
        """Return the ratings, and the answers of the newest copy of the memory, from which all sittings go on."""
        reading = self._memory.reading()
        if self._answers is None or self._version != self._memory.version:
            self._answers, self._version = StoredAnswers(reading, self._decode), self._memory.version
            for queue in self._sittings.values():
                queue.restart(self._answers.newest_first)
        if self._store is None:
            self._store = RatingStore(self._path)
        return self._store, self._answers


def _with(card: Card, message: str, is_stale: bool = False) -> Card:
    return replace(card, message=message, is_stale=is_stale)
