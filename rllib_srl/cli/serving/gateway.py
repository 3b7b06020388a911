"""The HTTP interface of a served model: answers, ratings, versions. One token opens it; it listens on the loopback.

    POST /v1/chat/completions                   OpenAI's, plain and streaming; the gateway chooses the version
    GET  /v1/models
    GET  /v1/conversations/ID                   a conversation with its rating
    PUT  /v1/conversations/ID/rating            {"rating": "good" | "bad" | 1 to 5 | "none", "rater": "ann"}
    GET  /v1/versions                           the lineage
    POST /v1/rollback                           {"reason": "...", "version": 3}; only while that version is active
    POST /v1/training                           {"paused": true | false}
    GET  /v1/status

A conversation is on disk before its answer is complete for the client, a rating before it is acknowledged.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import aiohttp
from aiohttp import web

from rllib_srl.cli.serving.adapter import AdapterError
from rllib_srl.cli.serving.place import MOST_NAMED, Stores
from rllib_srl.cli.serving.relay import Collected, Sampling, event, events_of, forwarded
from rllib_srl.cli.serving.serving import NotReady, Serving
from rllib_srl.cli.serving.training import Training
from rllib_srl.cli.serving.vllm_server import ServerError
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.envs.agents.endpoint import (
    MAX_BODY_BYTES,
    MODEL,
    WRITE_TIMEOUT_S,
    Refusal,
    as_json,
    body_of,
    digest_of,
    failed,
    hush_malformed_requests,
)
from rllib_srl.envs.agents.requests import ChatRequest, RequestError, read_object, read_request
from rllib_srl.envs.agents.responses import error_body
from rllib_srl.people.lineage.conversations import Conversation, ConversationsError
from rllib_srl.people.lineage.versions import LineageError
from rllib_srl.people.rating import EXPECTED, TAKEN_BACK, check_value
from rllib_srl.people.rating_store import RatingsError
from rllib_srl.storage.disk import DiskFull

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 900.0
PIECE_TIMEOUT_S = 300.0  # between two pieces of an answer
MAX_UNDER_WAY = 64  # answers at the same time; further requests get 429
MAX_NAME = 100  # characters of a rater's name
MAX_REASON = 1000  # characters
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CUT = "the answer was cut off"


class UnknownConversation(Exception):
    """There is no conversation with this id."""


class Gateway:
    """The application. Invariant: without the token there is nothing to read but 401."""

    def __init__(self, token: str, serving: Serving, stores: Stores, training: Training, usual: Sampling) -> None:
        """Serve with the parts of `srl serve`."""
        self._token, self._serving, self._stores = digest_of(token), serving, stores
        self._training, self._usual = training, usual
        self._doing: set[asyncio.Task[Any]] = set()  # rollbacks; the event loop alone would not keep them
        hush_malformed_requests()
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[as_json, self._guarded])
        self.app.router.add_post("/v1/chat/completions", self._chat)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/v1/conversations/{id}", self._conversation)
        self.app.router.add_put("/v1/conversations/{id}/rating", self._rate)
        self.app.router.add_get("/v1/versions", self._versions)
        self.app.router.add_post("/v1/rollback", self._roll_back)
        self.app.router.add_post("/v1/training", self._pause)
        self.app.router.add_get("/v1/status", self._status)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Check the token, and turn errors into replies as OpenAI's server writes them."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        is_ours = hmac.compare_digest(digest_of(token.strip()), self._token)
        if scheme.lower() != "bearer" or not is_ours:
            expected = "expected the header 'Authorization: Bearer TOKEN' with the token of this server"
            return failed(Refusal(401, "invalid_api_key", expected))
        try:
            return await handler(request)
        except RequestError as error:
            return failed(Refusal(400, "invalid_request", str(error)), error.param)
        except UnknownConversation as error:
            return failed(Refusal(404, "not_found", str(error)))
        except NotReady as error:
            return failed(Refusal(503, "not_ready", str(error)))
        except DiskFull as error:
            return failed(Refusal(507, "disk_full", str(error)))
        except (ConversationsError, RatingsError) as error:
            return failed(Refusal(503, "not_stored", str(error)))
        except (LineageError, AdapterError, WeightSyncError) as error:
            return failed(Refusal(409, "not_possible", str(error)))
        except ServerError as error:
            return failed(Refusal(502, "engine_failed", str(error)))

    # --- answers -----------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        listed = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rllib_srl"}
        return web.json_response({"object": "list", "data": [listed]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = read_request(await body_of(request))
        if self._serving.num_under_way >= MAX_UNDER_WAY:
            return failed(Refusal(429, "too_many_calls", f"{MAX_UNDER_WAY} answers are under way already"))
        with self._serving.answering() as (number, name):
            body, why_not = forwarded(asked, self._usual, name)
            answer = Collected(f"chatcmpl-{secrets.token_hex(12)}", number)
            limits = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_read=PIECE_TIMEOUT_S)
            try:
                async with self._serving.server.session.post(
                    "/v1/chat/completions", json=body, timeout=limits
                ) as upstream:
                    if upstream.status != 200:
                        return _refused_by_engine(upstream.status, await upstream.text())
                    relay = self._stream if asked.stream else self._whole
                    return await relay(request, upstream, answer, asked, why_not)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                reason = f"the engine failed in mid-answer ({type(error).__name__}); try again in a minute"
                return failed(Refusal(502, "engine_failed", reason))

    async def _whole(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        answer: Collected,
        asked: ChatRequest,
        why_not: str,
    ) -> web.StreamResponse:
        reply = answer.take(await upstream.json())
        await self._log(answer, asked, why_not)
        return web.json_response(reply, headers=_headers(answer))

    async def _stream(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        answer: Collected,
        asked: ChatRequest,
        why_not: str,
    ) -> web.StreamResponse:
        """Pass on pieces as they come; the last one only after the conversation was logged."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **_headers(answer)}
        )
        with_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        held: list[bytes] = []
        try:
            await response.prepare(request)
            async for line in upstream.content:
                value = events_of(line)
                if value is None:
                    continue
                if "error" in value:
                    raise ServerError(str(value["error"].get("message", "no message")))
                piece = answer.take(value)
                if piece["choices"] or with_usage:
                    held.append(event(piece))
                if not answer.finish_reason:
                    await _write(request, response, held)
                    held.clear()
            if not answer.finish_reason:
                raise ServerError("the answer ended without a reason")
            last = [*held, b"data: [DONE]\n\n"]
        except (ConnectionResetError, asyncio.CancelledError):  # the client went away
            await asyncio.shield(self._log(answer, asked, CUT))
            raise
        except (aiohttp.ClientError, TimeoutError, ValueError, ServerError) as error:
            reason = f"the engine failed in mid-answer: {' '.join(str(error).split()) or type(error).__name__}"
            why_not, last = CUT, [event(error_body(502, reason, "engine_failed"))]
        try:
            await self._log(answer, asked, why_not)
        except (DiskFull, ConversationsError) as error:
            last = [event(error_body(507, str(error), "not_stored"))]
        await _write(request, response, last)
        await response.write_eof()
        return response

    async def _log(self, answer: Collected, asked: ChatRequest, why_not: str) -> None:
        tokens, why = answer.tokens(why_not)
        messages = [{"role": one["role"], "content": one.get("content") or ""} for one in asked.plain_messages()]
        at = datetime.now(UTC).isoformat(timespec="seconds")
        reason = answer.finish_reason if why_not != CUT else "cut"
        about = (answer.conversation_id, answer.version, at, messages, answer.text, reason or "cut", tokens, why)
        await self._stores.run(self._stores.conversations.log, Conversation(*about))
        if why_not != CUT:
            self._serving.num_restarts = 0

    # --- ratings -----------------------------------------------------------------------------------

    async def _found(self, request: web.Request) -> Conversation:
        name = request.match_info["id"]
        found = await self._stores.run(self._stores.conversations.find, name)
        if found is None:
            raise UnknownConversation(f"id = {name[:MAX_NAME]!r} is no conversation here")
        return found

    async def _conversation(self, request: web.Request) -> web.StreamResponse:
        found = await self._found(request)
        value = await self._stores.run(self._stores.ratings.value_of, found.as_answer())
        return web.json_response({**vars(replace(found, tokens=None)), "rating": value})

    async def _rate(self, request: web.Request) -> web.StreamResponse:
        value, rater = rating_of(read_object(await body_of(request)))
        found = await self._found(request)
        answer = found.as_answer()
        is_new = await self._stores.run(self._stores.ratings.rate, answer, value, rater)
        stale = await self._stores.run(self._stores.stale_versions) if is_new else {}
        facts = {"id": found.id, "rating": value, "is_changed": is_new, "is_trained_on": not found.untrainable}
        return web.json_response({**facts, "stale_versions": sorted(stale)})

    # --- versions ----------------------------------------------------------------------------------

    async def _versions(self, request: web.Request) -> web.StreamResponse:
        stale = await self._stores.run(self._stores.stale_versions)
        listed = await self._stores.run(self._stores.lineage.all)
        rows = [{**vars(one), "num_stale_ratings": stale.get(one.number, 0)} for one in listed]
        return web.json_response({"active": self._serving.number, "versions": rows})

    async def _roll_back(self, request: web.Request) -> web.StreamResponse:
        body = read_object(await body_of(request))
        reason, number = body.get("reason", ""), body.get("version")
        is_number = number is None or (isinstance(number, int) and not isinstance(number, bool))
        if not isinstance(reason, str) or not is_number or set(body) - {"reason", "version"}:
            raise RequestError('the body is another object; expected {"reason": "...", "version": NUMBER}')
        doing = asyncio.create_task(self._rolled_back(reason[:MAX_REASON] or "rolled back by hand", number))
        self._doing.add(doing)
        doing.add_done_callback(self._doing.discard)
        return web.json_response(await asyncio.shield(doing))  # it is done to its end if the client goes away

    async def _rolled_back(self, reason: str, number: int | None) -> dict[str, Any]:
        before, after = await self._serving.roll_back(reason, number)
        await self._training.drop(f"version {before}, from which it was trained, was rolled back")
        withdrawn = await self._stores.run(self._stores.lineage.withdrawn_by, before)
        facts = {"rolled_back": before, "active": after, "num_withdrawn_ratings": len(withdrawn)}
        return {**facts, "withdrawn_ratings": withdrawn[:MOST_NAMED]}

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        body = read_object(await body_of(request))
        if set(body) != {"paused"} or not isinstance(body["paused"], bool):
            raise RequestError('expected {"paused": true} or {"paused": false}', "paused")
        self._training.pause(body["paused"])
        return web.json_response({"is_paused": self._training.is_paused})

    async def _status(self, request: web.Request) -> web.StreamResponse:
        num = await self._stores.run(self._stores.conversations.num)
        facts = {"is_ready": self._serving.is_ready, "active": self._serving.number, "num_conversations": num}
        return web.json_response({**facts, "training": await self._training.status()})


