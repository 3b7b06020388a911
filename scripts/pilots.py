#!/usr/bin/env python3
"""Check, before any comparison, what a choice of prompts needs: silence that lasts, and facts that are forgotten.

    python scripts/pilots.py silence               plain GRPO, three passes over the development pool
    python scripts/pilots.py facts --rates 2e-4    64 arbitrary facts, then 64 others

    silence  P(silent | silent at the last visit) and P(silent | mixed): a rule that visits silent prompts less often
             can win only if silence lasts
    facts    accuracy of the first facts after their stage, as asked and with the options in another order, and after
             the stage of the others: a memory can win only if facts are learned, and forgotten without it
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

from rllib_srl import SRL
from rllib_srl.algorithm.evaluation import greedily, summary
from rllib_srl.batch.estimators import has_signal
from rllib_srl.cli.shared.cluster import run_cleanly, start_ray
from rllib_srl.cli.shared.command_line import help_of
from rllib_srl.cli.shared.display import table
from rllib_srl.cli.shared.settings import build_config
from rllib_srl.common.callbacks import SRLCallback
from rllib_srl.tune_configs.arms import COMMON
from rllib_srl.tune_configs.kinds import DEVELOPMENT
from rllib_srl.tune_configs.pools import PLAIN, pool_of
from rllib_srl.tune_configs.streams import STREAMS
from rllib_srl.types import GroupMeta, Prompt

ENOUGH_SILENCE, ENOUGH_MORE = 0.7, 0.2  # after silence; more than after mixed rewards
ENOUGH_LEARNED, ENOUGH_LOST = 0.8, 0.15  # below these no rule can show a difference


class Silence:
    """Counts how visits follow each other. Invariant: `counts` has (was silent, is silent) of successive visits."""

    def __init__(self) -> None:
        """Start without visits."""
        self.counts: Counter[tuple[bool, bool]] = Counter()
        self._last: dict[str, bool] = {}

    def add(self, groups: Sequence[GroupMeta]) -> None:
        """Add the visits of an iteration."""
        for group in groups:
            is_silent = not has_signal(group.rewards_G)
            if (was_silent := self._last.get(group.prompt.key)) is not None:
                self.counts[was_silent, is_silent] += 1
            self._last[group.prompt.key] = is_silent

    def chance_after(self, was_silent: bool) -> float:
        """Return P(silent | the last visit was silent, or not); nan without such visits."""
        silent, mixed = self.counts[was_silent, True], self.counts[was_silent, False]
        return silent / (silent + mixed) if silent + mixed else float("nan")


class _Watch(SRLCallback):
    silence: Silence

    def post_step(self, *, algorithm: Any, groups: Sequence[GroupMeta], **kwargs: Any) -> None:
        del algorithm, kwargs
        self.silence.add(groups)


def silence(arguments: argparse.Namespace) -> None:
    """Train plain GRPO for some passes over the pool, and print how long prompts stay silent."""
    own = {"env": "pool", "env_config": pool_of(DEVELOPMENT[: arguments.num_kinds])}
    found = Silence()
    with TemporaryDirectory() as directory:
        config = build_config(_settings(own, directory, arguments))
        config.callbacks(type("Watch", (_Watch,), {"silence": found}))
        algo = config.build_algo()
        try:
            num_prompts = len(algo.source.measured_pool())
            for _ in range(-(-arguments.passes * num_prompts // config.num_prompts_per_batch)):
                algo.train()
        finally:
            algo.stop()
    after_silent, after_mixed = found.chance_after(True), found.chance_after(False)
    print(
        f"{num_prompts} prompts, {found.counts.total()} visits after another: P(silent | last silent) "
        f"{after_silent:.2f}, P(silent | last mixed) {after_mixed:.2f}"
    )
    is_enough = after_silent >= ENOUGH_SILENCE and after_silent - after_mixed >= ENOUGH_MORE
    bounds = f"at least {ENOUGH_SILENCE:g}, and {ENOUGH_MORE:g} more than after mixed"
    print(_verdict(is_enough, f"silence lasts ({bounds})"))


def facts(arguments: argparse.Namespace) -> None:
    """Learn two stages of facts at each learning rate; print the accuracy of the first ones."""
    rows: list[tuple[str, ...]] = [("learning rate", "before", "learned", "reordered", "after the others", "lost")]
    for rate in arguments.rates:
        before, learned, reordered, later = _two_stages(rate, arguments)
        rows.append((f"{rate:g}", *(f"{x:.2f}" for x in (before, learned, reordered, later, learned - later))))
        print(f"learning rate {rate:g}: {learned:.2f} learned, {later:.2f} left", flush=True)
        is_enough = learned > ENOUGH_LEARNED and learned - later >= ENOUGH_LOST
        print(_verdict(is_enough, f"above {ENOUGH_LEARNED:g} is learned, {ENOUGH_LOST:g} or more is lost"))
    print(table(rows))


def _two_stages(rate: float, arguments: argparse.Namespace) -> tuple[float, float, float, float]:
    stages = STREAMS["facts"][:2]
    first, num_facts = stages[0]["domain"], stages[0]["env_config"]["num_facts"]
    num_iterations = -(-arguments.visits * num_facts // COMMON["num_prompts_per_batch"])
    stream = [{**one, "iterations": num_iterations} for one in stages]
    with TemporaryDirectory() as directory:
        algo = build_config(_settings({"stream": stream, "lr": rate}, directory, arguments)).build_algo()
        try:
            asked = [prompt for prompt in algo.source.measured_pool() if prompt.domain == first]
            held = [prompt for prompt in algo.source.heldout(2 * num_facts) if prompt.domain == first]
            before = _accuracy(algo, asked)
            for _ in range(num_iterations):
                algo.train()
            learned, reordered = _accuracy(algo, asked), _accuracy(algo, held)
            for _ in range(num_iterations):
                algo.train()
            return before, learned, reordered, _accuracy(algo, asked)
        finally:
            algo.stop()


def _accuracy(algo: SRL, prompts: list[Prompt]) -> float:
    """Return the share of right greedy answers."""
    groups = [group for batch in algo.play(prompts, "greedy", **greedily(algo.config)) for group in batch.groups]
    return float(summary(groups, len(prompts))["accuracy"])


def _settings(own: dict[str, Any], directory: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of plain GRPO in the studies."""
    settings = {**COMMON, **PLAIN, **own, "model": arguments.model, "seed": arguments.seed}
    return {**settings, "log_directory": directory, "checkpoint_every": 0}


def _verdict(is_met: bool, what: str) -> str:
    return f"{'met' if is_met else 'missed'}: {what}"


PILOTS = {"silence": silence, "facts": facts}


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("pilot", choices=PILOTS, help="what to check")
    parser.add_argument("--passes", type=int, default=3, metavar="N", help="over the pool (default: %(default)s)")
    kinds = "of the development pool (default: all)"
    parser.add_argument("--num-kinds", type=int, default=len(DEVELOPMENT), metavar="N", help=kinds)
    parser.add_argument("--visits", type=int, default=20, metavar="N", help="of a fact (default: %(default)s)")
    rates = "learning rates for facts (default: 2e-4 4e-4)"
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-4, 4e-4], metavar="RATE", help=rates)
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--model", default="tiny", help="(default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="show the output of Ray and RLlib")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace) -> int:
    """Run a pilot, and print what it found."""
    start_ray(arguments.verbose)
    PILOTS[arguments.pilot](arguments)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: measure(arguments), arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
