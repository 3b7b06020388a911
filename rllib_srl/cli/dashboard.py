"""Serve the report of a run in the browser; the page loads itself anew every `REFRESH_S` seconds.

    srl dashboard results/first                      print an address; Ctrl-C ends
    ssh -L 8642:127.0.0.1:8642 machine               the page of another machine, at the same address

RUN is the directory of a run, going on or ended: the page is that of srl report. Reading it does not disturb the run.
A served model has its page on its server: srl serve prints the address. The address has a token, made anew at each
start: without it nothing can be read. The page is served on this machine only, unless --host says otherwise; the
connection is not encrypted. Nothing is loaded from the network.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rllib_srl.cli.report import page_of_run
from rllib_srl.cli.serving.served_directory import ServedDirectory
from rllib_srl.cli.shared.access import Access, Guard
from rllib_srl.cli.shared.flags import Program, local_directory
from rllib_srl.cli.shared.run_facts import RunFacts
from rllib_srl.cli.shared.run_log import METRICS
from rllib_srl.cli.shared.runs import SETTINGS_FILE, RunError, missing
from rllib_srl.envs.agents.web import Server, listen
from rllib_srl.studies.records import STUDY_FILE
from rllib_srl.studies.report.page import STYLES, Notice, Page, to_html

HOST, PORT = "127.0.0.1", 8642
MOST_CONNECTIONS = 64
KEEP_ALIVE_S, GRACE_S = 5, 3
REFRESH_S = 20  # charts take a second
NUM_TRANSCRIPTS = 6


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=local_directory, metavar="RUN", help="directory of a run")
    parser.add_argument("--host", default=HOST, metavar="ADDRESS", help="to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port_number, default=PORT, help="0: a free one (default: %(default)s)")


def port_number(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number from 0 to 65535")
    return int(text)


def check_is_run(directory: Path) -> None:
    """Check that a path is the directory of a run, which need not have finished an iteration; RunError: it is not."""
    if (directory / STUDY_FILE).is_file():
        raise RunError(f"{directory} is a study; expected the directory of a run (srl report shows studies)")
    if ServedDirectory(directory).exists:
        raise RunError(f"{directory} is a served model; srl serve prints the address of its page")
    if not any((directory / name).is_file() for name in (METRICS, SETTINGS_FILE)):
        there = "holds no run" if directory.is_dir() else missing(directory)
        raise RunError(f"{directory} {there}; expected the directory of a run ({METRICS})")


def html_of(directory: Path) -> bytes:
    try:
        page = page_of_run(RunFacts.read(directory), NUM_TRANSCRIPTS)
    except (ValueError, OSError) as error:  # no finished iteration yet, or damaged settings
        line = " ".join(str(error).split())
        page = Page(f"Run {directory.resolve().name}", (Notice("Nothing to show yet", (line,), "open"),))
    return to_html(page, REFRESH_S).encode("utf-8", "replace")  # a half of a surrogate pair becomes "?"


def application(directory: Path, access: Access) -> Starlette:
    """Return the application that serves the report of a run to whoever has the token."""

    async def page(request: Request) -> Response:
        return Response(html_of(directory), media_type="text/html")

    async def styles(request: Request) -> Response:
        return Response(STYLES.read_bytes(), media_type="text/css")

    routes = [Route("/", page), Route("/page.css", styles)]
    return Starlette(routes=routes, middleware=[Middleware(Guard, access=access)])


def serve(arguments: argparse.Namespace) -> int:
    check_is_run(arguments.directory)
    listening = listen(arguments.host, arguments.port)
    port = int(listening.getsockname()[1])
    access = Access(port=port)
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
