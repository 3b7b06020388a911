"""Ask the server of a directory through its HTTP interface, with the token of the directory.

    asked(place, "/status", 5)                                what it says
    asked(place, "/rollback", 900, {"reason": "it is rude"})  what it did
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from rllib_srl.cli.serving.adapter import AdapterError, read_json
from rllib_srl.cli.serving.place import SERVER, Place, PlaceError

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the loopback is reached without a proxy
AGAIN = "try again in a minute"


class NoServer(PlaceError):
    """No server is ready in the directory."""


def address_of(place: Place) -> str:
    """Return the address of the server that runs.

    Raises:
        NoServer: none is ready.
    """
    try:
        found = read_json(place.directory / SERVER)
        os.kill(int(found["pid"]), 0)
        return str(found["url"])
    except (AdapterError, ProcessLookupError, PermissionError):  # no file, or one of a server that was killed
        raise NoServer(f"the server is starting, or none runs; {AGAIN}") from None


def asked(place: Place, path: str, timeout_s: float, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the server's answer to a GET, or with a body to a POST.

    Raises:
        NoServer: no server is ready.
        PlaceError: it refuses, or does not answer; the message says why.
    """
    url = address_of(place) + path
    headers = {"Authorization": f"Bearer {place.token()}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        raise PlaceError(_message_of(error)) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise PlaceError(f"the server at {url} did not answer as expected ({reason}); {AGAIN}") from error


def _message_of(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            return str(json.load(error)["error"]["message"])
        except (ValueError, KeyError, TypeError, OSError):
            return f"the server answered with status {error.code}"
