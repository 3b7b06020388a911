"""Who may read a page of this package and write through it: whoever has its token.

    GET /?token=...               sets a cookie that scripts cannot read and other sites cannot send
    Authorization: Bearer TOKEN   does without the cookie
    every answer                  says that the page loads nothing from elsewhere, is in no frame, and is not kept
    POST, PUT with the cookie     need no sign of another site

Without the token every address answers 401, the styles included. So another user of the machine, or a site that
resolves its name to this machine's loopback (DNS rebinding), reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rllib_srl.envs.agents.web import bearer_of, is_same

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with "no-referrer" the browser would send `Origin: null` with our own forms
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
NO_TOKEN = "expected the address with its token, as srl dashboard printed it"
OTHER_SITE = "this request comes from the page of another site"


class Access(NamedTuple):
    """The token of one page; `port` keeps the cookies of several pages apart."""

    token: str
    port: int


def is_of_another_site(headers: Headers) -> bool:
    """Return whether a browser says that a request comes from another site's page."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    is_other = origin is not None and origin.partition("://")[2] != headers.get("host")
    return is_other or site not in (None, "same-origin", "none")


def plain_refusal(status: int, reason: str) -> Response:
    return PlainTextResponse(f"{status}: {reason}\n", status)


class Guard:
    """The middleware that lets no request without the token through, and adds `HEADERS` to every answer."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        refusal: Callable[[int, str], Response] = plain_refusal,
        no_token: str = NO_TOKEN,
    ) -> None:
        """Guard an application; `refusal` makes the answer from a status and a reason, that of 401 is `no_token`."""
        self._app, self._access = app, access
        self._refusal, self._no_token = refusal, no_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, token, cookie = Request(scope), self._access.token, f"srl_dashboard_{self._access.port}"
        is_reading = request.method in ("GET", "HEAD")
        has_bearer = is_same(bearer_of(request.headers), token)
        in_cookie = is_same(request.cookies.get(cookie, ""), token)
        is_new = is_reading and not in_cookie and is_same(request.query_params.get("token", ""), token)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                added.update(HEADERS)
                if is_new:
                    added.append("set-cookie", f"{cookie}={token}; HttpOnly; SameSite=Strict; Path=/")
            await send(message)

        app = self._app
        if not (has_bearer or in_cookie or is_new):
            app = self._refusal(401, self._no_token)
        elif not has_bearer and not is_reading and is_of_another_site(request.headers):
            app = self._refusal(403, OTHER_SITE)
        await app(scope, receive, send_guarded)
