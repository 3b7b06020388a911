"""An HTTP server that answers as a test says."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Asked = list[tuple[str, str | None, Any]]  # path, Authorization and body of each request


@contextmanager
def http_server(
    answer: Callable[[Any], tuple[int, bytes]], headers: Sequence[tuple[str, str]] = (), byte_s: float = 0.0
) -> Iterator[tuple[str, Asked]]:
    """Serve what `answer` returns for a JSON body, at once or a byte every `byte_s`; yield address and requests."""
    asked: Asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers.get("Authorization"), body))
            status, reply = answer(body)
            size = 1 if byte_s else max(len(reply), 1)
            with suppress(OSError):  # who asked may have gone
                self.send_response(status)
                for name, value in (("Content-Type", "application/json"), *headers):
                    self.send_header(name, value)
                self.end_headers()
                for start in range(0, len(reply), size):
                    self.wfile.write(reply[start : start + size])
                    time.sleep(byte_s)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
