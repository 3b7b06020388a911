"""A client that never finishes the head of a request: what both servers share closes its connection."""

import asyncio
from contextlib import closing

from rllib_srl.envs.agents import endpoint, web
from scripts.broken_requests import request_of
from tests.cli.serving.small_engine import TOKEN, run

HEAD_S, PATIENCE_S = 0.2, 40.0
GET = request_of("GET /v1/status", TOKEN, b"").replace(b"Connection: close\r\n", b"")


async def closed_after(port, *pieces):
    """Send bytes piece by piece; return what came back until the connection was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with closing(writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        try:
            return await asyncio.wait_for(reader.read(), PATIENCE_S)
        except ConnectionResetError:
            return b""


def test_the_gateway_closes_a_connection_that_waits_for_a_head(tmp_path, monkeypatch):
    monkeypatch.setattr(web, "HEAD_TIMEOUT_S", HEAD_S)

    async def body(parts):
        firsts = (b"", b"GET /v1/status HTTP/1.1\r\nHost: x\r\n", GET, GET + b"GET /v1/st")
        found = await asyncio.gather(*(closed_after(parts.port, first) for first in firsts))
        assert [one.count(b"200 OK") for one in found] == [0, 0, 1, 1]

    run(tmp_path, body)


def test_a_head_without_an_end_is_refused():
    port = int(endpoint.Endpoint().url.split(":")[2].split("/")[0])
    # The last piece crosses the limit of 64 KiB: a server that closes with bytes unread resets the connection, and the
    # answer is lost.
    pieces = (b"GET /v1/models HTTP/1.1\r\nHost: " + b"x" * 65_000, b"x" * 600)
    assert b"400 Bad Request" in asyncio.run(closed_after(port, *pieces))
