"""What the parsers of all commands have in common."""

from __future__ import annotations

import argparse
from typing import Any


def help_of(doc: str | None) -> dict[str, Any]:
    """Return the arguments of a parser whose help is a module's docstring: its first paragraph, the flags, the rest.

    Flags cannot be abbreviated.
    """
    summary, _, rest = (doc or "").partition("\n\n")
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    return {"description": summary, "epilog": rest, **how}


def add_verbose(parser: argparse.ArgumentParser, libraries: str = "Ray, RLlib, vLLM and transformers") -> None:
    """Add `--verbose`, which shows the output of some libraries."""
    parser.add_argument("--verbose", action="store_true", help=f"show the output of {libraries}")


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Add `--debug`, which `run_cleanly` reads."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
