"""Close connections whose client does not finish the head of a request, which uvicorn waits for without limit."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 30.0


class HeadTimeout(H11Protocol):
    """Uvicorn's HTTP. Invariant: a connection waits for one head no longer than twice `HEAD_TIMEOUT_S`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look."""
        super().connection_made(transport)
        self._look(self)

    def _look(self, before: object) -> None:
        """Close the connection if it waits for the same head as at the last look; look again later.

        Args:
            before: request before that head, at the last look; another object if none was waited for.
        """
        if self.transport.is_closing():
            return
        is_waiting = self.conn.their_state is h11.IDLE
        if is_waiting and before is self.cycle:
            self.transport.abort()
            return
        now: Any = self.cycle if is_waiting else self
        self.loop.call_later(HEAD_TIMEOUT_S, self._look, now)
