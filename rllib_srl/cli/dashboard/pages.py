"""What the live pages of a run and of a served model share: tabs, forms, styles and errors.

    GET  /  /TAB          a tab; 304 if it is still that of the header If-None-Match
    GET  /static/NAME     styles and script

What is malformed is answered with 400 and one line that names what was expected.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rllib_srl.cli.dashboard.access import Access, Guard, is_of_another_site
from rllib_srl.cli.dashboard.page_views import PAGE, TROUBLES, PageViews, one_line
from rllib_srl.cli.episodes import printable
from rllib_srl.envs.agents.web import body_of
from rllib_srl.studies.report.blocks import STYLES, Notice

T = TypeVar("T")
LONGEST_TEXT = 200  # characters of a field of a form
LARGEST_FORM = 8192  # bytes


def application(
    pages: Pages, views: PageViews, access: Access, tabs: Sequence[str], more: Sequence[Route]
) -> Starlette:
    """Return the application of a page.

    Args:
        pages: its handlers.
        views: its tabs; closed at the end.
        access: who may read it.
        tabs: that consist of blocks.
        more: its own addresses.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await views.end()

    routes = [
        *(Route(f"/{name}", pages.tab) for name in tabs),
        *more,
        Route("/static/{name}", pages.static),
    ]
    handlers: dict[Any, Callable[..., Any]] = {HTTPException: pages.refused}
    return Starlette(
        routes=routes, lifespan=lifespan, middleware=[Middleware(Guard, access=access)], exception_handlers=handlers
    )


class Pages:
    """The handlers that all pages have."""

    read_only = "this page is read-only; start it with --allow-rating"

    def __init__(self, views: PageViews, access: Access) -> None:
        """Prepare the handlers of a page."""
        self._views, self._access = views, access
        styles = {"page.css": STYLES.read_bytes(), "dashboard.css": (PAGE / "dashboard.css").read_bytes()}
        self._static = {name: (text, "text/css") for name, text in styles.items()}
        self._static["icon.svg"] = ((PAGE / "icon.svg").read_bytes(), "image/svg+xml")
        self._static["dashboard.js"] = ((PAGE / "dashboard.js").read_bytes(), "text/javascript")

    async def tab(self, request: Request) -> Response:
        """Return a tab of blocks."""
        return await self._tab(request, request.url.path.strip("/"))

    async def _tab(
        self, request: Request, tab: str, status: int = 200, template: str = "blocks_page.html.j2", **values: Any
    ) -> Response:
        html = await self._views.in_files(lambda: self._views.html_of(tab))
        return await self._page(request, template, tab, status, html=html, is_live=True, **values)

    async def static(self, request: Request) -> Response:
        """Return a style sheet or the script."""
        found = self._static.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404, "there is no such file")
        return Response(found[0], media_type=found[1])

    # --- for the handlers of a page ----------------------------------------------------------------

    async def _form(self, request: Request) -> dict[str, str]:
        """Return the fields of a form of this page.

        Raises:
            HTTPException: the page is read-only, or the request is not of one of its own forms.
        """
        if not self._views.may_rate:
            raise HTTPException(403, self.read_only)
        if is_of_another_site(request.headers):
            raise HTTPException(403, "this request comes from the page of another site")
        body = await body_of(request, LARGEST_FORM)
        try:
            form = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=20))
        except ValueError:
            raise HTTPException(400, "expected the fields of a form") from None
        if not self._access.has_form_key(form.get("key", "")):
            raise HTTPException(403, "the key of the form is missing or of an earlier start; load the page again")
        return form

    async def refused(self, request: Request, error: HTTPException) -> Response:
        """Return the page of an error."""
        html = self._views.rendered([Notice(f"{error.status_code}", (printable(error.detail),), "warn")])
        page = await self._page(request, "blocks_page.html.j2", "none", error.status_code, html=html, is_live=False)
        page.headers.update(error.headers or {})
        return page

    async def _readable(self, work: Callable[[], T]) -> T:
        """Run a function in the thread of the files; files that cannot be read are one message."""
        try:
            return await self._views.in_files(work)
        except TROUBLES as error:
            raise HTTPException(409, one_line(error)) from error

    async def _page(self, request: Request, template: str, tab: str, status: int = 200, **values: Any) -> Response:
        html = await self._views.page(template, tab, **values)
        content = html.encode("utf-8", "replace")  # half of a surrogate pair, which a model may write, becomes "?"
        etag = hashlib.sha256(content).hexdigest()
        if status == 200 and request.headers.get("if-none-match") == etag:
            return Response(status_code=304)
        return Response(content, status, media_type="text/html", headers={"etag": etag})


def short_fields(request: Request, names: Sequence[str]) -> dict[str, str]:
    """Return fields of the address.

    Raises:
        HTTPException: one is too long.
    """
    given = {name: request.query_params.get(name, "").strip() for name in names}
    for name, value in given.items():
        if len(value) > LONGEST_TEXT:
            raise HTTPException(400, f"{name} has {len(value)} characters; expected at most {LONGEST_TEXT}")
    return given


def position_in(request: Request, name: str) -> int | None:
    """Return where a search goes on, None without such a field.

    Raises:
        HTTPException: it is no number.
    """
    text = request.query_params.get(name, "")
    if not re.fullmatch(r"[0-9]{0,15}", text):
        raise HTTPException(400, f"{name} = {text[:40]!r}; expected a number")
    return int(text) if text else None
