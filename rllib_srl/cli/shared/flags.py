"""Flags of commands that take the settings of a run: one for each setting, and `--help` and `--help-all` about them.

This module and what it imports load neither Ray nor torch, so that `srl train --help` is fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rllib_srl.cli.shared import command_line
from rllib_srl.cli.shared.command_line import NUMBER, add_debug, add_verbose
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

# The settings in `--help`; `--help-all` also shows the rest.
USED_MOST = (
    *("algorithm", "replay", "data", "reward", "env", "env_config", "model", "loss", "engine"),
    *("seed", "lr", "iterations", "num_prompts_per_batch", "group_size"),
    *("max_turn_tokens", "max_episode_tokens", "num_env_runners", "evaluation_interval", "checkpoint_every"),
)


def add_settings(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
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
        """Print the help and exit."""
        for action in parser._actions:
            action.help = getattr(action, "all_help", action.help)
        parser.print_help()
        parser.exit()


def add_flags_of_played_runs(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that play the held-out prompts of finished runs or of models."""
    text = "use the reward functions that the settings of someone else's run name; they are code"
    parser.add_argument("--trust-checkpoint", "--trust_checkpoint", action="store_true", help=text)
    add_verbose(parser)
    add_debug(parser)
    add_settings(parser, without=("iterations", "model"))


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add `--trust-checkpoint`."""
    text = "with --resume: accept a checkpoint of another user or machine, or an old one; its pickles can run any code"
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
