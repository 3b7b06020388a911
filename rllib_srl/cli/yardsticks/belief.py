"""Compute what the best policies of an environment with a hidden state earn, with memory and without.

    srl belief oracle                                        means over 20 held-out prompts
    srl belief grid --env-config '{"width": 3, "height": 3}' --num-prompts 50 --split train
    srl belief faults --prompt-id "A 20, B 30, C 10. AB BC A. dice 2 0 7" --json -

The best policy with memory keeps a belief over what is hidden; no policy has a higher expected reward. One without
memory chooses an action by the last observation alone. Both values are exact, as means over all that a prompt's text
leaves hidden. ENV is an installed name, "package.module:Class" or another value of `SRLConfig.environment`; grid,
registers, oracle and faults compute these values. No model is started. `optimal_share` of an evaluation is the share
of the value with memory that a policy earns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rllib_srl.cli.play import json_object
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.command_line import add_debug, help_of
from rllib_srl.cli.shared.display import table
from rllib_srl.common.environments import SPLITS, WorldError, check_world, prompts_of, resolve
from rllib_srl.common.optimal import PromptValues, values_of


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("env", metavar="ENV", help="environment")
    parser.add_argument("--env-config", type=json_object, default={}, metavar="JSON", help="its settings")
    parser.add_argument("--split", choices=SPLITS, default="heldout", help="prompts to compute (default: heldout)")
    parser.add_argument("--num-prompts", type=_at_least_one, default=20, metavar="N", help="how many (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of their order (default: 0)")
    parser.add_argument("--prompt-id", metavar="ID", help="only this prompt")
    text = 'write the values of each prompt to FILE as JSON; "-": print only the JSON'
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)
    add_debug(parser)
    return parser.parse_args(argv)


def _at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of at least 1")
    return int(text)


def as_json(name: str, values: Sequence[PromptValues]) -> dict[str, Any]:
    """Return the means and the values of each prompt.

    Args:
        name: of the environment.
        values: of at least one prompt.
    """
    with_memory = fmean(one.with_memory for one in values)
    without_memory = fmean(one.without_memory for one in values)
    return {
        "environment": name,
        "num_prompts": len(values),
        "with_memory": with_memory,
        "without_memory": without_memory,
        "worth_of_memory": with_memory - without_memory,
        "by_prompt": [asdict(one) for one in values],
    }


def run(argv: list[str] | None = None) -> int:
    """Compute and print."""
    arguments = parse(argv)
    env = resolve(arguments.env)(arguments.env_config)
    try:
        check_world(env, arguments.env)
        given = arguments.prompt_id
        wanted = prompts_of(env, arguments.split, arguments.seed) if given is None else iter([given])
        values = list(values_of(env, arguments.env, islice(wanted, arguments.num_prompts)))
    finally:
        env.close()
    if not values:
        raise WorldError(f"environment {arguments.env!r} has no prompts of the split {arguments.split!r}")
    figures = as_json(arguments.env, values)
    if arguments.json != Path("-"):
        names = {"with_memory": "with memory", "without_memory": "without", "worth_of_memory": "worth of memory"}
        num = f"{len(values)} prompt{'s' * (len(values) > 1)}"
        print(f"{arguments.env}: expected reward of the best policies, mean over {num}")
        print(table([(shown, f"{figures[name]:.4f}") for name, shown in names.items()]))
    if arguments.json == Path("-"):
        print(json.dumps(figures, indent=1))
    elif arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    return run_cleanly(lambda: run(argv), debug="--debug" in (sys.argv if argv is None else argv))
