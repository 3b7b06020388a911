#!/usr/bin/env python3
"""Play candidate kinds of prompts with an untrained model: which kinds can a pool be made of?

    python scripts/pool_kinds.py                            the tiny model, 64 prompts of each kind, 8 answers each
    python scripts/pool_kinds.py --kinds gcd lookup_2 --num-prompts 16

A pool can show a difference between rules only if some of its groups have signal and some do not. So before any
training each candidate of `tune_configs.kinds` is played with the sampling of training:

    pass rate    mean reward of the answers
    silent       share of groups whose answers all earn the same: no gradient
    none, all    share of groups without a right answer, and with right answers only
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

import numpy as np

from rllib_srl.cli.shared.cluster import run_cleanly, start_ray
from rllib_srl.cli.shared.command_line import help_of
from rllib_srl.cli.shared.display import table
from rllib_srl.cli.shared.settings import build_config
from rllib_srl.tune_configs.arms import COMMON
from rllib_srl.tune_configs.kinds import CANDIDATES
from rllib_srl.types import Prompt


@dataclass(frozen=True)
class Figures:
    """What an untrained model does on one kind. Invariant: shares in [0, 1]."""

    pass_rate: float
    silent: float
    none: float
    all: float
    num_tokens: float  # of an answer, mean


def figures_of(rewards_PG: np.ndarray, num_tokens: float) -> Figures:
    """Return the figures of one kind.

    Args:
        rewards_PG: of each prompt's answers.
        num_tokens: mean tokens of an answer.
    """
    none_P, all_P = (rewards_PG <= 0).all(1), (rewards_PG >= 1).all(1)
    silent_P = np.ptp(rewards_PG, axis=1) == 0
    return Figures(
        float(rewards_PG.mean()), float(silent_P.mean()), float(none_P.mean()), float(all_P.mean()), num_tokens
    )


def played(kinds: Sequence[str], arguments: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """Play training prompts of each kind, and yield its figures."""
    with TemporaryDirectory() as directory:
        wanted = {kind: CANDIDATES[kind] for kind in kinds}
        pool = {"environments": wanted, "num_prompts_per_kind": arguments.num_prompts}
        settings = {**COMMON, "model": arguments.model, "env": "pool", "env_config": pool, "seed": arguments.seed}
        settings |= {"log_directory": directory, "checkpoint_every": 0, "group_size": arguments.group_size}
        settings |= {"replay_revisit_fraction": 0.0, "replay_reuse_fraction": 0.0, "replay_capacity": 0}
        algo = build_config(settings).build_algo()
        try:
            by_kind: dict[str, list[Prompt]] = defaultdict(list)
            for prompt in algo.source.measured_pool():
                by_kind[prompt.domain].append(prompt)
            for kind in kinds:
                answered = algo.play(by_kind[kind], f"pilot {kind}", as_groups=False)
                groups = [group for batch in answered for group in batch.groups]
                whole = [group.rewards_G for group in groups if len(group.rewards_G) == arguments.group_size]
                num_tokens = float(np.mean([group.num_loss_tokens_G.mean() for group in groups]))
                yield kind, figures_of(np.array(whole), num_tokens)
        finally:
            algo.stop()


def rows_of(figures: Mapping[str, Figures]) -> list[tuple[str, ...]]:
    """Return the table, the kinds with the most signal first."""
    rows: list[tuple[str, ...]] = [("kind", "pass rate", "silent", "none", "all", "tokens")]
    for kind, one in sorted(figures.items(), key=lambda item: item[1].silent):
        shares = (one.pass_rate, one.silent, one.none, one.all)
        rows.append((kind, *(f"{share:.2f}" for share in shares), f"{one.num_tokens:.1f}"))
    return rows


def summary_of(figures: Mapping[str, Figures]) -> str:
    """Return the two figures that decide: the share of silent groups, and of kinds that are partly solved."""
    silent = float(np.mean([one.silent for one in figures.values()]))
    between = float(np.mean([0.1 < one.pass_rate < 0.9 for one in figures.values()]))
    return f"{len(figures)} kinds: {silent:.2f} of groups silent, {between:.2f} of kinds with a pass rate from .1 to .9"


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("--kinds", nargs="+", choices=sorted(CANDIDATES), metavar="KIND", help="(default: all)")
    parser.add_argument("--num-prompts", type=int, default=64, metavar="N", help="of a kind (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, metavar="N", help="answers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--model", default="tiny", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--verbose", action="store_true", help="show the output of Ray and RLlib")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace) -> int:
    """Play, and print the table."""
    start_ray(arguments.verbose)
    kinds, figures = arguments.kinds or list(CANDIDATES), dict[str, Figures]()
    for kind, one in played(kinds, arguments):
        figures[kind] = one
        print(f"{len(figures)}/{len(kinds)} {kind}: pass rate {one.pass_rate:.2f}, silent {one.silent:.2f}", flush=True)
    print(table(rows_of(figures)))
    print(summary_of(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps({kind: vars(one) for kind, one in figures.items()}, indent=1) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    arguments: Any = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: measure(arguments), arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
