"""Serve a live page of a run in the browser.

    srl dashboard results/first                      print an address; Ctrl-C ends
    srl dashboard results/first --allow-rating       ratings can be given on the page
    srl rate results/first --web                     the same, opened at the ratings
    ssh -L 8642:127.0.0.1:8642 machine               the page of another machine, at the same address

RUN is the directory of a run, going on or ended: what it learns, forgets and remembers, its episodes, and ratings. The
page fills by itself and does not disturb the run. A served model has its page on its server: srl serve prints the
address. The address has a token, made anew at each start: without it nothing can be read. The page is served on this
machine only, unless --host says otherwise; the connection is not encrypted. Nothing is loaded from the network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress

from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.command_line import Parser, add_debug, help_of
from rllib_srl.cli.shared.paths import local_directory
from rllib_srl.replay.tools.describe import Decode

HOST, PORT = "127.0.0.1", 8642
MOST_CONNECTIONS = 64
KEEP_ALIVE_S, GRACE_S = 5, 3


def add_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags of the server, which `srl rate --web` shares."""
    parser.add_argument("--host", default=HOST, metavar="ADDRESS", help="to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port_number, default=PORT, help="0: a free one (default: %(default)s)")


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(**help_of(__doc__))
    parser.add_argument("directory", type=local_directory, metavar="RUN", help="directory of a run")
    add_flags(parser)
    parser.add_argument("--allow-rating", action="store_true", help="the page can rate")
    parser.add_argument("--rater", default="", metavar="NAME", help="name of the person who rates")
    parser.add_argument("--model", help="name or directory of the model, for its tokenizer (default: the run's)")
    add_debug(parser)
    arguments: argparse.Namespace = parser.parse_args(argv)
    return arguments


def port_number(text: str) -> int:
    """Parse a port."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number from 0 to 65535")
    return int(text)


def serve(arguments: argparse.Namespace, decode: Callable[[], Decode], may_rate: bool, tab: str = "") -> int:
    """Serve the page of a run until Ctrl-C.

    Args:
        arguments: the command line, with `directory` and the flags of `add_flags`.
        decode: returns the function token ids -> text.
        may_rate: whether ratings can be given.
        tab: that the printed address opens.

    Raises:
        RunError: the directory holds no run.
        ValueError: the address cannot be used.
    """
    from rllib_srl.cli.dashboard.access import Access
    from rllib_srl.cli.dashboard.run_pages import RunPages, check_is_run
    from rllib_srl.envs.agents.web import Server, listen

    check_is_run(arguments.directory)
    listening = listen(arguments.host, arguments.port)
    port = int(listening.getsockname()[1])
    access = Access(port=port)
    pages = RunPages(arguments.directory, access, decode, arguments.rater, may_rate)
    app = pages.application()
    server = Server(app, listening, GRACE_S, timeout_keep_alive=KEEP_ALIVE_S, limit_concurrency=MOST_CONNECTIONS)
    shown = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    print(f"{pages.title}, {'ratings allowed' if may_rate else 'read-only'}; Ctrl-C ends")
    print(f"http://{shown}:{port}/{tab}?token={access.token}", flush=True)
    if not listening.getsockname()[0].startswith(("127.", "::1")):
        print("others on the network can reach this address, and the connection is not encrypted", file=sys.stderr)
    with listening, suppress(KeyboardInterrupt):
        server.run()
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Serve the page; return the exit status."""
    from rllib_srl.cli.memory import decoder_for

    return serve(arguments, decoder_for(arguments), arguments.allow_rating)


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: run(arguments), arguments.debug)
