"""Ask a person for ratings, one line a reply: at a terminal, or from a pipe.

    good, bad, skip, 1 to 5, undo, quit          also g, b, s, u, q; the end of the input is quit

Answers without a rating come first, the newest first; then those that have one, with it. Each rating is durable before
it is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rllib_srl.people.answer import Answer
from rllib_srl.people.rating import TAKEN_BACK
from rllib_srl.people.rating_store import RatingStore

REPLIES = {"g": "good", "b": "bad", "s": "skip", "u": "undo", "q": "quit", **{str(n): str(n) for n in range(1, 6)}}
ASKED, AT_THE_END = "good, bad, 1 to 5, skip, undo, quit", "undo, quit"
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

    def run(self) -> int:
        """Ask until the person quits or the replies end; return how many answers have a rating of this session."""
        waiting: list[Answer] = []  # shown again, the last first
        listed = self._in_order()
        while True:
            answer = waiting.pop() if waiting else next(listed, None)
            self._show(NO_MORE if answer is None else shown(answer, self._store.value_of(answer)))
            reply = self._reply(ASKED if answer else AT_THE_END)
            if reply == "quit":
                return len({step.answer for step in self._done if step.value})
            if reply == "undo":
                waiting += [one for one in (answer, self._undo()) if one is not None]
            elif answer is not None and reply == "skip":
                self._done.append(_Step(answer, self._store.value_of(answer), ""))
            elif answer is not None:
                self._rate(answer, reply)

    def _in_order(self) -> Iterator[Answer]:
        """Yield answers without a rating, then those that had one; a rating that comes meanwhile moves its answer."""
        seen = set()
        for answer in self._answers():
            if self._store.value_of(answer) == TAKEN_BACK:
                seen.add(answer)
                yield answer
        for answer in self._answers():
            if answer not in seen:
                yield answer

    def _reply(self, asked: str) -> str:
        known = REPLIES if asked == ASKED else {"u": "undo", "q": "quit"}
        while True:
            try:
                line = self._read(f"{asked}: ").strip().lower()
            except EOFError:
                return "quit"
            if line in known or line in known.values():
                return known.get(line, line)
            self._show(f"{line!r}; expected {asked}")

    def _rate(self, answer: Answer, value: str) -> None:
        before = self._store.value_of(answer)
        self._store.rate(answer, value, self._rater)
        self._done.append(_Step(answer, before, value))
        changed = f" (it was {before})" if before not in (TAKEN_BACK, value) else ""
        self._show(f"rated {answer.answer_id} {value}{changed}")

    def _undo(self) -> Answer | None:
        """Undo the last reply, and return its answer; None if there is none."""
        if not self._done:
            self._show("nothing to undo")
            return None
        step = self._done.pop()
        if step.value:
            self._store.rate(step.answer, step.before, self._rater)
            self._show(f"undone: {step.answer.answer_id} is {step.before}")
        return step.answer


def shown(answer: Answer, value: str) -> str:
    """Return an answer as a person sees it."""
    rated = f", rated {value}" if value != TAKEN_BACK else ""
    head = f"── {answer.answer_id}  domain {answer.domain or '-'}, model version {answer.version}{rated}"
    return f"\n{head}\n{_indented('prompt', answer.prompt)}\n{_indented('answer', answer.answer)}"


def _indented(name: str, text: str) -> str:
    lines = text.strip("\n").split("\n")
    return "\n".join(f"{name if number == 0 else '':>7} │ {line}".rstrip() for number, line in enumerate(lines))