def rating_of(body: Mapping[str, Any]) -> tuple[str, str]:
    """Return value and rater of a rating.

    Raises:
        RequestError: the body is no rating.
    """
    unknown = sorted(set(body) - {"rating", "rater"})
    if unknown or "rating" not in body:
        raise RequestError(f'{unknown or "rating is missing"}; expected {{"rating": VALUE, "rater": NAME}}', "rating")
    value, rater = body["rating"], body.get("rater", "")
    if not isinstance(rater, str) or len(rater) > MAX_NAME:
        raise RequestError(f"rater; expected a text of at most {MAX_NAME} characters", "rater")
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if value is None:
        text = TAKEN_BACK
    try:
        if not isinstance(text, str):
            raise ValueError(f"rating is a {type(value).__name__}; expected {EXPECTED}")
        check_value(text)
    except ValueError as error:
        raise RequestError(str(error)[:500], "rating") from None
    return text, rater


def _headers(answer: Collected) -> dict[str, str]:
    return {"X-SRL-Version": str(answer.version), "X-SRL-Conversation": answer.conversation_id}


def _refused_by_engine(status: int, text: str) -> web.Response:
    """Return vLLM's refusal in the client's form; its own failures are 502."""
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text
    message = " ".join(message.split())[:1000]
    if 400 <= status < 500:
        return failed(Refusal(status, "invalid_request", message))
    return failed(Refusal(502, "engine_failed", f"the engine failed: {message}"))


async def _write(request: web.Request, response: web.StreamResponse, pieces: list[bytes]) -> None:
    """Write pieces of a stream.

    Raises:
        aiohttp.ClientConnectionResetError: the client is gone, or does not read; its connection is closed.
    """
    try:
        await asyncio.wait_for(response.write(b"".join(pieces)), WRITE_TIMEOUT_S)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise aiohttp.ClientConnectionResetError(f"nothing was read for {WRITE_TIMEOUT_S:g} s") from None
