"""The page of a served model: its versions, conversations and training.

    GET, POST /                      versions; the form rolls the active one back
    GET, POST /conversations?q=...   the newest first, and their ratings
    GET, POST /training              ratings that wait; the form pauses or continues

Writing needs `--allow-rating`, and a form of this page. What is sent twice is done once: a roll-back names the version
that is meant, a rating or a pause says what shall be.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rllib_srl.cli.dashboard.access import Access
from rllib_srl.cli.dashboard.pages import TROUBLES, Pages, RatedAnswer, one_line, position_in, short_fields
from rllib_srl.cli.dashboard.served.model import ServedModel
from rllib_srl.cli.dashboard.served.sections import shown_time, training, versions
from rllib_srl.cli.episodes import printable
from rllib_srl.people.lineage.conversations import Conversation
from rllib_srl.people.rating import TAKEN_BACK, Rating, shown_reward
from rllib_srl.replay.tools.describe import counted
from rllib_srl.studies.report.blocks import Block

TABS = {"": "Versions", "conversations": "Conversations", "training": "Training"}
MOST_CONVERSATIONS = 20  # on a page
LONGEST_REASON = 300  # characters
BRIEF = 100  # characters of a question in the list


class ServedPages(Pages):
    """The page of one served model."""

    def __init__(self, directory: Path, access: Access, rater: str = "", may_rate: bool = False) -> None:
        """Prepare the page.

        Args:
            directory: of the served model.
            access: who may read it.
            rater: name of the person who rates.
            may_rate: whether the page may rate, roll back and pause.

        Raises:
            ValueError: the name of the rater is too long.
        """
        super().__init__(f"Served model {directory.resolve().name}", TABS, access, may_rate)
        self.model = ServedModel(directory, rater)
        self._acting = asyncio.Lock()  # a second click finds what the first has done

    def routes(self) -> list[Route]:
        """Return the addresses."""
        return [
            Route("/", self.tab, methods=["GET"]),
            Route("/", self.roll_back, methods=["POST"]),
            Route("/training", self.tab, methods=["GET"]),
            Route("/training", self.pause, methods=["POST"]),
            Route("/conversations", self.conversations, methods=["GET"]),
            Route("/conversations", self.rate, methods=["POST"]),
        ]

    def version_of(self, tab: str) -> str:
        """Return a text that changes whenever a version or a rating does, or what the server says of its training."""
        self.model.refresh()
        return self.model.change() + (self.model.said() if tab else "")

    def blocks_of(self, tab: str) -> Iterator[Block]:
        """Yield versions or training."""
        return training(self.model) if tab else versions(self.model)

    def state(self) -> str:
        """Return which version is active, and whether the server runs."""
        self.model.refresh()
        active, status = self.model.active(), self.model.status
        runs = "the server runs" if status.get("is_ready") else "the server is starting its engine"
        return f"version {active.number if active else 0} is active, {runs if status else self.model.why_no_status}"

    def close(self) -> None:
        """Close what is open."""
        self.model.close()

    # --- versions and training --------------------------------------------------------------------

    async def tab(self, request: Request) -> Response:
        """Return a tab of blocks with its form."""
        return await self._with_form(request)

    async def _with_form(self, request: Request, status: int = 200, said: str = "") -> Response:
        try:
            active = await self._in_files(self.model.active)
        except TROUBLES:  # the tab says so
            active = None
        about: dict[str, Any] = {"active": active.number if active else 0, "parent": active.parent if active else 0}
        about |= {"longest": LONGEST_REASON, "said": printable(said)}
        return await self._tab(request, request.url.path.strip("/"), status, "served.html.j2", **about)

    async def _done(self, request: Request, work: Callable[[], str]) -> Response:
        """Do something through the server, outside of the thread of the files; what is impossible is one message."""
        async with self._acting:
            try:
                return await self._with_form(request, 200, await asyncio.to_thread(work))
            except TROUBLES as error:
                return await self._with_form(request, 409, f"Not done: {one_line(error)}.")

    async def roll_back(self, request: Request) -> Response:
        """Roll a version back."""
        form = await self._form(request)
        number, reason = form.get("version", ""), form.get("reason", "").strip()
        if not re.fullmatch(r"[1-9][0-9]{0,8}", number):
            raise HTTPException(400, f"version = {number[:40]!r}; expected the number of the active version")
        if not 0 < len(reason) <= LONGEST_REASON:
            raise HTTPException(400, f"the reason has {len(reason)} characters; expected 1 to {LONGEST_REASON}")
        return await self._done(request, lambda: self.model.roll_back(int(number), printable(reason)))

    async def pause(self, request: Request) -> Response:
        """Pause or continue training."""
        paused = (await self._form(request)).get("paused", "")
        if paused not in ("yes", "no"):
            raise HTTPException(400, f"paused = {paused[:40]!r}; expected yes or no")
        return await self._done(request, lambda: self.model.pause(paused == "yes"))

    # --- conversations ----------------------------------------------------------------------------

    async def conversations(self, request: Request) -> Response:
        """Return the newest conversations with a text."""
        q, before = short_fields(request, ("q",))["q"], position_in(request, "before")
        model = self.model
        hits, found = await self._readable(lambda: model.search(q, before, MOST_CONVERSATIONS))
        num, values = await self._readable(lambda: (model.num_conversations(), model.values()))
        older = f"/conversations?{urlencode({'q': q, 'before': hits.before})}" if hits.before else ""
        caption = f"{counted(num, 'conversation')}, the newest first{'' if before is None else ', older ones'}."
        if hits.is_cut:
            caption += " The search stopped after a second; Older goes on."
        nothing = "No conversation fits." if num else "Nothing has been asked yet."
        shown = [_rated(one, rating) for one, rating in found]
        return await self._answers(request, shown, values, older, q=q, caption=caption, nothing=nothing)

    async def rate(self, request: Request) -> Response:
        """Rate an answer, or take its rating back."""
        form = await self._form(request)
        name, value = form.get("id", ""), form.get("value", "")
        values = await self._readable(self.model.values)
        if value not in values or not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
            raise HTTPException(400, f"expected the id of a conversation, and a rating: {', '.join(values)}")
        if not await self._readable(lambda: self.model.rate(name, value)):
            raise HTTPException(404, f"{name} is no conversation here")
        return self._back_to(request, form)


def _rated(one: Conversation, rating: Rating | None) -> RatedAnswer:
    """Return a conversation and its rating for a page."""
    question = printable(" ".join(str(one.messages[-1]["content"] if one.messages else "").split()))
    given = "" if one.version else ", the model that was given"
    about = f"{one.id}; answered by version {one.version}{given}; ended as {one.finish_reason}"
    about += f"; not trained on: {one.untrainable}" if one.untrainable else ""
    by = f" by {rating.rater}" if rating and rating.rater else ""
    note = f"rated {rating.value}{by}: reward {shown_reward(rating.reward)}" if rating and rating.is_given else ""
    turns = [*((str(turn["role"]), str(turn["content"])) for turn in one.messages), ("answer", one.answer)]
    title = question if len(question) <= BRIEF else f"{question[:BRIEF]}…"
    small = f"version {one.version}, {shown_time(one.at)}"
    return RatedAnswer(one.id, title, small, about, turns, rating.value if rating else TAKEN_BACK, note)
