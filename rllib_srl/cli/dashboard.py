"""Serve the report of a run or a study in the browser; the page loads itself anew every `REFRESH_S` seconds.

    srl dashboard results/first                      print an address; Ctrl-C ends
    ssh -L 8642:127.0.0.1:8642 machine               the page of another machine, at the same address

DIR is the directory of a run or a study, going on or ended: the page is that of srl report, and reading disturbs none.
A served model has its page on its server: srl serve prints the address. The address has a token, made anew at each
start: without it nothing can be read. The page is served on this machine only, unless --host says otherwise; the
connection is not encrypted. Nothing is loaded from the network.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from rllib_srl.cli.report import OF_RUN, page_in
from rllib_srl.cli.serving.served_directory import ServedDirectory
from rllib_srl.cli.shared.access import Access, Guard
from rllib_srl.cli.shared.flags import Program, integer_from, local_directory
from rllib_srl.cli.shared.runs import RunError
from rllib_srl.envs.agents.web import Server, listen
from rllib_srl.studies.records import STUDY_FILE
from rllib_srl.studies.report.page import STYLES, Notice, Page, to_html

HOST, PORT = "127.0.0.1", 8642
MOST_CONNECTIONS = 64
KEEP_ALIVE_S, GRACE_S = 5, 3
REFRESH_S = 20  # charts take a second


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=local_directory, metavar="DIR", help="directory of a run or a study")
    parser.add_argument("--host", default=HOST, metavar="ADDRESS", help="to listen on (default: %(default)s)")
    text = "0: a free one (default: %(default)s)"
    parser.add_argument("--port", type=integer_from(0, 65535), default=PORT, help=text)


def check_can_be_shown(directory: Path) -> None:
    """Check that a directory has a study, or a run, which need not have finished an iteration; RunError: it has not."""
    if ServedDirectory(directory).exists:
        raise RunError(f"{directory} is a served model; srl serve prints the address of its page")
    if not any((directory / name).is_file() for name in (*OF_RUN, STUDY_FILE)):
        page_in(directory)  # raises an error


def html_of(directory: Path) -> bytes:
    try:
        page = page_in(directory)
    except (ValueError, OSError) as error:  # no finished iteration yet, or damaged settings
        line = " ".join(str(error).split())
        page = Page(f"Run {directory.resolve().name}", (Notice("Nothing to show yet", (line,), "open"),))
    return to_html(page, REFRESH_S).encode("utf-8", "replace")  # a half of a surrogate pair becomes "?"


def application(directory: Path, access: Access) -> Starlette:
    async def page(request: Request) -> Response:
        return Response(html_of(directory), media_type="text/html")

    async def styles(request: Request) -> Response:
        return FileResponse(STYLES)

    routes = [Route("/", page), Route("/page.css", styles)]
    return Starlette(routes=routes, middleware=[Middleware(Guard, access=access)])


def serve(arguments: argparse.Namespace) -> int:
    check_can_be_shown(arguments.directory)
    listening = listen(arguments.host, arguments.port)
    port = int(listening.getsockname()[1])
    access = Access(secrets.token_urlsafe(32), port)
    app = application(arguments.directory, access)
    server = Server(app, listening, GRACE_S, timeout_keep_alive=KEEP_ALIVE_S, limit_concurrency=MOST_CONNECTIONS)
    shown = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    print(f"report of {arguments.directory}; Ctrl-C ends")
    print(f"http://{shown}:{port}/?token={access.token}", flush=True)
    if not listening.getsockname()[0].startswith(("127.", "::1")):
        print("others on the network can reach this address, and the connection is not encrypted", file=sys.stderr)
    with listening, suppress(KeyboardInterrupt):
        server.run()
    return 0


main = Program(__doc__, add_flags, serve)
