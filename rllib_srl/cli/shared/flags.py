"""The frame of a command: its flags, those of the settings of a run if it takes them, its work, and its errors.

    main = Program(__doc__, add_flags, train, without=())       the last line of a command's module
    main(["--lr", "2e-5"])                                      the exit status

A command that takes settings has a flag for each, `--config`, and `--help-all`, which shows those that `--help` omits.
This module and what it imports load neither Ray nor torch, so that `srl train --help` is fast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NoReturn

from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.settings import (
    ALL_PARTS,
    NOT_A_FLAG,
    NUMBER,
    WORDS,
    SettingsError,
    flag_settings,
    given_settings,
    invalid,
    more_errors,
    shown,
)
from rllib_srl.common.foreign_names import in_place_of
from rllib_srl.storage.paths import local_path

LIBRARIES = "Ray, RLlib, vLLM and transformers"
# The settings in `--help`; `--help-all` also shows the rest.
USED_MOST = (
    *("algorithm", "replay", "data", "reward", "env", "env_config", "model", "loss", "engine"),
    *("seed", "lr", "iterations", "num_prompts_per_batch", "group_size"),
    *("max_turn_tokens", "max_episode_tokens", "num_env_runners", "evaluation_interval", "checkpoint_every"),
)


@dataclass(frozen=True)
class Program:
    """A command. Invariant: calling it prints errors, and returns the exit status or exits with 2."""

    doc: str | None  # its help: the docstring of its module
    add_flags: Callable[[argparse.ArgumentParser], object]  # adds its own flags to a parser
    run: Callable[[argparse.Namespace], int]
    _: KW_ONLY
    usage: str | None = None  # its flags in short; None: all of them
    without: Sequence[str] | None = None  # settings that it does not take; None: it takes none
    refused: Sequence[str] = ()  # settings that it refuses by an error of its own, so its help does not name them
    verbose: str = ""  # libraries whose output `--verbose` shows; "": no such flag
    error: Callable[[argparse.Namespace], str] = lambda arguments: ""  # what is wrong with arguments together

    def parser(self) -> Parser:
        parser = Parser(usage=self.usage, **help_of(self.doc))
        self.add_flags(parser)
        if self.verbose:
            parser.add_argument("--verbose", action="store_true", help=f"show the output of {self.verbose}")
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if self.without is not None:
            add_settings(parser, self.without, self.refused)
            parser.takes_settings = True
        return parser

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        parser = self.parser()
        arguments: argparse.Namespace = parser.parse_args(with_underscores(argv) if parser.takes_settings else argv)
        if error := self.error(arguments):
            parser.error(error)
        return arguments

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the command with some arguments, by default those of this process."""
        arguments = self.parse(sys.argv[1:] if argv is None else argv)
        return run_cleanly(lambda: self.run(arguments), arguments.debug)


def add_settings(parser: argparse.ArgumentParser, without: Sequence[str] = (), hidden: Sequence[str] = ()) -> None:
    """Add `--config`, a flag for each setting and `--help-all`; a flag that is not given leaves no attribute."""
    text = "file with the settings below; flags override it"
    text += ", and a note says which others in it are not used" if without else ""
    parser.add_argument("--config", metavar="YAML", type=Path, help=text)
    text = "show all settings and exit"
    parser.add_argument("--help-all", action=HelpAll, nargs=0, default=argparse.SUPPRESS, help=text)
    used_most = parser.add_argument_group("settings used most (--help-all shows all)")
    for part in ALL_PARTS:
        group = parser.add_argument_group(f"settings: {part.title}")
        for name, row in part.rows.items():
            if name in without or name in NOT_A_FLAG:
                continue
            default = "" if part is WORDS else f" (default: {shown(row.default)})"
            action: Any = (used_most if name in USED_MOST else group).add_argument(
                f"--{name}",
                default=argparse.SUPPRESS,
                nargs="+" if row.is_mapping else None,
                metavar="NAME=VALUE" if row.is_mapping else "VALUE",
                help=f"{row.meaning}{default}".replace("%", "%%"),
            )
            if name in hidden:
                action.help = argparse.SUPPRESS
            elif name not in USED_MOST:
                action.all_help, action.help = action.help, argparse.SUPPRESS


class HelpAll(argparse.Action):
    """`--help-all`: the page of `--help` with the settings that it omits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action in parser._actions:
            action.help = getattr(action, "all_help", action.help)
        parser.print_help()
        parser.exit()


def add_trust(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--trust-checkpoint", "--trust_checkpoint", action="store_true", help=text)


def help_of(doc: str | None) -> dict[str, Any]:
    """Return the arguments of a parser whose help is a module's docstring: its first paragraph, the flags, the rest.

    Flags cannot be abbreviated.
    """
    summary, _, epilog = (doc or "").partition("\n\n")
    options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    return {"description": summary, "epilog": epilog, **options}


class Parser(argparse.ArgumentParser):
    """A parser that reports errors as one message without the usage, with exit status 2.

    The message lists all unknown flags at once, each with the flag that was probably meant, and with them errors in
    the settings as far as they can be validated.
    """

    takes_settings = False

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, extra = self.parse_known_args(args, namespace)
        if extra:
            self.error("\n".join(["unknown arguments:", *self._hints(extra), *self._wrong_settings(arguments)]))
        return arguments

    def _wrong_settings(self, arguments: argparse.Namespace) -> list[str]:
        if not self.takes_settings:
            return []
        try:
            return list(filter(None, [invalid(more_errors(given_settings(arguments)))]))
        except SettingsError as error:
            return [str(error)]

    def _hints(self, extra: Sequence[str]) -> list[str]:
        is_name = [not NUMBER.fullmatch(word) and (word.startswith("-") or "=" in word) for word in extra]
        unknown = [word for word, is_one in zip(extra, is_name, strict=True) if is_one] or extra
        known = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
        names = [word.partition("=")[0] for word in unknown]
        return [f"  {name}: {_hint(name, known)}" for name in names]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _hint(name: str, known: Sequence[str]) -> str:
    from rllib_srl.cli.train import main  # here, as it imports this module

    if name in main.parser()._option_string_actions:
        return "a flag of srl train, not of this command"
    return in_place_of(name, known, "--") or "--help lists them all"


def with_underscores(argv: Iterable[str]) -> list[str]:
    """Return `argv` with underscores in flags (--group-size: --group_size) and negative values joined to their flag.

    argparse would treat the -1e-5 of `--lr -1e-5` as a flag.
    """

    names = set(flag_settings())

    def spelt(word: str) -> str:
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        return f"--{name}{equals}{value}" if flag.startswith("--") and name in names else word

    words: list[str] = []
    for word in map(spelt, argv):
        is_value = word.startswith("-") and NUMBER.fullmatch(word)
        if is_value and words and words[-1].removeprefix("--") in names:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def integer_from(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type: integers of at least `least`, and at most `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            limit = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r}; expected an integer {limit}")
        return int(text)

    return read


def local_directory(text: str) -> Path:
    """Return `text` as a local path; an argparse type, which refuses a URI."""
    try:
        return local_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
