"""Run a command of an optional method: `srl contrib NAME ...`, with NAME a file of rllib_srl/contrib that has a `main`.

    srl contrib                  lists the commands
    srl contrib NAME --help      flags of one
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rllib_srl.common.foreign_names import nearest

_FOLDER = Path(__file__).parents[1] / "contrib"


def commands() -> dict[str, str]:
    """Return name -> first line of its documentation, of each file that defines `main`; nothing is imported."""
    texts = {path.stem.replace("_", "-"): path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.py"))}
    has_main = {name: text for name, text in texts.items() if "\ndef main(" in text}
    return {name: text.removeprefix('"""').split("\n", 1)[0].rstrip('"') for name, text in has_main.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, or list all; return the exit status, 2 if the name is unknown."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    known = commands()
    if name in ("-h", "--help"):
        width = max(map(len, known))
        print("usage: srl contrib NAME ...\n\noptional methods that have a command (docs/contrib.md lists all):")
        print("\n".join(f"  {one:<{width}}  {summary}" for one, summary in known.items()))
        return 0
    if name not in known:
        guess = f"; did you mean {near!r}?" if (near := nearest(name, known)) else ""
        print(f"error: unknown contrib command {name!r}{guess} (expected one of {', '.join(known)})", file=sys.stderr)
        return 2
    sys.argv = [f"srl contrib {name}", *rest]  # the program's name in usage lines
    return int(import_module(f"rllib_srl.contrib.{name.replace('-', '_')}").main(rest) or 0)
