"""The addresses of the live page.

    GET  /  /memory  /rate                  a tab               GET /memory/KEY    an item
    GET  /episodes?q=...&iteration=3-5      transcripts         GET /static/NAME   styles and script
    POST /rate  /rate/set                   ratings, by the page's forms

What is malformed is answered with 400 and one line that names what was expected.
"""

from __future__ import annotations

import argparse
import re
from typing import Any
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from rllib_srl.cli.dashboard.access import Access
from rllib_srl.cli.dashboard.pages import Pages, application, position_in, short_fields
from rllib_srl.cli.dashboard.rating_desk import Card
from rllib_srl.cli.dashboard.run_views import RunViews, shown_id
from rllib_srl.cli.episodes import iterations_in, printable, rewards_in
from rllib_srl.cli.people.rate import LISTED
from rllib_srl.cli.report.run_page import shortened
from rllib_srl.people.rating import TAKEN_BACK, VALUES

MOST_EPISODES = 20  # on a page
FILTERS = ("q", "iteration", "reward", "stop", "env")
_ALL_VALUES = {TAKEN_BACK, *(value for values in VALUES.values() for value in values)}
READ_ONLY = "this page is read-only; start it with --allow-rating, or srl rate RUN --web"


def make_app(views: RunViews, access: Access) -> Starlette:
    """Return the application of a run's page."""
    pages = RunPages(views, access)
    routes = [
        Route("/memory/{key}", pages.item),
        Route("/episodes", pages.episodes),
        Route("/rate", pages.rate, methods=["GET", "POST"]),
        Route("/rate/set", pages.change, methods=["POST"]),
    ]
    return application(pages, views, access, ("", "memory"), routes)


class RunPages(Pages):
    """The handlers of a run's addresses. Invariant: nothing here reads files; `RunViews` does, in its thread."""

    read_only = READ_ONLY

    def __init__(self, views: RunViews, access: Access) -> None:
        """Prepare the handlers of a run's page."""
        super().__init__(views, access)
        self._views: RunViews = views

    # --- tabs ------------------------------------------------------------------------------------

    async def item(self, request: Request) -> Response:
        """Return the page of an item of the memory."""
        key = request.path_params["key"]
        html = await self._readable(lambda: self._views.item(key)) if re.fullmatch(r"[0-9a-f]{16}", key) else None
        if html is None:
            raise HTTPException(404, "no item of the memory has this key; it may have been evicted")
        return await self._page(request, "blocks_page.html.j2", "memory", html=html, is_live=False)

    # --- episodes --------------------------------------------------------------------------------

    async def episodes(self, request: Request) -> Response:
        """Return the newest transcripts that fit the filters."""
        given = short_fields(request, FILTERS)
        skip, filters = position_in(request, "skip") or 0, _filters(given)
        look = (filters, given["q"], given["env"], skip, MOST_EPISODES)
        episodes = await self._readable(lambda: self._views.episodes(*look))
        asked = {name: value for name, value in given.items() if value}
        more = urlencode({**asked, "skip": skip + MOST_EPISODES})
        older = f"/episodes?{more}" if episodes.num > skip + MOST_EPISODES else ""
        about: dict[str, Any] = {"given": given, "episodes": episodes, "skip": skip, "older": older}
        about |= {"clean": printable, "shortened": shortened, "shown_id": shown_id}
        return await self._page(request, "episodes.html.j2", "episodes", **about)

    # --- ratings ---------------------------------------------------------------------------------

    async def rate(self, request: Request) -> Response:
        """Show a sitting, or take a reply of one."""
        desk = self._views.desk
        if request.method == "POST":
            form = await self._form(request)
            names = (form.get("sitting", ""), form.get("shown", ""), form.get("action", ""))
            actions = await self._readable(desk.actions)
            if names[2] not in actions:
                raise HTTPException(400, f"action = {names[2][:40]!r}; expected {', '.join(actions)}")
            card: Card = await self._readable(lambda: desk.reply(*names))
            return await self._rate_page(request, card, 409 if card.is_stale else 200)
        sitting = request.query_params.get("sitting", "")
        if not re.fullmatch(r"[A-Za-z0-9_-]{0,40}", sitting):
            raise HTTPException(400, f"sitting = {sitting[:40]!r}; expected the one of the page")
        if not desk.may_rate or not self._views.memory.exists:
            return await self._rate_page(request, None)
        return await self._rate_page(request, await self._readable(lambda: desk.card(sitting)))

    async def change(self, request: Request) -> Response:
        """Change or take back the rating of an answer by its id."""
        form = await self._form(request)
        answer_id, value = form.get("id", ""), form.get("value", "")
        if value not in _ALL_VALUES or not re.fullmatch(r"[^\s/]{1,100}/[0-9]{1,9}", answer_id):
            raise HTTPException(400, "expected the id of an answer, such as 12.3/0, and a rating")
        await self._readable(lambda: self._views.desk.change(answer_id, value))
        sitting = form.get("sitting", "")
        query = urlencode({"sitting": sitting}) if re.fullmatch(r"[A-Za-z0-9_-]{1,40}", sitting) else ""
        return RedirectResponse(f"/rate?{query}#rated", 303)

    async def _rate_page(self, request: Request, card: Card | None, status: int = 200) -> Response:
        has_memory = self._views.memory.exists
        rows = await self._readable(self._views.desk.listed) if has_memory else []
        values = (*(card.values if card else VALUES[""]), TAKEN_BACK)
        prompt, answer = (card.answer.prompt, card.answer.answer) if card and card.answer else ("", "")
        about = {"card": card, "rows": rows, "header": LISTED, "values": values, "has_memory": has_memory}
        texts = {"prompt": shortened(prompt), "answer": shortened(answer), "form_key": self._access.form_key}
        return await self._page(request, "rate.html.j2", "rate", status, clean=printable, **about, **texts)


def _filters(given: dict[str, str]) -> argparse.Namespace:
    """Return the filters of a search, as `srl episodes` has them.

    Raises:
        HTTPException: one is malformed.
    """
    try:
        iteration = iterations_in(given["iteration"]) if given["iteration"] else None
        reward = rewards_in(given["reward"]) if given["reward"] else None
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise HTTPException(400, str(error)) from None
    return argparse.Namespace(iteration=iteration, reward=reward, stop_reason=given["stop"] or None)
