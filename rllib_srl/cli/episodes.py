"""Show the episodes in the transcript files of a run as readable text.

    srl episodes results/first --iteration 3 --limit 4
    srl episodes results/first --reward "<0.5" --stop-reason unparsable | less
"""

from __future__ import annotations

import argparse
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rllib_srl.cli.shared.command_line import Parser, help_of
from rllib_srl.cli.shared.json_lines import json_lines
from rllib_srl.cli.shared.paths import missing

TRANSCRIPTS = "transcripts.jsonl"  # as rllib_srl.algorithm.metrics names it; importing that takes seconds
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": lambda left, right: abs(left - right) < 1e-9,
    "": lambda left, right: abs(left - right) < 1e-9,
}
GREY, BOLD, GREEN, RED, CYAN, PLAIN = "\x1b[90m", "\x1b[1m", "\x1b[32m", "\x1b[31m", "\x1b[36m", "\x1b[0m"


def iterations_in(text: str) -> Callable[[int], bool]:
    """Return a predicate of an iteration from a number or a range: "3", "3-5"."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}; expected an iteration such as 3, or a range such as 3-5")
    first, last = int(found[1]), int(found[2] or found[1])
    return lambda iteration: first <= iteration <= last


def rewards_in(text: str) -> Callable[[float], bool]:
    """Return a predicate of a reward from a number or a comparison: "1", "<0.5", ">=0.9"."""
    found = re.fullmatch(r"(<=|>=|<|>|=|)\s*(\d*\.?\d+)", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f'{text!r}; expected a reward such as 1, "<0.5" or ">=0.9"')
    compare, bound = COMPARISONS[found[1]], float(found[2])
    return lambda reward: compare(reward, bound)


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(**help_of(__doc__))
    parser.add_argument("directory", type=Path, metavar="DIR", help=f"directory of a run, or its {TRANSCRIPTS}")
    parser.add_argument("--iteration", type=iterations_in, metavar="N|N-M", help="only episodes of these iterations")
    parser.add_argument("--reward", type=rewards_in, metavar="R", help='only with this reward: 1, "<0.5", ">=0.9"')
    parser.add_argument("--stop-reason", metavar="REASON", help="only with this reason: terminated, unparsable, ...")
    parser.add_argument("--limit", type=int, metavar="N", help="maximum number of episodes (default: all)")
    arguments: argparse.Namespace = parser.parse_args(argv)
    if arguments.limit is not None and arguments.limit < 1:
        parser.error(f"--limit = {arguments.limit}; expected at least 1")
    return arguments


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a transcript file, in the order written; report damaged lines."""
    for number, episode in enumerate(json_lines(path, dict[str, Any]), 1):
        if episode is None:
            print(f"{path}, line {number}: damaged, skipped", file=sys.stderr)
        else:
            yield episode


def is_wanted(episode: Mapping[str, Any], arguments: argparse.Namespace) -> bool:
    """Return whether an episode passes all filters."""
    return (
        (arguments.iteration is None or arguments.iteration(episode["iteration"]))
        and (arguments.reward is None or arguments.reward(episode["reward"]))
        and (arguments.stop_reason is None or arguments.stop_reason == episode["stop_reason"])
    )


def shown(episode: dict[str, Any], has_colours: bool) -> str:
    """Return an episode as text: a header line, then its turns by role."""

    def paint(colour: str, text: str) -> str:
        return f"{colour}{text}{PLAIN}" if has_colours else text

    advantage = episode.get("advantage")
    facts = [
        f"iteration {episode['iteration']}",
        f"group {episode['group_id']} episode {episode['index']}",
        paint(GREEN if episode["reward"] > 0 else RED, f"reward {episode['reward']:g}"),
        "advantage " + ("-" if advantage is None else f"{advantage:+.2f}"),
        f"stop {episode['stop_reason']}",
        f"origin {episode.get('origin') or '-'}",
        f"version {episode['version']}",
        f"{episode['env_id']} [{episode['prompt_id']}]",
    ]
    lines = [paint(BOLD, "── ") + "  ".join(facts)]
    width = max(len(turn["role"]) for turn in episode["turns"]) if episode["turns"] else 0
    for turn in episode["turns"]:
        colour = CYAN if turn["role"] == "policy" else GREY
        for number, line in enumerate(turn["text"].removesuffix("\n").split("\n")):
            role = turn["role"] if number == 0 else ""
            lines.append(f"{role:>{width}} │ {paint(colour, printable(line))}".rstrip())
    return "\n".join(lines) + "\n"


def printable(text: str) -> str:
    """Return text without control characters, so that model output cannot control the terminal."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Return `printable` text with its line breaks kept."""
    return "\n".join(printable(line) for line in text.split("\n"))


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    path = arguments.directory / TRANSCRIPTS if arguments.directory.is_dir() else arguments.directory
    if not path.is_file():
        there = "has no transcripts" if arguments.directory.is_dir() else missing(arguments.directory)
        expected = f"expected the directory of a run with {TRANSCRIPTS} (num_transcripts > 0)"
        print(f"error: {arguments.directory} {there}; {expected}", file=sys.stderr)
        return 1
    wanted = (episode for episode in read(path) if is_wanted(episode, arguments))
    num_shown = 0
    for episode in islice(wanted, arguments.limit):
        print(shown(episode, sys.stdout.isatty()))
        num_shown += 1
    if not num_shown:
        print("no episode matches these filters", file=sys.stderr)
    return 0

