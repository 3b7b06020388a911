"""Rate answers of a run; the ratings become rewards and grades.

    srl rate results/first                             show answers, ask for a rating of each
    yes good | head -3 | srl rate results/first        one reply a line, without a terminal
    srl rate results/first --list                      all ratings, and what has become of each
    srl rate results/first --set 12.3/0 bad            rate an answer, or change its rating; none takes it back
    srl rate results/first --scheme hybrid             thumbs with stars: good 4 is worth .8, bad 2 is worth -.4
    srl rate results/first --export ratings.jsonl      all ratings with their prompts and answers

Answers are those in the memory of the run, which may be going on: prompt and answer, domain, version of the model.
Those without a rating come first. Replies are good, bad, 1 to 5, skip, undo and quit, or their first letters; a scheme,
which a run keeps for good, has its own: --scheme binary, ordinal, normalised (by the rater's mean), hybrid (good 4, or
g4). Each rating is durable before it is acknowledged; the end of the input is quit. A run that is going on, or is
resumed later, applies ratings before its next iteration. Several people may rate at once; the newest rating of an
answer counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from rllib_srl.cli.memory import decoder_for
from rllib_srl.cli.shared.display import one_line, printable, printable_lines, table
from rllib_srl.cli.shared.flags import Program
from rllib_srl.people.rating import (
    NAMED_SCHEMES,
    SCHEMES,
    TAKEN_BACK,
    Answer,
    Rating,
    check_value,
    expected,
    shown_reward,
)
from rllib_srl.people.rating_store import RATINGS, RatingsError, RatingStore
from rllib_srl.people.stored_answers import UNUSED, WAITS, StoredAnswers, check_run
from rllib_srl.storage.disk import writing
from rllib_srl.studies.records import write_whole

LISTED = ["id", "rating", "reward", "rater", "at", "domain", "answer", "state"]
WIDEST = 40  # characters of an answer in the list
NO_MORE = "\nno more answers in the memory of the run"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="RUN", help="the directory of a run")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--list", action="store_true", help="list all ratings")
    ways.add_argument("--set", nargs=2, metavar=("ID", "VALUE"), help=f"set one rating: {expected()}")
    ways.add_argument("--export", type=Path, metavar="FILE", help="write all ratings to a JSONL file")
    text = "values and rewards of the run's ratings, for good (default: good and bad as binary, 1 to 5 as ordinal)"
    parser.add_argument("--scheme", choices=NAMED_SCHEMES, default="", help=text)
    parser.add_argument("--rater", default="", metavar="NAME", help="name of the person who rates")
    parser.add_argument("--model", help="name or directory of the model, for its tokenizer (default: the run's)")


def rate(arguments: argparse.Namespace) -> int:
    directory: Path = arguments.directory
    check_run(directory)
    path = directory / RATINGS
    if arguments.scheme:
        RatingStore(path, arguments.scheme).close()  # its scheme from here on
    if (arguments.list or arguments.export) and not path.exists():
        raise RatingsError(f"{directory} has no ratings yet; rate some answers first: srl rate {directory}")
    with RatingStore(path) as store, StoredAnswers.of_run(directory, decoder_for(arguments)) as answers:
        if arguments.list:
            print_list(store, answers)
        elif arguments.export:
            export(store, answers, arguments.export)
        elif arguments.set:
            answer_id, value = arguments.set
            print(set_by_id(store, answers, answer_id, value, arguments.rater))
        else:
            ask(store, answers, arguments.rater)
    return 0


def ask(store: RatingStore, answers: StoredAnswers, rater: str) -> None:
    has_terminal = sys.stdin.isatty()

    def read(prompt: str) -> str:
        if has_terminal:
            return input(prompt)
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line

    def show(text: str) -> None:
        print(printable_lines(text), flush=True)

    session = RatingSession(store, answers.newest_first, read, show, rater)
    num = 0
    with suppress(KeyboardInterrupt):  # as quit: every rating is stored already
        num = session.run()
    print(f"{num} answers rated; the run applies new ratings before its next iteration")


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
        before = self._store.value_of(answer)
        if value:
            self._show(rated(self._store, answer, value, self._rater))
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
            reply = " ".join(line.split())
            if reply in known or reply in known.values():
                return known.get(reply, reply)
            self._show(f"{line!r}; expected {asked}")


def shown(answer: Answer, rating: Rating | None) -> str:
    rated = f", rated {rating.shown}" if rating and rating.is_given else ""
    head = f"── {answer.answer_id}  domain {answer.domain or '-'}, model version {answer.version}{rated}"
    return f"\n{head}\n{_indented('prompt', answer.prompt)}\n{_indented('answer', answer.answer)}"


def _indented(name: str, text: str) -> str:
    lines = text.strip("\n").split("\n")
    return "\n".join(f"{name if number == 0 else '':>7} │ {line}".rstrip() for number, line in enumerate(lines))


def set_by_id(store: RatingStore, answers: StoredAnswers, answer_id: str, value: str, rater: str) -> str:
    """Set the rating of one answer, also of one that has left the memory but was rated before; say what has changed."""
    check_value(value, store.scheme)
    if stored := answers.find(answer_id):
        return rated(store, stored, value, rater)
    if gone := store.of_answer(answer_id):
        return f"{rated(store, gone.answer, value, rater)}; unused: the answer is no longer in the memory"
    raise ValueError(f"id = {answer_id!r} is not in the memory of the run; expected the id of an answer there")


def rated(store: RatingStore, answer: Answer, value: str, rater: str) -> str:
    """Set the rating of an answer; say what has changed."""
    before = store.value_of(answer)
    is_new = store.rate(answer, value, rater)
    was = f" (it was {before})" if is_new and before != TAKEN_BACK else "" if is_new else " already"
    rating = store.rating_of(answer)
    reward = f", reward {shown_reward(rating.reward)}" if rating and rating.is_given else ""
    return f"rated {answer.answer_id} {value}{was}{reward}"


def print_list(store: RatingStore, answers: StoredAnswers) -> None:
    """Print what has become of each rating that was not taken back, or whose taking back is of interest."""
    rows = []
    for rating in store.all():
        state = answers.state_of(rating.answer, rating.seq)
        if rating.is_given or state == WAITS:
            rows.append([*map(printable, cells(rating)), state])
    print(table([LISTED, *rows], indent=""))
    print(f"{len(rows)} ratings")


def cells(rating: Rating) -> list[str]:
    verdict = [rating.value, shown_reward(rating.reward), rating.rater or "-", rating.rated_at]
    return [rating.answer.answer_id, *verdict, rating.answer.domain or "-", one_line(rating.answer.answer, WIDEST)]


def export(store: RatingStore, answers: StoredAnswers, file: Path) -> None:
    """Write all ratings to a file, readable by its owner only, as all that a command writes."""
    rows = [row_of(rating, answers) for rating in store.all() if rating.is_given]
    with writing(file):
        write_whole(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{len(rows)} ratings in {file}")


def row_of(rating: Rating, answers: StoredAnswers) -> dict[str, Any]:
    about = {name: value for name, value in vars(rating.answer).items() if name not in ("group_id", "episode")}
    verdict = {"rating": rating.value, "reward": rating.reward, "rater": rating.rater, "rated_at": rating.rated_at}
    is_unused = answers.state_of(rating.answer, rating.seq) == UNUSED
    return {"id": rating.answer.answer_id, **verdict, **about, "is_unused": is_unused}


main = Program(__doc__, add_flags, rate)
