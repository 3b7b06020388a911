"""Train SRL on a small model and evaluate it on held-out prompts before and after.

    srl quickstart
    srl quickstart --seed 2 --iterations 20

All tuned settings are in `SETTINGS` of rllib_srl/cli/quickstart.py, by the names of srl train. The result is a run
like any other: `srl train --resume`, `srl evaluate` and `srl episodes` take its directory.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rllib_srl import SRLConfig
from rllib_srl.cli.shared import baselines, runs
from rllib_srl.cli.shared.cluster import command, run_cleanly, start_ray, tensorboard
from rllib_srl.cli.shared.command_line import add_debug, add_verbose, help_of
from rllib_srl.cli.shared.display import Progress, duration, rounded, showing_progress, sparkline, table, with_interval
from rllib_srl.cli.shared.flags import Parser
from rllib_srl.cli.shared.paths import local_directory
from rllib_srl.cli.shared.run_log import Iteration, RunLog
from rllib_srl.cli.shared.settings import build_config, check
from rllib_srl.cli.shared.stopping import WATCH, stop_between_iterations
from rllib_srl.cli.shared.training import start, train_until
from rllib_srl.storage.checkpoints import place_for

SETTINGS: dict[str, Any] = {
    "env": "compare",
    "env_config": {"num_numbers": 3, "num_shots": 4},
    "model": "smollm2-135m",
    "engine": "vllm",
    "lr": 2e-5,
    "num_prompts_per_batch": 16,
    "group_size": 8,
    "max_turn_tokens": 8,
    "max_episode_tokens": 256,
    "iterations": 10,
    "evaluation_duration": 256,  # held-out prompts, before and after
    "checkpoint_every": 0,  # one at the end
    "seed": 1,
}


@dataclass
class Outcome:
    """The result of a quick-start."""

    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    baselines: Sequence[tuple[str, str]] = ()
    iterations: list[Iteration] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # "start", "training", "evaluation"

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to the span `name`."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(**help_of(__doc__))
    for name, kind in (("seed", int), ("iterations", int), ("engine", str), ("model", str)):
        parser.add_argument(f"--{name}", type=kind, default=SETTINGS[name], help="(default: %(default)s)")
    where = "new directory of the run (default: under results/)"
    parser.add_argument("--out", type=local_directory, metavar="DIR", help=where)
    add_verbose(parser)
    add_debug(parser)
    arguments: argparse.Namespace = parser.parse_args(argv)
    if arguments.iterations < 1:
        parser.error(f"--iterations = {arguments.iterations}; expected at least 1")
    return arguments


def quickstart(arguments: argparse.Namespace) -> int:
    """Train, evaluate, print."""
    names = ("seed", "iterations", "engine", "model")
    values = {**SETTINGS, **{name: getattr(arguments, name) for name in names}}
    if values["engine"] == "vllm" and importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: using the TransformersEngine, which is slower.")
        values["engine"] = "transformers"
    out = (arguments.out or runs.new_directory("quickstart")).absolute()
    runs.refuse_used(out)
    plan = runs.RunPlan(out, None, values)
    config = build_config({**values, "log_directory": str(out)})
    check(config)
    print("Computing in bfloat16." if config.compute_dtype == "bfloat16" else "No bf16 support: computing in fp32.")
    outcome = measured(config, plan, arguments.verbose)
    print("\n".join(lines_of(outcome, plan, config)))
    return 0


def measured(config: SRLConfig, plan: runs.RunPlan, verbose: bool) -> Outcome:
    """Evaluate, train, evaluate, save."""
    outcome, last = Outcome(), plan.values["iterations"]
    with showing_progress(last) as progress, runs.gone_if_it_fails(plan.directory):
        progress.begin("starting Ray ...")
        with outcome.timed("start"):
            start_ray(verbose)
            algo = start(config, plan, verbose)
        WATCH.last_words = partial(runs.how_to_resume, plan.directory)
        try:
            log = RunLog(plan.directory, algo.report.writer)
            progress.begin(f"playing {config.evaluation_duration} held-out prompts before training ...")
            with outcome.timed("evaluation"):
                outcome.before = algo.evaluate()
            log.write(algo.iteration, {"evaluation": outcome.before})
            with outcome.timed("training"):
                outcome.iterations = _trained(algo, last, plan, progress)
            progress.begin("playing the same held-out prompts after training ...")
            with outcome.timed("evaluation"):
                outcome.after = algo.evaluate()
            log.write(algo.iteration, {"evaluation": outcome.after})
            runs.save(algo, plan.directory)
            prompts = algo.source.heldout(config.evaluation_duration)
            outcome.baselines = list(baselines.rows_of(baselines.baselines(config, prompts, algo.seed)))
        except (Exception, KeyboardInterrupt) as error:
            error.add_note(WATCH.last_words())
            raise
        finally:
            progress.end()
            algo.stop()
    return outcome


def _trained(algo: Any, last: int, plan: runs.RunPlan, progress: Progress) -> list[Iteration]:
    """Train up to iteration `last`; after a stop request, write a checkpoint and raise."""
    with stop_between_iterations(progress.note) as request:
        done = train_until(algo, last, plan.directory, progress, request)
        if request.is_made:
            runs.save(algo, plan.directory)
            raise request.interruption()
    return done


# --- output ---------------------------------------------------------------------------------------


def lines_of(outcome: Outcome, plan: runs.RunPlan, config: SRLConfig) -> Iterator[str]:
    """Yield the lines of the closing table."""
    values, played, seconds = plan.values, outcome.iterations, outcome.seconds
    worlds = ", ".join(config.world_configs())
    yield f"\n{values['model']} on {worlds}, seed {values['seed']}, {config.compute_dtype}, engine {values['engine']}"
    yield f"held-out accuracy, greedy, {outcome.after['num_prompts']} prompts, 95 % interval"
    yield table([("before", accuracy(outcome.before)), ("after", accuracy(outcome.after)), *outcome.baselines])
    rewards = [iteration.reward for iteration in played]
    yield f"reward by iteration  {sparkline(rewards)}"
    yield "  " + " ".join(map(rounded, rewards))
    yield from memory_lines(played, plan.directory)
    tokens, rollout_s = sum(i.num_tokens for i in played), sum(i.seconds_by_part["rollout"] for i in played)
    training_s = seconds["training"] + seconds["evaluation"]
    spans = f"start {duration(seconds['start'])}, training and evaluation {duration(training_s)}"
    yield f"time  {spans}; {tokens / rollout_s:.0f} generated tokens per second of rollout"
    yield "files"
    yield table(
        [
            ("checkpoint", str(place_for(plan.directory, played[-1].number))),
            ("TensorBoard", tensorboard(plan.directory)),
            ("transcripts", command("episodes", plan.directory)),
            ("report page", command("report", plan.directory)),
        ]
    )


def memory_lines(played: Sequence[Iteration], directory: Path) -> Iterator[str]:
    """Yield the lines about the memory; none without a memory."""
    if not played[-1].memory:
        return
    fresh, revisits, mixed = (
        int(sum(iteration.memory[name] for iteration in played))
        for name in ("num_groups_fresh", "num_groups_revisit", "num_signal_revisit")
    )
    revisited = f"{revisits} of {fresh + revisits} prompts played ({revisits / (fresh + revisits):.0%})"
    yield "memory"
    yield table(
        [
            ("items", f"{played[-1].memory['num_items']:.0f} prompts"),
            ("revisited", f"{revisited}; {mixed} of them had answers to learn from"),
            ("list items", command("memory", "list", directory)),
        ]
    )


def accuracy(results: dict[str, Any]) -> str:
    """Return an accuracy with its interval."""
    return with_interval(results["accuracy"], results["accuracy_low"], results["accuracy_high"])


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: quickstart(arguments), arguments.debug)

