"""What the parsers of all commands have in common, and the paths in their arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rllib_srl.common.foreign_names import in_place_of, nearest
from rllib_srl.storage.local_paths import local_path

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Parser(argparse.ArgumentParser):
    """A parser that reports errors as one message without the usage, with exit status 2.

    The message lists all unknown flags at once, each with the flag that was probably meant.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, extra = self.parse_known_args(args, namespace)
        if extra:
            self.error("\n".join(["unknown arguments:", *self._hints(extra), *self.also_wrong(arguments)]))
        return arguments

    def also_wrong(self, arguments: argparse.Namespace) -> list[str]:
        """Return errors to report beside unknown flags."""
        return []

    def _hints(self, extra: Sequence[str]) -> list[str]:
        is_name = [not NUMBER.fullmatch(word) and (word.startswith("-") or "=" in word) for word in extra]
        unknown = [word for word, is_one in zip(extra, is_name, strict=True) if is_one] or extra
        known = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
        names = [word.partition("=")[0] for word in unknown]
        return [f"  {name}: {in_place_of(name, known, '--') or '--help lists them all'}" for name in names]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


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
