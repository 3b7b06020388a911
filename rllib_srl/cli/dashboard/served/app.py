"""The addresses of the page of a served model.

    GET  /  /training                        versions, training         GET  /conversations?q=...   the newest first
    POST /                                   rolls a version back        POST /conversations         rates an answer
    POST /training                           pauses or continues it

Writing needs `--allow-rating`, and a form of this page. What is sent twice is done once: a roll-back names the version
that is meant, a rating or a pause says what shall be.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from rllib_srl.cli.dashboard.access import Access
from rllib_srl.cli.dashboard.page_views import TROUBLES, one_line
from rllib_srl.cli.dashboard.pages import Pages, application, position_in, short_fields
from rllib_srl.cli.dashboard.served.sections import ServedViews, shown_time
from rllib_srl.cli.episodes import printable
from rllib_srl.cli.report.run_page import shortened
from rllib_srl.people.rating import TAKEN_BACK, shown_reward

MOST_CONVERSATIONS = 20  # on a page
LONGEST_REASON = 300  # characters
BRIEF = 100  # characters of a question in the list


def make_served_app(views: ServedViews, access: Access) -> Starlette:
    """Return the application of the page of a served model."""
    pages = ServedPages(views, access)
    routes = [
        Route("/", pages.roll_back, methods=["POST"]),
        Route("/training", pages.pause, methods=["POST"]),
        Route("/conversations", pages.conversations, methods=["GET"]),
        Route("/conversations", pages.rate, methods=["POST"]),
    ]
    return application(pages, views, access, ("", "training"), routes)


class ServedPages(Pages):
    """The handlers of the addresses. Invariant: nothing here reads files; `ServedViews` does, in its thread."""

    def __init__(self, views: ServedViews, access: Access) -> None:
        """Prepare the handlers of a page."""
        super().__init__(views, access)
        self._views: ServedViews = views
        self._acting = asyncio.Lock()  # a second click finds what the first has done

    async def tab(self, request: Request) -> Response:
        """Return a tab of blocks with its form."""
        return await self._with_form(request, request.url.path.strip("/"))

    async def _with_form(self, request: Request, tab: str, status: int = 200, said: str = "") -> Response:
        try:
            active = await self._views.in_files(self._views.model.active)
        except TROUBLES:  # the tab says so
            active = None
        about = {"active": active.number if active else 0, "parent": active.parent if active else 0}
        more = {"form_key": self._access.form_key, "longest": LONGEST_REASON, "said": printable(said)}
        return await self._tab(request, tab, status, "served.html.j2", **about, **more)

    async def _done(self, request: Request, work: Callable[[], str]) -> Response:
        """Do something through the server, outside of the thread of the files; what is impossible is one message."""
        tab = request.url.path.strip("/")
        async with self._acting:
            try:
                return await self._with_form(request, tab, 200, await asyncio.to_thread(work))
            except TROUBLES as error:
                return await self._with_form(request, tab, 409, f"Not done: {one_line(error)}.")

    async def roll_back(self, request: Request) -> Response:
        """Roll a version back."""
        form = await self._form(request)
        number, reason = form.get("version", ""), form.get("reason", "").strip()
        if not re.fullmatch(r"[1-9][0-9]{0,8}", number):
            raise HTTPException(400, f"version = {number[:40]!r}; expected the number of the active version")
        if not 0 < len(reason) <= LONGEST_REASON:
            raise HTTPException(400, f"the reason has {len(reason)} characters; expected 1 to {LONGEST_REASON}")
        return await self._done(request, lambda: self._views.model.roll_back(int(number), printable(reason)))

    async def pause(self, request: Request) -> Response:
        """Pause or continue training."""
        paused = (await self._form(request)).get("paused", "")
        if paused not in ("yes", "no"):
            raise HTTPException(400, f"paused = {paused[:40]!r}; expected yes or no")
        return await self._done(request, lambda: self._views.model.pause(paused == "yes"))

    # --- conversations ---------------------------------------------------------------------------

    async def conversations(self, request: Request) -> Response:
        """Return the newest conversations with a text."""
        q, before = short_fields(request, ("q",))["q"], position_in(request, "before")
        model = self._views.model
        hits, found = await self._readable(lambda: model.search(q, before, MOST_CONVERSATIONS))
        num, values = await self._readable(lambda: (model.num_conversations(), model.values()))
        older = f"/conversations?{urlencode({'q': q, 'before': hits.before})}" if hits.before else ""
        opened = request.query_params.get("opened", "")
        about: dict[str, Any] = {"q": q, "before": before or "", "num": num, "is_first": before is None, "older": older}
        about |= {"conversations": found, "is_cut": hits.is_cut, "opened": opened, "values": values}
        about |= {"clean": printable, "shortened": shortened, "brief": _brief, "shown_time": shown_time}
        about |= {"shown_reward": shown_reward, "taken_back": TAKEN_BACK}
        about["form_key"] = self._access.form_key
        return await self._page(request, "conversations.html.j2", "conversations", **about)

    async def rate(self, request: Request) -> Response:
        """Rate an answer, or take its rating back."""
        form = await self._form(request)
        name, value, q, before = (form.get(field, "") for field in ("id", "value", "q", "before"))
        values = await self._readable(self._views.model.values)
        if value not in values or not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
            raise HTTPException(400, f"expected the id of a conversation, and a rating: {', '.join(values)}")
        if not await self._readable(lambda: self._views.model.rate(name, value)):
            raise HTTPException(404, f"{name} is no conversation here")
        place = {"before": before} if re.fullmatch(r"[0-9]{1,15}", before) else {}
        return RedirectResponse(f"/conversations?{urlencode({'q': q[:200], **place, 'opened': name})}#{name}", 303)


def _brief(text: Any) -> str:
    """Return the beginning of a text in one line."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= BRIEF else f"{line[:BRIEF]}…"
