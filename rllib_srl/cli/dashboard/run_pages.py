"""The page of a run: its report, transcripts and ratings.

    GET /                       the report, as in `srl report`; read again when metrics or settings have changed
    GET /episodes?q=...         transcripts, read for each search
    GET, POST /rate             answers in the memory, and their ratings
"""

from __future__ import annotations

import argparse
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rllib_srl.cli.dashboard.access import Access
from rllib_srl.cli.dashboard.memory_view import MemoryView
from rllib_srl.cli.dashboard.pages import Pages, RatedAnswer, position_in, short_fields
from rllib_srl.cli.episodes import is_wanted, iterations_in, printable, rewards_in
from rllib_srl.cli.report.run_facts import RunFacts, episodes_in
from rllib_srl.cli.report.run_page import blocks_of
from rllib_srl.cli.serving.served_directory import ServedDirectory
from rllib_srl.cli.shared.paths import missing
from rllib_srl.cli.shared.run_log import METRICS
from rllib_srl.cli.shared.runs import SETTINGS_FILE, RunError
from rllib_srl.people.rating import TAKEN_BACK, VALUES
from rllib_srl.people.rating_store import RATINGS, RatingStore
from rllib_srl.people.stored_answers import StoredAnswers
from rllib_srl.replay.reading import PLACES
from rllib_srl.replay.tools.describe import Decode, counted
from rllib_srl.studies.report.blocks import Block, Text
from rllib_srl.studies.results import STUDY_FILE

TABS = {"": "Overview", "episodes": "Episodes", "rate": "Rate"}
MOST = 20  # transcripts or answers on a page
FILTERS = ("q", "iteration", "reward", "stop", "env")
WIDEST = 60  # characters of a prompt in a table
NO_ITERATION = "No iteration has finished yet; this page fills by itself."
NO_MEMORY = "This run has no memory (replay_capacity = 0, or both fractions 0)."


def check_is_run(directory: Path) -> None:
    """Check that a path is the directory of a run, which may not have finished an iteration yet.

    Raises:
        RunError: it is not.
    """
    if (directory / STUDY_FILE).is_file():
        raise RunError(f"{directory} is a study; expected the directory of a run (srl report shows studies)")
    if ServedDirectory(directory).exists:
        raise RunError(f"{directory} is a served model; srl serve prints the address of its page")
    if not any((directory / name).is_file() for name in (METRICS, SETTINGS_FILE, PLACES[0])):
        there = "holds no run" if directory.is_dir() else missing(directory)
        raise RunError(f"{directory} {there}; expected the directory of a run ({METRICS})")


