"""The addresses of the live page.

    GET  /  /forgetting  /memory  /rate     a tab               GET /memory/KEY    an item: why it comes back
    GET  /episodes?q=...&iteration=3-5      transcripts         GET /pulse?tab=..  versions of a tab's parts
    GET  /part/NAME                         a part, as HTML     GET /static/NAME   styles and script
    POST /rate  /rate/set                   ratings, by the page's forms

What is malformed is answered with 400 and one line that names what was expected.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from rllib_srl.cli.dashboard.access import Access, Guard, is_of_another_site
from rllib_srl.cli.dashboard.rating_desk import ACTIONS, Card
from rllib_srl.cli.dashboard.sections import SECTIONS, TABS, shown_id
from rllib_srl.cli.dashboard.transcripts import Hits, Wanted
from rllib_srl.cli.dashboard.views import PAGE, TROUBLES, Views
from rllib_srl.cli.episodes import iterations_in, printable, rewards_in
from rllib_srl.cli.people.rate import LISTED
from rllib_srl.cli.report.run_page import shortened
from rllib_srl.people.rating import VALUES
from rllib_srl.studies.report.blocks import STYLES, Notice
from rllib_srl.studies.report.charts import COLOURS, DASHES

MOST_EPISODES = 20  # on a page
LONGEST_TEXT = 200  # characters of a field of a form
LARGEST_FORM = 8192  # bytes
FILTERS = ("q", "iteration", "reward", "stop", "env")
READ_ONLY = "this page is read-only; start it with --allow-rating, or srl rate RUN --web"


def make_app(views: Views, access: Access) -> Starlette:
    """Return the application of a run's page."""
    pages = Pages(views, access)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await views.close()

    routes = [
        *(Route(f"/{name}", pages.tab) for name in TABS if name not in ("episodes", "rate")),
        Route("/memory/{key}", pages.item),
        Route("/episodes", pages.episodes),
        Route("/rate", pages.rate, methods=["GET", "POST"]),
        Route("/rate/set", pages.change, methods=["POST"]),
        Route("/part/{name}", pages.part),
        Route("/pulse", pages.pulse),
        Route("/static/{name}", pages.static),
    ]
    handlers: dict[Any, Callable[..., Any]] = {HTTPException: pages.refused}
    return Starlette(
        routes=routes, lifespan=lifespan, middleware=[Middleware(Guard, access=access)], exception_handlers=handlers
    )


