"""Ask a person for ratings, one line a reply: at a terminal, or from a pipe.

    good, bad, skip, 1 to 5, undo, quit          also g, b, s, u, q; the end of the input is quit
    good 4, bad 2, skip, undo, quit              with the scheme "hybrid"; also g4, b2

`rating_queue.py` has their order and what the replies do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rllib_srl.people.rating import TAKEN_BACK, VALUES, Answer, words_of
from rllib_srl.people.rating_queue import RatingQueue
from rllib_srl.people.rating_store import RatingStore

COMMANDS = {"s": "skip", "u": "undo", "q": "quit"}
AT_THE_END = "undo, quit"
NO_MORE = "\nno more answers in the memory of the run"


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
        self._store, self._read, self._show = store, read, show
        self._queue = RatingQueue(store, answers, rater)
        values = VALUES[store.scheme]
        self._replies = COMMANDS | {value[0] + value[-1] if " " in value else value[0]: value for value in values}
        self._asked = f"{words_of(store.scheme)}, skip, undo, quit"

    def run(self) -> int:
        """Ask until the person quits or the replies end; return how many answers have a rating of this session."""
        while True:
            answer = self._queue.current
            self._show(NO_MORE if answer is None else shown(answer, self._store.shown(answer)))
            reply = self._reply(self._asked if answer else AT_THE_END)
            if reply == "quit":
                return self._queue.num_rated
            if reply == "undo":
                said = self._queue.undo()
            elif reply == "skip":
                self._queue.skip()
                said = ""
            else:
                said = self._queue.rate(reply)
            if said:
                self._show(said)

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


def shown(answer: Answer, value: str) -> str:
    """Return an answer as a person sees it."""
    rated = f", rated {value}" if value != TAKEN_BACK else ""
    head = f"── {answer.answer_id}  domain {answer.domain or '-'}, model version {answer.version}{rated}"
    return f"\n{head}\n{_indented('prompt', answer.prompt)}\n{_indented('answer', answer.answer)}"


def _indented(name: str, text: str) -> str:
    lines = text.strip("\n").split("\n")
    return "\n".join(f"{name if number == 0 else '':>7} │ {line}".rstrip() for number, line in enumerate(lines))
