"""Who may read the live page and write ratings: whoever has the token that was made when it started.

    GET /?token=...      sets a cookie that scripts cannot read and other sites cannot send
    every answer         says that the page loads nothing from elsewhere, is in no frame, and is not kept
    POST                 needs the cookie, the key of the page's own forms, and no sign of another site

Without the token every address answers 401, the styles included. So another user of the machine, or a site that
resolves its name to this machine's loopback (DNS rebinding), reads nothing.
"""

from __future__ import annotations

import hmac
import secrets
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rllib_srl.envs.agents.web import is_same

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
REFUSED = "401: expected the address with its token, as srl dashboard printed it\n"


class Access:
    """The token of one start. Invariant: comparisons take the same time whatever is compared."""

    def __init__(self, token: str = "", port: int = 0) -> None:
        """Make a token, or use a given one; `port` keeps the cookies of several pages of a machine apart."""
        self.token = token or secrets.token_urlsafe(32)
        self.cookie = f"srl_dashboard_{port}"
        self.form_key = hmac.new(self.token.encode(), b"forms", "sha256").hexdigest()

    def has_token(self, text: str) -> bool:
        """Return whether a text is the token."""
        return is_same(text, self.token)

    def has_form_key(self, text: str) -> bool:
        """Return whether a text is the key of the page's forms."""
        return is_same(text, self.form_key)

    def in_cookie(self, headers: Headers) -> bool:
        """Return whether a request has the token in its cookie."""
        return self.has_token(cookie_parser(headers.get("cookie", "")).get(self.cookie, ""))

    def set_cookie(self) -> str:
        """Return the header that sets the cookie."""
        return f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"


def is_of_another_site(headers: Headers) -> bool:
    """Return whether a browser says that a request comes from another site's page."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    is_other = origin is not None and origin.partition("://")[2] != headers.get("host")
    return is_other or site not in (None, "same-origin", "none")


class Guard:
    """The middleware that lets no request without the token through, and adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        """Guard an application."""
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, is_new = Headers(scope=scope), False
        if not self._access.in_cookie(headers):
            is_new = scope["method"] == "GET" and self._access.has_token(_token_in(scope["query_string"]))
        is_known = is_new or self._access.in_cookie(headers)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    added[name] = value
                if is_new:
                    added.append("set-cookie", self._access.set_cookie())
            await send(message)

        app: ASGIApp = self._app if is_known else PlainTextResponse(REFUSED, 401)
        await app(scope, receive, send_guarded)


def _token_in(query: bytes) -> str:
    try:
        return parse_qs(query.decode("ascii", "replace"), max_num_fields=50).get("token", [""])[0]
    except ValueError:
        return ""
