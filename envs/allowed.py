"""The user's own list of the endpoints that environments may ask, and of the keys that may be sent to each.

    RLLIB_SRL_JUDGES="https://api.example.com/v1=EXAMPLE_API_KEY, https://other.example.com/v1"

An entry is a URL and, after "=", the name of the environment variable whose value may be sent to that URL. Settings may
come with someone else's data file or checkpoint; if they could name any endpoint and key, they could send any
environment variable anywhere. So settings only choose from the list, which only this variable defines. It is read in
the process that plays the environment: on a cluster set it, like the key itself, on every node where `ray start` is
called. An endpoint on this machine (localhost, 127.0.0.0/8, ::1) needs no entry if no key is sent to it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

VARIABLE = "RLLIB_SRL_JUDGES"
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Address:
    """The address of an endpoint. Invariant: equal addresses are the same endpoint, however they were written."""

    scheme: str
    host: str
    port: int
    path: str  # without a slash at its end

    @property
    def is_here(self) -> bool:
        """Return whether it is on this machine."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False


def address_of(url: str) -> Address:
    """Return the address of a URL.

    Raises:
        ValueError: it is not the URL of an endpoint.
    """
    shown = repr(url) if "@" not in url else "a URL with a user"  # a message must not hold a password
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ValueError(f"{shown} is not a URL ({str(error).partition(':')[0]})") from error
    if parts.scheme not in _PORTS or not host or re.search(r"[\s,]", url):
        raise ValueError(f"{shown}; expected a URL with a host, as in https://host/v1")
    if "@" in parts.netloc or "?" in url or "#" in url:
        raise ValueError(f"{parts.scheme}://{host}...; expected a URL without a user, a query or a fragment")
    return Address(parts.scheme, host, port or _PORTS[parts.scheme], parts.path.rstrip("/"))


def error_of(setting: str, url: str, key_variable: str = "") -> str:
    """Return why a request to `url`, or sending it the value of `key_variable`, is not allowed; "" if it is allowed.

    Args:
        setting: name of the setting that has the URL, for the message
        url: of an endpoint
        key_variable: name of an environment variable, "" if no key is sent
    """
    try:
        address, allowed = address_of(url), _allowed()
    except ValueError as error:
        return f"{setting} = {error}"
    entry = f"{url}={key_variable}" if key_variable else url
    remedy = f"to allow it set {VARIABLE}={entry!r} wherever environments run"
    if address not in allowed:
        if address.is_here and not key_variable:
            return ""
        return f"{setting} = {url!r} is not among the endpoints that you allow; {remedy}"
    if key_variable and key_variable not in allowed[address]:
        return f"{setting}_key_variable = {key_variable!r} is not a key that you allow for {url!r}; {remedy}"
    return ""


def _allowed() -> dict[Address, set[str]]:
    """Return the names of the keys that may be sent to each endpoint of the list."""
    listed = re.sub(r"\s*=\s*", "=", os.environ.get(VARIABLE, ""))
    allowed: dict[Address, set[str]] = {}
    errors = []
    for entry in filter(None, re.split(r"[,\s]+", listed)):
        url, _, key = entry.partition("=")
        try:
            address = address_of(url)
        except ValueError as error:
            errors.append(f"{VARIABLE} names {error}")
            continue
        if "=" in entry and not _NAME.fullmatch(key):  # it may be the key itself: it is not shown
            errors.append(f"{VARIABLE} names no environment variable after the = of {url!r}")
            continue
        allowed.setdefault(address, set()).update([key] if key else [])
    if errors:
        raise ValueError("; ".join(errors))
    return allowed
