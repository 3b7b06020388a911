#!/usr/bin/env python3
"""Train on one environment of each kind and check that held-out accuracy rises.

    python scripts/learn_worlds.py                          SmolLM2-135M, one environment after the other
    python scripts/learn_worlds.py --worlds registers oracle --seed 2

All tuned settings are in `WORLDS`, on top of the quick-start's. Each result is printed with the reward of the most
frequent gold turns on the same prompts, and of a guess. Exit status 1 if a reward did not rise above its
interval and above that baseline.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

from rllib_srl.cli.quickstart import SETTINGS, Outcome, accuracy, measured
from rllib_srl.cli.shared import runs
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.display import duration, table
from rllib_srl.cli.shared.paths import local_directory


@dataclass(frozen=True)
class World:
    """One environment to learn. Invariant: `settings` are named as in srl train."""

    kind: str
    settings: Mapping[str, Any]


WORLDS = {
    "compare": World(
        "mathematics",
        {"env_config": {"num_numbers": 3, "num_shots": 4}},
    ),
    "word_problem_tool": World(
        "tool use",
        {
            "env_config": {"num_steps": 1, "num_shots": 4, "tools_in": "shots"},
            "max_turn_tokens": 24,
            "max_episode_tokens": 512,
            "max_turns": 4,
        },
    ),
    "registers": World(
        "hidden state",
        {
            "env_config": {"task": "larger", "num_registers": 2, "num_shots": 4, "num_turns": 3},
            "max_turns": 3,
            "max_episode_tokens": 512,
        },
    ),
    "oracle": World(
        "hidden state",
        {
            "env_config": {"num_numbers": 2, "num_shots": 4, "num_turns": 3},
            "max_turns": 3,
            "max_turn_tokens": 12,
            "max_episode_tokens": 768,
            "iterations": 15,
        },
    ),
    "faults": World(
        "hidden state",
        {
            "env_config": {"num_parts": 2, "num_tests": 1, "least_percent": 30, "num_shots": 6, "num_turns": 2},
            "max_turns": 2,
            "max_turn_tokens": 12,
            "max_episode_tokens": 512,
            "num_prompts_per_batch": 32,
            "lr": 1.5e-5,
            "iterations": 20,
        },
    ),
}


def settings_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings for srl train."""
    values = {**SETTINGS, "env": name, **WORLDS[name].settings}
    given = {key: getattr(arguments, key) for key in ("model", "seed", "iterations", "engine")}
    return {**values, **{key: value for key, value in given.items() if value is not None}}


def is_learned(outcome: Outcome) -> bool:
    """Return whether the accuracy rose above the interval it began in, and above the most frequent answer's."""
    assert outcome.baselines is not None
    least = max(outcome.before["accuracy_high"], outcome.baselines.majority or 0.0)
    is_above: bool = outcome.after["accuracy"] > least
    return is_above


def row_of(name: str, outcome: Outcome) -> tuple[str, ...]:
    """Return a line of the table."""
    assert outcome.baselines is not None
    known = (outcome.baselines.majority, outcome.baselines.chance)
    shown = ("-" if value is None else f"{value:.3f}" for value in known)
    took = duration(outcome.seconds["training"] + outcome.seconds["evaluation"])
    verdict = "rose" if is_learned(outcome) else "DID NOT RISE"
    return (name, WORLDS[name].kind, accuracy(outcome.before), accuracy(outcome.after), *shown, took, verdict)


def main(argv: Sequence[str] | None = None) -> int:
    """Train on each environment, print the table, and return 1 if one was not learned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--worlds", nargs="+", choices=sorted(WORLDS), default=list(WORLDS))
    parser.add_argument("--model", help="in place of the quick-start's")
    parser.add_argument("--engine", help="in place of the quick-start's")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--out", type=local_directory, metavar="DIR", help="new directory (default: under results/)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--verbose", action="store_true", help="show the output of Ray, RLlib, vLLM and transformers")
    arguments = parser.parse_args(argv)

    out = (arguments.out or runs.new_directory("learn_worlds")).absolute()
    outcomes = {}
    for name in arguments.worlds:
        runs.refuse_used(out / name)
        print(f"{name}: {WORLDS[name].kind}", flush=True)
        plan = runs.RunPlan(out / name, None, settings_of(name, arguments))
        outcomes[name] = measured(Outcome(plan), arguments.verbose)
    header = ("world", "kind", "before", "after", "majority", "chance", "took", "")
    print(table([header, *(row_of(name, outcome) for name, outcome in outcomes.items())], ""))
    model = next(iter(outcomes.values())).plan.values["model"]
    print(f"held-out accuracy of {model}, greedy, with 95 % intervals; runs lie in {out}")
    if arguments.json:
        figures = {
            name: {
                "before": outcome.before,
                "after": outcome.after,
                "majority": outcome.baselines.majority if outcome.baselines else None,
                "reward": [iteration.reward for iteration in outcome.iterations],
                "is_learned": is_learned(outcome),
            }
            for name, outcome in outcomes.items()
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if all(map(is_learned, outcomes.values())) else 1


if __name__ == "__main__":
    sys.exit(run_cleanly(main, debug="--verbose" in sys.argv))
