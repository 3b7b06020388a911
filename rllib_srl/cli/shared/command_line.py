"""Types of arguments, paths among them, and the help that a parser takes from a module's docstring."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllib_srl.common.foreign_names import nearest
from rllib_srl.storage.local_paths import local_path

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def help_of(doc: str | None) -> dict[str, Any]:
    """Return the arguments of a parser whose help is a module's docstring: its first paragraph, the flags, the rest.

    Flags cannot be abbreviated.
    """
    summary, _, rest = (doc or "").partition("\n\n")
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    return {"description": summary, "epilog": rest, **how}


def integer_from(least: int) -> Callable[[str], int]:
    """Return an argparse type: integers of at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}; expected an integer of at least {least}")
        return int(text)

    return read


def local_directory(text: str) -> Path:
    """Return `text` as a local path; an argparse type, which refuses a URI."""
    try:
        return local_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def missing(path: Path) -> str:
    """Return "does not exist", and the nearest name in the same directory if there is one."""
    parent = path.absolute().parent
    near = nearest(path.name, [one.name for one in parent.iterdir()]) if parent.is_dir() else ""
    return "does not exist" + (f"; did you mean {path.with_name(near)}?" if near else "")
