"""Ask a person for ratings, one line per reply: at a terminal, or from a pipe.

    good, bad, skip, 1 to 5, undo, quit          also g, b, s, u, q; the end of the input is quit
    good 4, bad 2, skip, undo, quit              with the scheme "hybrid"; also g4, b2

Answers without a rating come first, newest first; then rated ones, with their rating. Each rating is durable before it
is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from rllib_srl.people.rating import SCHEMES, TAKEN_BACK, Answer, Rating, shown_reward
from rllib_srl.people.rating_store import RatingStore

NO_MORE = "\nno more answers in the memory of the run"


class RatingSession:
    """One person's ratings in one sitting. Invariant: every acknowledged rating is in the store."""

    def __init__(
        self,
        store: RatingStore,
        answers: Callable[[], Iterable[Answer]],
        read: Callable[[str], str],
        show: Callable[[str], None],
        rater: str = "",
    ) -> None:
        """Ask about `answers`, in their order; `read` takes a prompt and returns a line, EOFError: there is none."""
        self._store, self._answers, self._read, self._show, self._rater = store, answers, read, show, rater
        self._done: list[tuple[Answer, str, str]] = []  # answer, value before, and value; "" if it was skipped
        self._listed = self._in_order()

    def run(self) -> int:
        """Ask until the person quits or the replies end; return how many answers have a rating of this session."""
        answer = next(self._listed, None)
        while True:
            self._show(NO_MORE if answer is None else shown(answer, self._store.rating_of(answer)))
            reply = self._reply(is_last=answer is None)
            if reply == "quit":
                return len({rated for rated, _, value in self._done if value})
            if reply == "undo" or answer is None:
                answer = self._undone(answer)
            else:
                self._take(answer, "" if reply == "skip" else reply)
                answer = next(self._listed, None)

    def _take(self, answer: Answer, value: str) -> None:
        """Rate an answer, or skip it."""
        before = self._store.value_of(answer)
        if value:
            self._store.rate(answer, value, self._rater)
            changed = f" (it was {before})" if before not in (TAKEN_BACK, value) else ""
            found = self._store.rating_of(answer)
            reward = f", reward {shown_reward(found.reward)}" if found and found.is_given else ""
            self._show(f"rated {answer.answer_id} {value}{changed}{reward}")
        self._done.append((answer, before, value))

    def _undone(self, current: Answer | None) -> Answer | None:
        """Undo the last reply and return its answer; the current one comes after it again."""
        if not self._done:
            self._show("nothing to undo")
            return current
        answer, before, value = self._done[-1]
        if value:
            self._store.rate(answer, before, self._rater)
            self._show(f"undone: {answer.answer_id} is {before}")
        self._done.pop()
        if current is not None:
            self._listed = chain([current], self._listed)
        return answer

    def _in_order(self) -> Iterator[Answer]:
        """Yield answers without a rating, then those that had one; an answer that is rated meanwhile moves."""
        seen = set[tuple[str, str]]()
        for with_rated in (False, True):
            for answer in self._answers():
                name = (answer.answer_id, answer.fingerprint)
                if name not in seen and (with_rated or self._store.value_of(answer) == TAKEN_BACK):
                    seen.add(name)
                    yield answer

    def _reply(self, is_last: bool) -> str:
        """Ask until the reply is a known name or its first letters; after the last answer only two are known."""
        scheme = SCHEMES[self._store.scheme]
        known, asked = {"u": "undo", "q": "quit"}, "undo, quit"
        if not is_last:
            known |= {value[0] + value[-1] if " " in value else value[0]: value for value in (*scheme.values, "skip")}
            asked = f"{scheme.words}, skip, undo, quit"
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
    rated = f", rated {rating.shown}" if rating and rating.is_given else ""
    head = f"── {answer.answer_id}  domain {answer.domain or '-'}, model version {answer.version}{rated}"
    return f"\n{head}\n{_indented('prompt', answer.prompt)}\n{_indented('answer', answer.answer)}"


def _indented(name: str, text: str) -> str:
    lines = text.strip("\n").split("\n")
    return "\n".join(f"{name if number == 0 else '':>7} │ {line}".rstrip() for number, line in enumerate(lines))