class RunPages(Pages):
    """The page of one run. Invariant: `_facts` are those of the files whose marks are `_marks`."""

    charts = ("",)

    def __init__(
        self,
        directory: Path,
        access: Access,
        decode: Callable[[], Decode],
        rater: str = "",
        may_rate: bool = False,
    ) -> None:
        """Prepare the page of a run.

        Args:
            directory: of the run.
            access: who may read it.
            decode: returns the function token ids -> text.
            rater: name of the person who rates.
            may_rate: whether ratings may be written.
        """
        super().__init__(f"Run {directory.resolve().name}", TABS, access, may_rate)
        self.directory, self.memory = directory, MemoryView(directory)
        self._decode, self._rater = cache(decode), rater
        self._ratings: RatingStore | None = None
        self._facts: RunFacts | None = None
        self._marks: list[tuple[int, int]] = []

    def routes(self) -> list[Route]:
        """Return the addresses."""
        return [
            Route("/", self.tab),
            Route("/episodes", self.episodes),
            Route("/rate", self.answers, methods=["GET"]),
            Route("/rate", self.rate, methods=["POST"]),
        ]

    def facts(self) -> RunFacts | None:
        """Return settings and metrics; None before the first finished iteration."""
        paths = [self.directory / name for name in (METRICS, SETTINGS_FILE)]
        marks = [(one.st_size, one.st_mtime_ns) for one in (path.stat() for path in paths if path.is_file())]
        if marks != self._marks:
            has_rows = paths[0].is_file() and paths[0].stat().st_size > 0
            self._facts, self._marks = RunFacts.read(self.directory) if has_rows else None, marks
        return self._facts

    def version_of(self, tab: str) -> str:
        """Return a text that changes whenever the metrics or the settings do."""
        self.facts()
        return str(self._marks)

    def blocks_of(self, tab: str) -> Iterator[Block]:
        """Yield the report of the run."""
        yield from blocks_of(self._facts) if self._facts else [Text(NO_ITERATION)]

    def state(self) -> str:
        """Return how far the run is, in words."""
        facts = self.facts()
        if facts is None:
            return "no finished iteration yet"
        done, planned = int(facts.iterations[-1]), facts.settings.get("iterations")
        of = f" of {planned:,}" if isinstance(planned, int) else ""
        end = "finished" if isinstance(planned, int) and done >= planned else "the last one"
        return f"{done:,}{of} iterations, {end} {_ago(time.time() - (self.directory / METRICS).stat().st_mtime)}"

    def close(self) -> None:
        """Close what is open."""
        if self._ratings is not None:
            self._ratings.close()
        self.memory.close()

    # --- transcripts ------------------------------------------------------------------------------

    async def episodes(self, request: Request) -> Response:
        """Return the newest transcripts that fit the filters."""
        given, skip = short_fields(request, FILTERS), position_in(request, "skip") or 0
        filters, stops, envs = _filters(given), set[str](), set[str]()

        def fits(one: Mapping[str, Any]) -> bool:
            stops.add(str(one["stop_reason"]))
            envs.add(str(one["env_id"]))
            texts = (str(one.get("prompt_id", "")), *(turn["text"] for turn in one["turns"]))
            has_text = any(given["q"].lower() in part.lower() for part in texts)
            return has_text and given["env"] in ("", one["env_id"]) and is_wanted(one, filters)

        found, num_damaged = await self._readable(lambda: episodes_in(self.directory, fits))
        more = urlencode({**{name: value for name, value in given.items() if value}, "skip": skip + MOST})
        about: dict[str, Any] = {"found": found[::-1][skip : skip + MOST], "num": len(found), "skip": skip}
        about |= {"stops": sorted(stops), "envs": sorted(envs), "num_damaged": num_damaged, "given": given}
        about |= {"older": f"/episodes?{more}" if len(found) > skip + MOST else "", "shown_id": shown_id}
        return await self._page(request, "episodes.html.j2", "episodes", **about)

    # --- ratings ----------------------------------------------------------------------------------

    async def answers(self, request: Request) -> Response:
        """Return the newest answers in the memory with their ratings."""
        skip = position_in(request, "before") or 0
        values, found = await self._readable(lambda: self._rated(skip))
        older = f"/rate?before={skip + MOST}" if len(found) > MOST else ""
        caption = "The answers in the memory, the newest first. A run applies ratings before its next iteration."
        nothing = "There are no more answers." if self.memory.exists else NO_MEMORY
        return await self._answers(request, found[:MOST], values, older, caption=caption, nothing=nothing)

    async def rate(self, request: Request) -> Response:
        """Rate an answer, or take its rating back."""
        form = await self._form(request)
        values, _ = await self._readable(lambda: self._rated(0, 0))
        name, value = form.get("id", ""), form.get("value", "")
        if value not in values or not re.fullmatch(r"[^\s/]{1,100}/[0-9]{1,9}", name):
            raise HTTPException(400, f"expected the id of an answer, such as 12.3/0, and a rating: {', '.join(values)}")
        await self._readable(lambda: self._rate(name, form.get("mark", ""), value))
        return self._back_to(request, form)

    def _store(self) -> RatingStore | None:
        """Return the ratings; None if there are none and the page may not write any."""
        path = self.directory / RATINGS
        if self._ratings is None and self.memory.exists and (self.may_rate or path.exists()):
            self._ratings = RatingStore(path)
        return self._ratings

    def _rated(self, skip: int, most: int = MOST + 1) -> tuple[tuple[str, ...], list[RatedAnswer]]:
        """Return the values of ratings, and some answers, the newest first."""
        store = self._store()
        values = (*VALUES[store.scheme if store else ""], TAKEN_BACK)
        if not most or not self.memory.exists:
            return values, []
        answers, found = StoredAnswers(self.memory.reading(), self._decode), []
        for one in islice(answers.newest_first(), skip, skip + most):
            about = f"{one.answer_id}, domain {one.domain or '-'}, model version {one.version}"
            rating = store.rating_of(one) if store else None
            value = rating.value if rating else TAKEN_BACK
            by = f" by {rating.rater}" if rating and rating.rater else ""
            note = f"rated {store.shown(one)}{by}: {answers.state_of(one, rating.seq).text}" if store and rating else ""
            said = [("prompt", one.prompt), ("answer", one.answer)]
            title = shown_id(" ".join(one.answer.split()))
            found.append(RatedAnswer(one.answer_id, title, about, said, value, note, one.fingerprint))
        return values, found

    def _rate(self, name: str, mark: str, value: str) -> None:
        """Set the rating of an answer in the memory.

        Raises:
            ValueError: it is gone, or another answer has its id.
        """
        store, found = self._store(), StoredAnswers(self.memory.reading(), self._decode).find(name)
        if store is None or found is None or found.fingerprint != mark:
            raise ValueError(f"{name} is not in the memory any more; load the page again")
        store.rate(found, value, self._rater)


def _filters(given: dict[str, str]) -> Namespace:
    """Return the filters of a search, as `srl episodes` has them.

    Raises:
        HTTPException: one is malformed.
    """
    try:
        iteration = iterations_in(given["iteration"]) if given["iteration"] else None
        reward = rewards_in(given["reward"]) if given["reward"] else None
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise HTTPException(400, str(error)) from None
    return Namespace(iteration=iteration, reward=reward, stop_reason=given["stop"] or None)


def _ago(seconds: float) -> str:
    """Return a time that has passed in its largest unit."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return f"{counted(int(seconds // size), unit)} ago"
    return "less than a minute ago"


def shown_id(prompt_id: str) -> str:
    """Return the id of a prompt for a table; of a long one, the beginning and the end, where ids often differ."""
    name = printable(prompt_id)
    half = WIDEST // 2
    return name if len(name) <= WIDEST else f"{name[:half]}…{name[-half:]}"
