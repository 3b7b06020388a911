"""Ask a person for ratings, one line a reply: at a terminal, or from a pipe.

    good, bad, skip, 1 to 5, undo, quit          also g, b, s, u, q; the end of the input is quit
    good 4, bad 2, skip, undo, quit              with the scheme "hybrid"; also g4, b2

Answers without a rating come first, the newest first; then those that have one, with it. Each rating is durable before
it is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rllib_srl.people.rating import SCHEMES, TAKEN_BACK, Answer, Rating, shown_reward
from rllib_srl.people.rating_store import RatingStore

COMMANDS = {"s": "skip", "u": "undo", "q": "quit"}
AT_THE_END = "undo, quit"
NO_MORE = "\nno more answers in the memory of the run"


@dataclass(frozen=True)
class _Step:
    """A reply that can be undone. Invariant: `before` is the value that the answer's rating had."""

    answer: Answer
    before: str
    value: str  # "" if skipped


class RatingSession:
    """One person's ratings in one sitting. Invariant: what was acknowledged is in the store."""

    def __init__(
        self,
        store: RatingStore,
        answers: Callable[[], Iterable[Answer]],
        read: Callable[[str], str],
        show: Callable[[str], None],
        rater: str = "",
    ) -> None:
        """Prepare a session.

        Args:
            store: for the ratings.
            answers: returns all answers, in the order in which they are shown.
            read: takes a prompt for the person and returns a line; raises EOFError at the end.
            show: takes a text for the person.
            rater: name of the person.
        """
        self._store, self._answers, self._read, self._show, self._rater = store, answers, read, show, rater
        self._done: list[_Step] = []
        self._waiting: list[Answer] = []  # shown again, the last first
        self._seen: set[tuple[str, str]] = set()
        self._listed = self._in_order()
        scheme = SCHEMES[store.scheme]
        short = {value[0] + value[-1] if " " in value else value[0]: value for value in scheme.values}
        self._replies = COMMANDS | short
        self._asked = f"{scheme.words}, skip, undo, quit"

    def run(self) -> int:
        """Ask until the person quits or the replies end; return how many answers have a rating of this session."""
        while True:
            answer = self._current
            self._show(NO_MORE if answer is None else shown(answer, self._store.rating_of(answer)))
            reply = self._reply(self._asked if answer else AT_THE_END)
            if reply == "quit":
                return self._num_rated
            if reply == "undo" or answer is None:
                said = self._undo()
            else:
                said = self._skip(answer) if reply == "skip" else self._rate(answer, reply)
            if said:
                self._show(said)

    @property
    def _current(self) -> Answer | None:
        """Return the answer to rate now; None if there is none left."""
        if not self._waiting and (found := next(self._listed, None)) is not None:
            self._waiting.append(found)
        return self._waiting[-1] if self._waiting else None

    @property
    def _num_rated(self) -> int:
        """Return how many answers have a rating of this sitting."""
        return len({step.answer for step in self._done if step.value})

    def _rate(self, answer: Answer, value: str) -> str:
        """Rate the current answer, and go on to the next; return what was done, in words."""
        before = self._store.value_of(answer)
        self._store.rate(answer, value, self._rater)
        self._done.append(_Step(self._waiting.pop(), before, value))
        changed = f" (it was {before})" if before not in (TAKEN_BACK, value) else ""
        found = self._store.rating_of(answer)
        reward = f", reward {shown_reward(found.reward)}" if found and found.is_given else ""
        return f"rated {answer.answer_id} {value}{changed}{reward}"

    def _skip(self, answer: Answer) -> str:
        """Leave the current answer as it is, and go on to the next; nothing is said."""
        self._done.append(_Step(self._waiting.pop(), self._store.value_of(answer), ""))
        return ""

    def _undo(self) -> str:
        """Undo the last reply, and return to its answer; return what was done, in words, "" after a skip."""
        if not self._done:
            return "nothing to undo"
        step = self._done[-1]
        if step.value:
            self._store.rate(step.answer, step.before, self._rater)
        self._done.pop()
        self._waiting.append(step.answer)
        return f"undone: {step.answer.answer_id} is {step.before}" if step.value else ""

    def _in_order(self) -> Iterator[Answer]:
        """Yield answers without a rating, then those that had one; a rating that comes meanwhile moves its answer."""
        for with_rated in (False, True):
            for answer in self._answers():
                name = (answer.answer_id, answer.fingerprint)
                if name not in self._seen and (with_rated or self._store.value_of(answer) == TAKEN_BACK):
                    self._seen.add(name)
                    yield answer

    def _reply(self, asked: str) -> str:
        known = self._replies if asked == self._asked else {"u": "undo", "q": "quit"}
        while True:
            try:
                line = self._read(f"{asked}: ").strip().lower()
            except EOFError:
                return "quit"
            said = " ".join(line.split())
            if said in known or said in known.values():
                return known.get(said, said)
            self._show(f"{line!r}; expected {asked}")


def shown(answer: Answer, rating: Rating | None) -> str:
    """Return an answer as a person sees it."""
    rated = f", rated {rating.shown}" if rating and rating.is_given else ""
    head = f"── {answer.answer_id}  domain {answer.domain or '-'}, model version {answer.version}{rated}"
    return f"\n{head}\n{_indented('prompt', answer.prompt)}\n{_indented('answer', answer.answer)}"


def _indented(name: str, text: str) -> str:
    lines = text.strip("\n").split("\n")
    return "\n".join(f"{name if number == 0 else '':>7} │ {line}".rstrip() for number, line in enumerate(lines))
