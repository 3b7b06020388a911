"""Send one HTTP request with a deadline for the whole exchange, and a limit on the size of the reply.

    post("http://127.0.0.1:9000/score", b"{...}", {}, time.monotonic() + 5.0)      the body of a 200 reply

Redirects are not followed. A call ends within its deadline plus the time of one packet, and leaves no connection open.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

MOST_BYTES = 1 << 20  # of a reply


class PostError(RuntimeError):
    """The reply is too long, or has another status than 200; `status` is 0 for the first."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


def post(url: str, body: bytes, headers: Mapping[str, str], deadline: float) -> bytes:
    """Return the body of the reply to a POST request with a JSON body.

    Args:
        url: with scheme and host
        body: JSON
        headers: beside the content type
        deadline: on the clock of `time.monotonic`

    Raises:
        TimeoutError: the deadline has passed.
        PostError: the reply has another status than 200, or more than `MOST_BYTES` bytes.
        OSError, http.client.HTTPException: the connection failed.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=seconds_left(deadline))
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", target, body, {"Content-Type": "application/json", **headers})
        socket = connection.sock  # kept, because the connection drops it if the reply ends with the stream
        response, chunks, size = connection.getresponse(), [], 0
        while chunk := response.read1(1 << 16):
            chunks.append(chunk)
            size += len(chunk)
            if size > MOST_BYTES:
                raise PostError(f"the endpoint wrote more than {MOST_BYTES} bytes")
            socket.settimeout(seconds_left(deadline))
        if response.status != 200:
            said = b"".join(chunks)[:200]
            raise PostError(f"the endpoint answered {response.status} {response.reason}: {said!r}", response.status)
        return b"".join(chunks)
    finally:
        connection.close()


def seconds_left(deadline: float) -> float:
    """Return the seconds until `deadline`. Raises `TimeoutError` if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
