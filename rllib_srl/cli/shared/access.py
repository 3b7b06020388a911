"""Who may read a page of this package and write through it: whoever has its token.

    GET /?token=...               sets a cookie that scripts cannot read and other sites cannot send
    Authorization: Bearer TOKEN   does without the cookie
    every answer                  says that the page loads nothing from elsewhere, is in no frame, and is not kept
    POST, PUT with the cookie     need no sign of another site

Without the token every address answers 401, the styles included. So another user of the machine, or a site that
resolves its name to this machine's loopback (DNS rebinding), reads nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
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


class Access:
    """The token of one page. Invariant: comparisons take the same time whatever is compared."""

    def __init__(self, token: str = "", port: int = 0) -> None:
        """Make a token, or use a given one; `port` keeps the cookies of several pages of a machine apart."""
        self.token = token or secrets.token_urlsafe(32)
        self.cookie = f"srl_dashboard_{port}"

    def has_token(self, text: str) -> bool:
        return is_same(text, self.token)

    def in_cookie(self, headers: Headers) -> bool:
        return self.has_token(cookie_parser(headers.get("cookie", "")).get(self.cookie, ""))

    def set_cookie(self) -> str:
        return f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"


def is_of_another_site(headers: Headers) -> bool:
    """Return whether a browser says that a request comes from another site's page."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    is_other = origin is not None and origin.partition("://")[2] != headers.get("host")
    return is_other or site not in (None, "same-origin", "none")


def plain_refusal(status: int, reason: str) -> Response:
    """Return a refusal as a line of text."""
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
        headers, is_reading = Headers(scope=scope), scope["method"] in ("GET", "HEAD")
        has_bearer = self._access.has_token(bearer_of(headers))
        in_cookie = self._access.in_cookie(headers)
        is_new = is_reading and not in_cookie and self._access.has_token(_token_in(scope["query_string"]))

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    added[name] = value
                if is_new:
                    added.append("set-cookie", self._access.set_cookie())
            await send(message)

        app = self._app
        if not (has_bearer or in_cookie or is_new):
            app = self._refusal(401, self._no_token)
        elif not has_bearer and not is_reading and is_of_another_site(headers):
            app = self._refusal(403, OTHER_SITE)
        await app(scope, receive, send_guarded)


def _token_in(query: bytes) -> str:
    try:
        return parse_qs(query.decode("ascii", "replace"), max_num_fields=50).get("token", [""])[0]
    except ValueError:
        return ""