class Pages:
    """The handlers of the addresses. Invariant: nothing here reads files; `Views` does, in its threads."""

    def __init__(self, views: Views, access: Access) -> None:
        """Prepare the handlers of a page."""
        self._views, self._access = views, access
        styles = {"page.css": STYLES.read_bytes(), "dashboard.css": (PAGE / "dashboard.css").read_bytes()}
        self._static = {name: (text, "text/css") for name, text in styles.items()}
        self._static["lines.css"] = (line_styles().encode(), "text/css")
        self._static["icon.svg"] = ((PAGE / "icon.svg").read_bytes(), "image/svg+xml")
        self._static["dashboard.js"] = ((PAGE / "dashboard.js").read_bytes(), "text/javascript")

    # --- tabs ------------------------------------------------------------------------------------

    async def tab(self, request: Request) -> Response:
        """Return a tab of sections."""
        tab = request.url.path.strip("/")
        chosen = [one for one in SECTIONS if one.tab == tab]
        parts = [(one, *await self._views.part(one)) for one in chosen]
        return await self._page("sections.html.j2", tab, parts=parts)

    async def item(self, request: Request) -> Response:
        """Return the page of an item of the memory."""
        key = request.path_params["key"]
        found = await self._readable(lambda: self._views.item(key)) if re.fullmatch(r"[0-9a-f]{16}", key) else None
        if found is None:
            raise HTTPException(404, "no item of the memory has this key; it may have been evicted")
        return await self._page("item.html.j2", "memory", name=printable(found[0]), html=found[1])

    async def part(self, request: Request) -> Response:
        """Return the HTML of one section."""
        section = next((one for one in SECTIONS if one.name == request.path_params["name"]), None)
        if section is None:
            raise HTTPException(404, "there is no such part")
        version, html = await self._views.part(section)
        return Response(_encoded(html), media_type="text/html", headers={"x-version": version})

    async def pulse(self, request: Request) -> Response:
        """Return the state of the run, and the versions of the sections of a tab."""
        tab = request.query_params.get("tab", "")
        if tab not in TABS:
            raise HTTPException(400, f"tab = {tab[:40]!r}; expected one of {', '.join(filter(None, TABS))}, or nothing")
        state = await self._views.state()
        num = len(self._views.sources.run.transcripts)
        versions = {"episodes": str(num)} if tab == "episodes" else await self._views.versions(tab)
        return JSONResponse({"state": state, "versions": versions})

    async def static(self, request: Request) -> Response:
        """Return a style sheet or the script."""
        found = self._static.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404, "there is no such file")
        return Response(found[0], media_type=found[1])

    # --- episodes --------------------------------------------------------------------------------

    async def episodes(self, request: Request) -> Response:
        """Return the newest transcripts that fit the filters."""
        given = {name: request.query_params.get(name, "").strip() for name in FILTERS}
        for name, value in given.items():
            if len(value) > LONGEST_TEXT:
                raise HTTPException(400, f"{name} has {len(value)} characters; expected at most {LONGEST_TEXT}")
        before = request.query_params.get("before", "")
        if not re.fullmatch(r"[0-9]{0,15}", before):
            raise HTTPException(400, f"before = {before[:40]!r}; expected a number")
        wanted = _wanted(given)
        transcripts = self._views.sources.run.transcripts

        def look() -> tuple[Hits, tuple[list[str], list[str]], int, int | None]:
            self._views.sources.run.refresh()
            hits = transcripts.search(wanted, int(before) if before else None, MOST_EPISODES)
            reached = transcripts.iteration_of(hits.before) if hits.before else None
            return hits, transcripts.choices(), len(transcripts), reached

        hits, choices, num, reached = await self._readable(look, self._views.in_files)
        asked = {name: value for name, value in given.items() if value}
        older = f"/episodes?{urlencode({**asked, 'before': hits.before})}" if hits.before else ""
        about: dict[str, Any] = {"given": given, "stops": choices[0], "envs": choices[1], "num": num}
        about |= {"reached": reached, "is_first": not before, "is_cut": hits.is_cut, "older": older, "clean": printable}
        about |= {"shortened": shortened, "shown_id": shown_id, "episodes": [one for _, one in hits.episodes]}
        return await self._page("episodes.html.j2", "episodes", **about)

    # --- ratings ---------------------------------------------------------------------------------

    async def rate(self, request: Request) -> Response:
        """Show a sitting, or take a reply of one."""
        desk = self._views.desk
        if request.method == "POST":
            form = await self._form(request)
            if form.get("action") not in ACTIONS:
                raise HTTPException(400, f"action = {form.get('action', '')[:40]!r}; expected {', '.join(ACTIONS)}")
            names = (form.get("sitting", ""), form.get("shown", ""), form["action"])
            card: Card = await self._readable(lambda: desk.reply(*names))
            return await self._rate_page(card, 409 if card.is_stale else 200)
        sitting = request.query_params.get("sitting", "")
        if not re.fullmatch(r"[A-Za-z0-9_-]{0,40}", sitting):
            raise HTTPException(400, f"sitting = {sitting[:40]!r}; expected the one of the page")
        if not desk.may_rate or not self._views.sources.memory.exists:
            return await self._rate_page(None)
        return await self._rate_page(await self._readable(lambda: desk.card(sitting)))

    async def change(self, request: Request) -> Response:
        """Change or take back the rating of an answer by its id."""
        form = await self._form(request)
        answer_id, value = form.get("id", ""), form.get("value", "")
        if value not in VALUES or not re.fullmatch(r"[^\s/]{1,100}/[0-9]{1,9}", answer_id):
            raise HTTPException(400, "expected the id of an answer, such as 12.3/0, and a rating")
        await self._readable(lambda: self._views.desk.change(answer_id, value))
        sitting = form.get("sitting", "")
        query = urlencode({"sitting": sitting}) if re.fullmatch(r"[A-Za-z0-9_-]{1,40}", sitting) else ""
        return RedirectResponse(f"/rate?{query}#rated", 303)

    async def _rate_page(self, card: Card | None, status: int = 200) -> Response:
        has_memory = self._views.sources.memory.exists
        rows = await self._readable(self._views.desk.listed) if has_memory else []
        prompt, answer = (card.answer.prompt, card.answer.answer) if card and card.answer else ("", "")
        about = {"card": card, "rows": rows, "header": LISTED, "values": VALUES, "has_memory": has_memory}
        texts = {"prompt": shortened(prompt), "answer": shortened(answer), "form_key": self._access.form_key}
        return await self._page("rate.html.j2", "rate", status, clean=printable, **about, **texts)

    async def _form(self, request: Request) -> dict[str, str]:
        """Return the fields of a form of this page.

        Raises:
            HTTPException: the page is read-only, or the request is not of one of its own forms.
        """
        if not self._views.desk.may_rate:
            raise HTTPException(403, READ_ONLY)
        if is_of_another_site(request.headers):
            raise HTTPException(403, "this request comes from the page of another site")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > LARGEST_FORM:
                raise HTTPException(413, f"a form has at most {LARGEST_FORM} bytes")
        try:
            form = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=20))
        except ValueError:
            raise HTTPException(400, "expected the fields of a form") from None
        if not self._access.has_form_key(form.get("key", "")):
            raise HTTPException(403, "the key of the form is missing or of an earlier start; load the page again")
        return form

    # --- answers ---------------------------------------------------------------------------------

    async def _readable(self, work: Callable[[], Any], run_in: Callable[..., Any] | None = None) -> Any:
        """Run a function in the memory's thread, or another; files that cannot be read are one message."""
        try:
            return await (run_in or self._views.in_memory)(work)
        except TROUBLES as error:
            raise HTTPException(409, " ".join(str(error).split())) from error

    async def refused(self, request: Request, error: HTTPException) -> Response:
        """Return the page of an error."""
        html = self._views.blocks([Notice(f"{error.status_code}", (printable(error.detail),), "warn")])
        page = await self._page("item.html.j2", "none", error.status_code, name="", html=html)
        page.headers.update(error.headers or {})
        return page

    async def _page(self, template: str, tab: str, status: int = 200, **values: Any) -> Response:
        state = await self._views.state()
        return Response(_encoded(self._views.render(template, tab, state, **values)), status, media_type="text/html")


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


def line_styles() -> str:
    """Return the colours and dashes of the charts' lines, those of a report, as styles."""
    rules = []
    for number, (colour, dash) in enumerate(zip(COLOURS, DASHES, strict=True)):
        dashes = " ".join(f"{2 * length:g}" for length in dash[1]) if isinstance(dash, tuple) else "none"
        rules.append(f".s{number} {{ --line-colour: {colour}; stroke-dasharray: {dashes}; }}\n")
    return "".join(rules)


def _encoded(html: str) -> bytes:
    """Return a page as bytes; half of a surrogate pair, which a model may write, becomes a question mark."""
    return html.encode("utf-8", "replace")
