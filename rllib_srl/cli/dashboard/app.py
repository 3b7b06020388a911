"""The addresses of the live page.

    GET  /  /forgetting  /memory  /rate     a tab               GET /memory/KEY    an item
    GET  /episodes?q=...&iteration=3-5      transcripts         GET /pulse?tab=..  versions of a tab's parts
    GET  /part/NAME                         a part, as HTML     GET /static/NAME   styles and script
    POST /rate  /rate/set                   ratings, by the page's forms

What is malformed is answered with 400 and one line that names what was expected.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from rllib_srl.cli.dashboard.access import Access
from rllib_srl.cli.dashboard.pages import Pages, application, position_in, short_fields
from rllib_srl.cli.dashboard.rating_desk import Card
from rllib_srl.cli.dashboard.sections import TABS, shown_id
from rllib_srl.cli.dashboard.transcripts import Hits, Wanted
from rllib_srl.cli.dashboard.views import Views
from rllib_srl.cli.episodes import iterations_in, printable, rewards_in
from rllib_srl.cli.people.rate import LISTED
from rllib_srl.cli.report.run_page import shortened
from rllib_srl.people.rating import TAKEN_BACK, VALUES

MOST_EPISODES = 20  # on a page
T = TypeVar("T")
FILTERS = ("q", "iteration", "reward", "stop", "env")
_ALL_VALUES = {TAKEN_BACK, *(value for values in VALUES.values() for value in values)}
READ_ONLY = "this page is read-only; start it with --allow-rating, or srl rate RUN --web"


def make_app(views: Views, access: Access) -> Starlette:
    """Return the application of a run's page."""
    pages = RunPages(views, access)
    routes = [
        Route("/memory/{key}", pages.item),
        Route("/episodes", pages.episodes),
        Route("/rate", pages.rate, methods=["GET", "POST"]),
        Route("/rate/set", pages.change, methods=["POST"]),
    ]
    return application(pages, views, access, [name for name in TABS if name not in ("episodes", "rate")], routes)


class RunPages(Pages):
    """The handlers of a run's addresses. Invariant: nothing here reads files; `Views` does, in its threads."""

    read_only = READ_ONLY

    def __init__(self, views: Views, access: Access) -> None:
        """Prepare the handlers of a run's page."""
        super().__init__(views, access)
        self._views: Views = views

    # --- tabs ------------------------------------------------------------------------------------

    async def item(self, request: Request) -> Response:
        """Return the page of an item of the memory."""
        key = request.path_params["key"]
        found = await self._of_memory(lambda: self._views.item(key)) if re.fullmatch(r"[0-9a-f]{16}", key) else None
        if found is None:
            raise HTTPException(404, "no item of the memory has this key; it may have been evicted")
        return await self._page("item.html.j2", "memory", name=printable(found[0]), html=found[1])

    # --- episodes --------------------------------------------------------------------------------

    async def episodes(self, request: Request) -> Response:
        """Return the newest transcripts that fit the filters."""
        given = short_fields(request, FILTERS)
        before = position_in(request)
        wanted = _wanted(given)
        transcripts = self._views.sources.run.transcripts

        def look() -> tuple[Hits, tuple[list[str], list[str]], int, int | None]:
            self._views.sources.run.refresh()
            hits = transcripts.search(wanted, before, MOST_EPISODES)
            reached = transcripts.iteration_of(hits.before) if hits.before else None
            return hits, transcripts.choices(), len(transcripts), reached

        hits, choices, num, reached = await self._readable(look)
        asked = {name: value for name, value in given.items() if value}
        older = f"/episodes?{urlencode({**asked, 'before': hits.before})}" if hits.before else ""
        about: dict[str, Any] = {"given": given, "stops": choices[0], "envs": choices[1], "num": num}
        about |= {"reached": reached, "is_first": before is None, "is_cut": hits.is_cut, "older": older}
        about |= {"clean": printable, "shortened": shortened, "shown_id": shown_id}
        about |= {"episodes": [one for _, one in hits.episodes]}
        return await self._page("episodes.html.j2", "episodes", **about)

    # --- ratings ---------------------------------------------------------------------------------

    async def rate(self, request: Request) -> Response:
        """Show a sitting, or take a reply of one."""
        desk = self._views.desk
        if request.method == "POST":
            form = await self._form(request)
            names = (form.get("sitting", ""), form.get("shown", ""), form.get("action", ""))
            actions = await self._of_memory(desk.actions)
            if names[2] not in actions:
                raise HTTPException(400, f"action = {names[2][:40]!r}; expected {', '.join(actions)}")
            card: Card = await self._of_memory(lambda: desk.reply(*names))
            return await self._rate_page(card, 409 if card.is_stale else 200)
        sitting = request.query_params.get("sitting", "")
        if not re.fullmatch(r"[A-Za-z0-9_-]{0,40}", sitting):
            raise HTTPException(400, f"sitting = {sitting[:40]!r}; expected the one of the page")
        if not desk.may_rate or not self._views.sources.memory.exists:
            return await self._rate_page(None)
        return await self._rate_page(await self._of_memory(lambda: desk.card(sitting)))

    async def change(self, request: Request) -> Response:
        """Change or take back the rating of an answer by its id."""
        form = await self._form(request)
        answer_id, value = form.get("id", ""), form.get("value", "")
        if value not in _ALL_VALUES or not re.fullmatch(r"[^\s/]{1,100}/[0-9]{1,9}", answer_id):
            raise HTTPException(400, "expected the id of an answer, such as 12.3/0, and a rating")
        await self._of_memory(lambda: self._views.desk.change(answer_id, value))
        sitting = form.get("sitting", "")
        query = urlencode({"sitting": sitting}) if re.fullmatch(r"[A-Za-z0-9_-]{1,40}", sitting) else ""
        return RedirectResponse(f"/rate?{query}#rated", 303)

    async def _rate_page(self, card: Card | None, status: int = 200) -> Response:
        has_memory = self._views.sources.memory.exists
        rows = await self._of_memory(self._views.desk.listed) if has_memory else []
        values = (*(card.values if card else VALUES[""]), TAKEN_BACK)
        prompt, answer = (card.answer.prompt, card.answer.answer) if card and card.answer else ("", "")
        about = {"card": card, "rows": rows, "header": LISTED, "values": values, "has_memory": has_memory}
        texts = {"prompt": shortened(prompt), "answer": shortened(answer), "form_key": self._access.form_key}
        return await self._page("rate.html.j2", "rate", status, clean=printable, **about, **texts)

    async def _of_memory(self, work: Callable[[], T]) -> T:
        return await self._readable(work, self._views.in_memory)


def _wanted(given: dict[str, str]) -> Wanted:
    """Return the filters of a search.

    Raises:
        HTTPException: one is malformed.
    """
    try:
        iteration = iterations_in(given["iteration"]) if given["iteration"] else None
        reward = rewards_in(given["reward"]) if given["reward"] else None
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise HTTPException(400, str(error)) from None
    return Wanted(given["q"].lower(), iteration, reward, given["stop"], given["env"])
