"""The HTTP interface of a served model: answers, ratings, versions, and its page. It listens on the loopback.

    GET  /                                      the page, which uses the addresses below (page/)
    POST /v1/chat/completions                   OpenAI's, plain and streaming; the gateway chooses the version
    GET  /v1/models
    GET  /v1/conversations?q=TEXT&before=N      the newest ones with a text, each with its rating
    GET  /v1/conversations/ID                   a conversation with its rating
    PUT  /v1/conversations/ID/rating            {"rating": "good" | "bad" | 1 to 5 | "none", "rater": "ann"}
    GET  /v1/versions                           the lineage
    POST /v1/rollback                           {"reason": "...", "version": 3}; only while that version is active
    POST /v1/training                           {"paused": true | false}
    GET  /v1/status
    GET  /v1/figures                            latency, speed, ratings, versions (figures.py); /metrics for Prometheus

A conversation is on disk before its answer is complete for the client, a rating before it is acknowledged. One token
opens everything: as a bearer token, or in the cookie that the address of the page sets (cli/shared/access.py).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from rllib_srl.cli.serving.figures import Meter, prometheus_text, stored_figures
from rllib_srl.cli.serving.job import FileError
from rllib_srl.cli.serving.serving import NotReady, Serving
from rllib_srl.cli.serving.training import Training
from rllib_srl.cli.serving.translation import Collected, SamplingDefaults, ServedRequest, events_of, forwarded
from rllib_srl.cli.serving.vllm_server import ServerError
from rllib_srl.cli.shared.access import Access, Guard
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.envs.agents import web
from rllib_srl.envs.agents.requests import RequestError, fields_of, read_object, read_request
from rllib_srl.envs.agents.responses import event
from rllib_srl.envs.agents.web import Refusal, body_of
from rllib_srl.people.rating import SCHEMES, TAKEN_BACK, check_value
from rllib_srl.people.rating_store import RatingsError, utc_now
from rllib_srl.people.served_store import Conversation, LineageError, StoreThread
from rllib_srl.storage.disk import DiskFull

MAX_UNDER_WAY = 64  # answers at the same time; further requests get 429
MAX_NAME = 100  # characters of a rater's name
MOST_FOUND = 20  # conversations at once
PAGE = Path(__file__).with_name("page")
PAGE_FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
NO_TOKEN = (
    "expected the header 'Authorization: Bearer TOKEN' with the token of this server, or in a browser the address that "
    "srl serve printed"
)
CUT = "the answer was cut off"
END = b"data: [DONE]\n\n"
_REFUSALS: Mapping[type[Exception], tuple[int, str]] = {
    RatingsError: (503, "not_stored"),
    **dict.fromkeys((LineageError, FileError, WeightSyncError), (409, "not_possible")),
    NotReady: (503, "not_ready"),
    DiskFull: (507, "disk_full"),
    ServerError: (502, "engine_failed"),
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RatingBody(_Body):
    rating: str | int | None  # None takes one back
    rater: str = Field("", max_length=MAX_NAME)


class RollbackBody(_Body):
    reason: str = Field("", max_length=1000)
    version: int | None = None  # refused if another one is active


class PauseBody(_Body):
    paused: bool


class SearchQuery(BaseModel):
    q: str = Field("", max_length=200)
    before: int | None = Field(None, ge=0, lt=10**15)  # where an earlier search ended


class Gateway:
    """The application. Invariant: without the token there is nothing to read but 401."""

    def __init__(
        self, access: Access, name: str, serving: Serving, db: StoreThread, training: Training, usual: SamplingDefaults
    ) -> None:
        """Serve with the parts of `srl serve`; `name` is that of the served model."""
        self._name, self._serving, self._db, self._training, self._usual = name, serving, db, training, usual
        self._meter = Meter()
        self._doing: set[asyncio.Task[Any]] = set()  # rollbacks; the event loop alone would not keep them
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", lambda _: JSONResponse(web.MODELS), methods=["GET"]),
            Route("/v1/conversations", self._conversations, methods=["GET"]),
            Route("/v1/conversations/{id}", self._conversation, methods=["GET"]),
            Route("/v1/conversations/{id}/rating", self._rate, methods=["PUT"]),
            Route("/v1/versions", self._versions, methods=["GET"]),
            Route("/v1/rollback", self._roll_back, methods=["POST"]),
            Route("/v1/training", self._pause, methods=["POST"]),
            Route("/v1/status", self._status, methods=["GET"]),
            Route("/v1/figures", self._figures, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            *(Route(path, partial(_file, PAGE / file), methods=["GET"]) for path, file in PAGE_FILES.items()),
        ]
        refusals = {RequestError: web.refused_request} | {kind: _refusal_by(*form) for kind, form in _REFUSALS.items()}
        guard = Middleware(Guard, access=access, refusal=_refused, no_token=NO_TOKEN)
        self.app = web.application(routes, [guard], refusals)

    # --- answers -----------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        asked = read_request(await body_of(request), ServedRequest)
        if self._serving.num_under_way >= MAX_UNDER_WAY:
            raise Refusal(429, "too_many_calls", f"{MAX_UNDER_WAY} answers are already being written; try again later")
        if asked.stream:
            headers: dict[str, str] = {}
            return web.Stream(self._pieces(asked, headers), headers=headers)
        with self._serving.answering() as (number, name):
            body, why_not = forwarded(asked, self._usual, name)
            reply, answer_headers = await self._whole(Collected(_new_id(), number, asked), body, why_not)
            return JSONResponse(reply, headers=answer_headers)

    async def _whole(
        self, answer: Collected, body: Mapping[str, Any], why_not: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return a complete answer and its headers, once it is logged."""
        reply = answer.take(await self._serving.server.chat(body))
        stored = await self._log(answer, why_not)
        return reply, self._headers(answer) | _trained(stored.untrainable)

    async def _pieces(self, asked: ServedRequest, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
        """Yield pieces as they come; the last one only after the conversation was logged."""
        with_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        with self._serving.answering() as (number, name):
            body, why_not = forwarded(asked, self._usual, name)
            answer = Collected(_new_id(), number, asked)
            if asked.may_call:
                reply, answer_headers = await self._whole(answer, body, why_not)
                headers |= answer_headers
                yield b"".join([*events_of(reply, with_usage), END])
                return
            headers |= self._headers(answer) | (_trained(why_not) if why_not else {})
            held, is_begun = [], False
            try:
                async with aclosing(self._serving.server.chat_events(body)) as values:
                    async for value in values:
                        piece = answer.take(value)
                        if piece["choices"] or with_usage:
                            held.append(event(piece))
                        if held and not answer.finish_reason:
                            is_begun = True
                            yield b"".join(held)
                            held.clear()
                if not answer.finish_reason:
                    raise ServerError("the engine failed in mid-answer: it ended without a reason")
                last = [*held, END]
            except (GeneratorExit, asyncio.CancelledError):  # the client went away
                await asyncio.shield(self._log(answer, CUT))
                raise
            except ServerError as error:
                if not is_begun:
                    raise
                why_not, last = CUT, [event(web.error_body(502, str(error), "engine_failed"))]
            try:
                await self._log(answer, why_not)
            except (DiskFull, RatingsError) as error:
                last = [event(web.error_body(507, str(error), "not_stored"))]
            yield b"".join(last)

    def _headers(self, answer: Collected) -> dict[str, str]:
        is_ignored = answer.asked.seed is not None and not self._usual.can_seed
        ignored = {"X-SRL-Ignored": "seed; vLLM cannot seed single requests on a CPU"} if is_ignored else {}
        return {"X-SRL-Version": str(answer.version), "X-SRL-Conversation": answer.conversation_id, **ignored}

    async def _log(self, answer: Collected, why_not: str) -> Conversation:
        tokens, why = answer.tokens(why_not)
        messages, reason = answer.asked.sent_messages(), answer.finish_reason if why_not != CUT else "cut"
        about = (answer.conversation_id, answer.version, utc_now(), messages, answer.text, reason or "cut", tokens, why)
        stored = await self._db.run(self._db.store.log, Conversation(*about))
        if why_not != CUT:
            self._serving.num_restarts = 0
            self._meter.note(time.monotonic() - answer.begun, len(answer.ids))
        return stored

    # --- ratings -----------------------------------------------------------------------------------

    async def _conversation_of(self, request: Request) -> Conversation:
        name = request.path_params["id"]
        conversation = await self._db.run(self._db.store.find, name)
        if conversation is None:
            raise Refusal(404, "not_found", f"id = {name[:MAX_NAME]!r} is not a conversation of this server")
        return conversation

    async def _conversation(self, request: Request) -> Response:
        conversation = await self._conversation_of(request)
        return JSONResponse(await self._db.run(self._shown, conversation))

    async def _conversations(self, request: Request) -> Response:
        query = fields_of(request.query_params, SearchQuery)
        conversations, before = await self._db.run(self._db.store.search, query.q, query.before, MOST_FOUND)
        rows = [await self._db.run(self._shown, conversation) for conversation in conversations]
        return JSONResponse({"conversations": rows, "before": before})

    def _shown(self, conversation: Conversation) -> dict[str, Any]:
        """Return a conversation without its tokens, with its rating."""
        facts = vars(replace(conversation, tokens=None))
        rating = self._db.store.rating_of(conversation.as_answer())
        if rating is None:
            return {**facts, "rating": TAKEN_BACK, "reward": None, "rater": ""}
        return {**facts, "rating": rating.value, "reward": rating.reward, "rater": rating.rater}

    async def _rate(self, request: Request) -> Response:
        body = fields_of(read_object(await body_of(request)), RatingBody)
        conversation, store = await self._conversation_of(request), self._db.store
        value = TAKEN_BACK if body.rating is None else str(body.rating)
        try:
            check_value(value, store.scheme)
        except ValueError as error:
            raise RequestError(str(error)[:500], "rating") from None

        def rate() -> dict[str, Any]:
            is_new = store.rate(conversation.as_answer(), value, body.rater)
            return {**self._shown(conversation), "is_changed": is_new, "is_trained_on": not conversation.untrainable}

        return JSONResponse(await self._db.run(rate))

    # --- versions ----------------------------------------------------------------------------------

    async def _versions(self, request: Request) -> Response:
        return JSONResponse({"active": self._serving.number, "versions": await self._db.run(self._db.store.rows)})

    async def _roll_back(self, request: Request) -> Response:
        body = fields_of(read_object(await body_of(request)), RollbackBody)
        doing = asyncio.create_task(self._serving.roll_back(body.reason or "rolled back by hand", body.version))
        self._doing.add(doing)
        doing.add_done_callback(self._doing.discard)
        return JSONResponse(await asyncio.shield(doing))  # it is done to its end if the client goes away

    async def _pause(self, request: Request) -> Response:
        self._training.pause(fields_of(read_object(await body_of(request)), PauseBody).paused)
        return JSONResponse({"is_paused": self._training.is_paused})

    async def _status(self, request: Request) -> Response:
        store = self._db.store
        facts = {"name": self._name, "is_ready": self._serving.is_ready, "active": self._serving.number}
        facts |= {"num_changes": await self._db.run(lambda: store.num_changes)}  # of conversations, ratings, versions
        facts |= {"rating_values": SCHEMES[store.scheme].values, "training": await self._training.status()}
        return JSONResponse(facts)

    async def _figures(self, request: Request) -> Response:
        return JSONResponse(await self._measured())

    async def _metrics(self, request: Request) -> Response:
        return Response(prometheus_text(await self._measured()), media_type=CONTENT_TYPE_LATEST)

    async def _measured(self) -> dict[str, Any]:
        return {"answers": self._meter.figures(), **await self._db.run(stored_figures, self._db.store)}


async def _file(path: Path, _: Request) -> Response:
    return FileResponse(path)


def _refused(status: int, reason: str) -> Response:
    return web.failed(Refusal(status, "invalid_api_key" if status == 401 else "other_site", reason))


def _trained(untrainable: str) -> dict[str, str]:
    """Return the header that says whether an answer can be trained on."""
    reason = " ".join(untrainable.split()).encode("ascii", "replace").decode()
    return {"X-SRL-Trained": f"no; reason={reason}" if reason else "yes"}


def _new_id() -> str:
    return f"chatcmpl-{secrets.token_hex(12)}"


def _refusal_by(status: int, code: str) -> Callable[[Exception], Refusal]:
    return lambda error: Refusal(status, code, str(error))
