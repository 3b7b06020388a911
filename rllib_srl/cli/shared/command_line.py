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
