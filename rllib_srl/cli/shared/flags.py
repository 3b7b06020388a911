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
from pathlib import Path
from typing import Any

from rllib_srl.cli.shared import command_line
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.command_line import NUMBER, help_of
from rllib_srl.cli.shared.settings import (
    ALL_PARTS,
    NOT_A_FLAG,
    WORDS,
    SettingsError,
    flag_settings,
    given_settings,
    invalid,
    more_faults,
    shown,
)

LIBRARIES = "Ray, RLlib, vLLM and transformers"
# The settings in `--help`; `--help-all` also shows the rest.
USED_MOST = (
    *("algorithm", "replay", "data", "reward", "env", "env_config", "model", "loss", "engine"),
    *("seed", "lr", "iterations", "num_prompts_per_batch", "group_size"),
    *("max_turn_tokens", "max_episode_tokens", "num_env_runners", "evaluation_interval", "checkpoint_every"),
)


class Program:
    """A command. Invariant: calling it prints errors, and returns the exit status or exits with 2."""

    def __init__(
        self,
        doc: str | None,
        add_flags: Callable[[argparse.ArgumentParser], object],
        run: Callable[[argparse.Namespace], int],
        *,
        usage: str | None = None,
        without: Sequence[str] | None = None,
        verbose: str = "",
        fault: Callable[[argparse.Namespace], str] = lambda arguments: "",
    ) -> None:
        """Describe the command.

        Args:
            doc: its help: the docstring of its module.
            add_flags: adds its own flags to a parser.
            run: does its work.
            usage: its flags in short; None: all of them.
            without: settings that it does not take; None: it takes none.
            verbose: libraries whose output `--verbose` shows; "": no such flag.
            fault: returns what is wrong with arguments together, "" if nothing is.
        """
        self._doc, self._usage, self._add_flags, self._run, self._fault = doc, usage, add_flags, run, fault
        self._without, self._verbose = without, verbose

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        takes_settings = self._without is not None
        parser = (Parser if takes_settings else command_line.Parser)(usage=self._usage, **help_of(self._doc))
        self._add_flags(parser)
        if self._verbose:
            parser.add_argument("--verbose", action="store_true", help=f"show the output of {self._verbose}")
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if self._without is not None:
            add_settings(parser, self._without)
        arguments: argparse.Namespace = parser.parse_args(with_underscores(argv) if takes_settings else argv)
        if fault := self._fault(arguments):
            parser.error(fault)
        return arguments

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the command with some arguments, by default those of this process."""
        arguments = self.parse(sys.argv[1:] if argv is None else argv)
        return run_cleanly(lambda: self._run(arguments), arguments.debug)


def add_settings(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Add `--config`, a flag for each setting and `--help-all`; a flag that is not given leaves no attribute."""
    parser.add_argument("--config", metavar="YAML", type=Path, help="file with the settings below; flags override it")
    text = "show all settings and exit"
    parser.add_argument("--help-all", action=HelpAll, nargs=0, default=argparse.SUPPRESS, help=text)
    used_most = parser.add_argument_group("settings used most (--help-all shows all)")
    for part in ALL_PARTS:
        rest = parser.add_argument_group(f"settings: {part.title}")
        for name, row in part.rows.items():
            if name in without or name in NOT_A_FLAG:
                continue
            default = "" if part is WORDS else f" (default: {shown(row.default)})"
            action: Any = (used_most if name in USED_MOST else rest).add_argument(
                f"--{name}",
                default=argparse.SUPPRESS,
                nargs="+" if row.is_mapping else None,
                metavar="NAME=VALUE" if row.is_mapping else "VALUE",
                help=f"{row.meaning}{default}".replace("%", "%%"),
            )
            if name not in USED_MOST:
                action.all_help, action.help = action.help, argparse.SUPPRESS


class HelpAll(argparse.Action):
    """`--help-all`: the page of `--help` with the settings that it omits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action in parser._actions:
            action.help = getattr(action, "all_help", action.help)
        parser.print_help()
        parser.exit()


def add_trust(parser: argparse.ArgumentParser, text: str) -> None:
    """Add `--trust-checkpoint` with a help text."""
    parser.add_argument("--trust-checkpoint", "--trust_checkpoint", action="store_true", help=text)


class Parser(command_line.Parser):
    """A parser of settings: with unknown flags it reports errors in the others as far as they can be validated."""

    def also_wrong(self, arguments: argparse.Namespace) -> list[str]:
        """Return the errors in the settings that were given."""
        try:
            return [line for line in [invalid(more_faults(given_settings(arguments)))] if line]
        except SettingsError as error:
            return [str(error)]


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
