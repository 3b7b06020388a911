"""What the tabs of a live page share: addresses, forms, ratings, styles and errors.

    GET  /  /TAB          a tab; 304 if it is still that of the header If-None-Match
    GET  /static/NAME     styles and script

Files are read in one thread, and a tab is rendered again when they have changed. What is malformed is answered with 400
and one line that names what was expected.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from rllib_srl.cli.dashboard.access import Access, Guard
from rllib_srl.cli.episodes import printable
from rllib_srl.cli.report.run_page import shortened
from rllib_srl.envs.agents.web import body_of
from rllib_srl.people.rating_store import RatingsError
from rllib_srl.replay.store import StoreError
from rllib_srl.studies.report.blocks import HERE as REPORT
from rllib_srl.studies.report.blocks import STYLES, Block, Notice, templates_in

T = TypeVar("T")
PAGE = Path(__file__).with_name("page")
BLOCKS = '{% from "blocks.html.j2" import show %}{% for block in blocks %}{{ show(block) }}{% endfor %}'
READ_ONLY = "this page is read-only; start it with --allow-rating"
LONGEST_TEXT = 200  # characters of a field of a form
LARGEST_FORM = 8192  # bytes
SHARE = 0.1  # of the time, at most, for drawing charts and for copying a memory
# Files that cannot be read now; the message says why.
TROUBLES = (StoreError, RatingsError, ValueError, OSError)


class RatedAnswer(NamedTuple):
    """An answer on a page, with its rating."""

    name: str  # its id
    title: str
    small: str
    turns: Sequence[tuple[str, str]]  # role and text
    value: str  # of its rating
    note: str = ""  # about the rating
    mark: str = ""  # a form repeats it, so that another answer with this id is not rated


class Pages(ABC):
    """The tabs of one page and their addresses. Invariant: the thread of the files runs one function at a time."""

    charts: tuple[str, ...] = ()  # tabs that take long to draw

    def __init__(self, title: str, tabs: Mapping[str, str], access: Access, may_rate: bool) -> None:
        """Prepare the templates.

        Args:
            title: of the page.
            tabs: name in the address -> name shown.
            access: who may read it.
            may_rate: whether the page may write.
        """
        self.title, self.tabs, self.may_rate, self._access = title, tabs, may_rate, access
        self._files = ThreadPoolExecutor(1, "files")
        self._kept: dict[str, tuple[str, str]] = {}  # tab -> version and HTML
        self.next_at = 0.0  # when charts may be drawn again
        self._templates = templates_in(PAGE, REPORT)
        self._templates.globals |= {"clean": printable, "shortened": shortened, "form_key": access.form_key}
        own = {name: (PAGE / name).read_bytes() for name in ("dashboard.css", "dashboard.js", "icon.svg")}
        self._static = {"page.css": STYLES.read_bytes(), **own}

    # --- what a page shows ------------------------------------------------------------------------

    @abstractmethod
    def routes(self) -> list[Route]:
        """Return the addresses."""

    @abstractmethod
    def version_of(self, tab: str) -> str:
        """Return a text that changes whenever the blocks of a tab do."""

    @abstractmethod
    def blocks_of(self, tab: str) -> Iterator[Block]:
        """Yield the blocks of a tab."""

    @abstractmethod
    def state(self) -> str:
        """Return how far what is shown is, in words."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""

    # --- the application --------------------------------------------------------------------------

    def application(self) -> Starlette:
        """Return the application, which closes the page at its end."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await self._in_files(self.close)
            self._files.shutdown()

        routes = [*self.routes(), Route("/static/{name}", self.static)]
        handlers: dict[Any, Callable[..., Any]] = {HTTPException: self.refused}
        guard = Middleware(Guard, access=self._access)
        return Starlette(routes=routes, lifespan=lifespan, middleware=[guard], exception_handlers=handlers)

    async def tab(self, request: Request) -> Response:
        """Return a tab of blocks."""
        tab = request.url.path.strip("/")
        html = await self._in_files(lambda: self.html_of(tab))
        return await self._page(request, "blocks_page.html.j2", tab, html=html, is_live=True)

    async def static(self, request: Request) -> Response:
        """Return a style sheet, the script or the icon."""
        kinds = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
        name = request.path_params["name"]
        if name not in self._static:
            raise HTTPException(404, "there is no such file")
        return Response(self._static[name], media_type=kinds[Path(name).suffix])

    async def refused(self, request: Request, error: HTTPException) -> Response:
        """Return the page of an error."""
        html = self.rendered([Notice(f"{error.status_code}", (printable(error.detail),), "warn")])
        page = await self._page(request, "blocks_page.html.j2", "none", error.status_code, html=html, is_live=False)
        page.headers.update(error.headers or {})
        return page

    def html_of(self, tab: str) -> str:
        """Return the HTML of a tab of blocks."""
        begun, kept = time.monotonic(), self._kept.get(tab)
        if kept and tab in self.charts and begun < self.next_at:
            return kept[1]
        try:
            version = self.version_of(tab)
            if kept is None or kept[0] != version:
                self._kept[tab] = kept = version, self.rendered(self.blocks_of(tab))
        except TROUBLES as error:  # the other tabs stay readable
            return self.rendered([Notice("This cannot be read", (one_line(error),), "warn")])
        if tab in self.charts:
            self.next_at = time.monotonic() + (time.monotonic() - begun) / SHARE
        return kept[1]

    def rendered(self, blocks: Iterable[Block]) -> str:
        """Return blocks as HTML."""
        return self._templates.from_string(BLOCKS).render(blocks=list(blocks))

    # --- for the handlers of a page ---------------------------------------------------------------

    async def _in_files(self, work: Callable[[], T]) -> T:
        """Run a function in the thread of the files."""
        return await asyncio.get_running_loop().run_in_executor(self._files, work)

    async def _readable(self, work: Callable[[], T]) -> T:
        """Run a function in the thread of the files; files that cannot be read are one message."""
        try:
            return await self._in_files(work)
        except TROUBLES as error:
            raise HTTPException(409, one_line(error)) from error

    async def _form(self, request: Request) -> dict[str, str]:
        """Return the fields of a form of this page.

        Raises:
            HTTPException: the page is read-only, or the request is not of one of its forms.
        """
        if not self.may_rate:
            raise HTTPException(403, READ_ONLY)
        body = await body_of(request, LARGEST_FORM)
        try:
            form = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=20))
        except ValueError:
            raise HTTPException(400, "expected the fields of a form") from None
        if not self._access.has_form_key(form.get("key", "")):
            raise HTTPException(403, "the key of the form is missing or of an earlier start; load the page again")
        return form

    async def _answers(
        self, request: Request, answers: Sequence[RatedAnswer], values: Sequence[str], older: str, **about: Any
    ) -> Response:
        """Return the page of some answers with their ratings; `older` is the address of those before, "" at the end."""
        about |= {"answers": answers, "values": values, "older": older, "fields": dict(request.query_params)}
        tab = request.url.path.strip("/")
        return await self._page(request, "answers.html.j2", tab, opened=request.query_params.get("opened", ""), **about)

    def _back_to(self, request: Request, form: Mapping[str, str]) -> Response:
        """Return to the answer that a form has rated."""
        place = {"before": form["before"][:LONGEST_TEXT]} if form.get("before") else {}
        query = urlencode({**place, "opened": form["id"]})
        return RedirectResponse(f"{request.url.path}?{query}#{quote(form['id'])}", 303)

    async def _page(self, request: Request, template: str, tab: str, status: int = 200, **values: Any) -> Response:
        def state() -> str:
            try:
                return self.state()
            except TROUBLES as error:
                return f"the files cannot be read: {one_line(error)}"

        about = {"title": self.title, "tabs": self.tabs, "tab": tab, "may_rate": self.may_rate}
        about["state"] = await self._in_files(state)
        html = self._templates.get_template(template).render(**about, **values)
        content = html.encode("utf-8", "replace")  # half of a surrogate pair, which a model may write, becomes "?"
        etag = hashlib.sha256(content).hexdigest()
        if status == 200 and request.headers.get("if-none-match") == etag:
            return Response(status_code=304)
        return Response(content, status, media_type="text/html", headers={"etag": etag})


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())


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
        HTTPException: it is not a number.
    """
    text = request.query_params.get(name, "")
    if not re.fullmatch(r"[0-9]{0,15}", text):
        raise HTTPException(400, f"{name} = {text[:40]!r}; expected a number")
    return int(text) if text else None
