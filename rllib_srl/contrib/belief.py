"""Compute what the best policies of an environment with a hidden state earn, with memory and without.

    srl contrib belief oracle                                        means over 20 held-out prompts
    srl contrib belief registers --env-config '{"task": "larger"}' --num-prompts 50 --split train
    srl contrib belief registers --prompt-id "p=17, c=40, k=93. larger p c" --json -

The best policy with memory keeps a belief over what is hidden; no policy has a higher expected reward. One without
memory chooses an action by the last observation alone. Both values are exact, as means over all that a prompt's text
leaves hidden. ENV is an installed name, "package.module:Class" or another value of `SRLConfig.environment`;
registers and oracle compute these values (`optimal_values`, rllib_srl.envs.games.beliefs). No model is started.

A wrapper may change rewards and observations, so an environment in a wrapper has values only if the wrapper has
`optimal_values` itself; the wrappers of `gymnasium.make` are looked through.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rllib_srl.cli.env import json_object
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.command_line import add_debug, help_of
from rllib_srl.cli.shared.display import table
from rllib_srl.common.environments import WorldError, check_world, resolve
from rllib_srl.curriculum.prompts import SPLITS, prompts_of

MADE_WITH = (PassiveEnvChecker, OrderEnforcing, TimeLimit)  # by gymnasium.make; they change no reward


@dataclass(frozen=True)
class PromptValues:
    """The exact values of a prompt, as expected rewards. Invariant: `without_memory` <= `with_memory`."""

    prompt_id: str
    with_memory: float
    without_memory: float


def values_of(env: Any, name: str, prompt_ids: Iterable[str]) -> Iterator[PromptValues]:
    """Yield the exact values of each prompt of an environment; `name` is for errors.

    Raises:
        WorldError: the environment computes no such values.
    """
    while type(env) in MADE_WITH:  # not a subclass, which may change rewards
        env = env.env
    if not callable(values := getattr(env, "optimal_values", None)):
        known = "registers or oracle"
        raise WorldError(f"environment {name!r} has no exact values; expected one with optimal_values, such as {known}")
    for prompt_id in prompt_ids:
        found = values(prompt_id)
        yield PromptValues(prompt_id, float(found.with_memory), float(found.without_memory))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
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


def run(argv: Sequence[str] | None = None) -> int:
    """Compute and print."""
    arguments = _parse(argv)
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
    with_memory, without = fmean(one.with_memory for one in values), fmean(one.without_memory for one in values)
    means = {"with_memory": with_memory, "without_memory": without, "worth_of_memory": with_memory - without}
    about = {"environment": arguments.env, "num_prompts": len(values)}
    text = json.dumps({**about, **means, "by_prompt": [asdict(one) for one in values]}, indent=1)
    if arguments.json == Path("-"):
        print(text)
        return 0
    num = f"{len(values)} prompt{'s' * (len(values) > 1)}"
    print(f"{arguments.env}: expected reward of the best policies, mean over {num}")
    shown = {"with memory": with_memory, "without": without, "worth of memory": with_memory - without}
    print(table([(name, f"{value:.4f}") for name, value in shown.items()]))
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; errors are one line."""
    return run_cleanly(lambda: run(argv), debug="--debug" in (sys.argv if argv is None else argv))
