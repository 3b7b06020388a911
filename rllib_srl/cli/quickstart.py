"""Train SRL on a small model and evaluate it on held-out prompts before and after.

    srl quickstart
    srl quickstart --seed 2 --json quickstart.json

All tuned settings are in `SETTINGS` of rllib_srl/cli/quickstart.py, by the names of srl train. The result is a run
like any other: `srl train --resume`, `srl evaluate` and `srl episodes` take its directory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rllib_srl.cli.shared import baselines, runs
from rllib_srl.cli.shared.cluster import command, run_cleanly, start_ray, tensorboard
from rllib_srl.cli.shared.command_line import add_debug, add_verbose, help_of
from rllib_srl.cli.shared.display import Progress, duration, rounded, showing_progress, sparkline, table, with_interval
from rllib_srl.cli.shared.flags import Parser
from rllib_srl.cli.shared.paths import local_directory
from rllib_srl.cli.shared.run_log import PARTS, Iteration, RunLog
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
    """The result of a quick-start. Invariant: `seconds` has disjoint time spans."""

    plan: runs.RunPlan
    world: str = ""
    dtype: str = ""
    iterations: list[Iteration] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    baselines: baselines.Baselines | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # "start", "evaluation", "training", "checkpoint"
    checkpoint: Path | None = None

    def timed(self, name: str, action: Callable[[], Any]) -> Any:
        """Run `action`, add its time to the span `name` and return its result."""
        begin = time.perf_counter()
        result = action()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
        return result


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(**help_of(__doc__))
    for name, kind in (("seed", int), ("iterations", int), ("engine", str), ("model", str)):
        parser.add_argument(f"--{name}", type=kind, default=SETTINGS[name], help="(default: %(default)s)")
    where = "new directory of the run (default: under results/)"
    parser.add_argument("--out", type=local_directory, metavar="DIR", help=where)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE as JSON")
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
    outcome = measured(Outcome(runs.RunPlan(out, None, values)), arguments.verbose)
    print("\n".join(lines_of(outcome)))
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(outcome), indent=1) + "\n", encoding="utf-8")
    return 0


def measured(outcome: Outcome, verbose: bool) -> Outcome:
    """Fill an outcome: evaluate, train, evaluate, save."""
    plan, last = outcome.plan, outcome.plan.values["iterations"]
    config = build_config({**plan.values, "log_directory": str(plan.directory)})
    check(config)
    outcome.dtype, outcome.world = config.compute_dtype, ", ".join(config.world_configs())
    print("Computing in bfloat16." if outcome.dtype == "bfloat16" else "No bf16 support: computing in fp32.")
    with showing_progress(last) as progress:
        progress.begin("starting Ray ...")
        outcome.timed("start", lambda: start_ray(verbose))
        algo = outcome.timed("start", lambda: start(config, plan, last, verbose))
        WATCH.last_words = partial(runs.how_to_resume, plan.directory)
        try:
            log = RunLog(plan.directory, algo.report.writer)
            progress.begin(f"playing {config.evaluation_duration} held-out prompts before training ...")
            outcome.before = outcome.timed("evaluation", algo.evaluate)
            log.write(algo.iteration, {"evaluation": outcome.before})
            outcome.iterations = outcome.timed("training", lambda: _trained(algo, last, plan, progress))
            progress.begin("playing the same held-out prompts after training ...")
            outcome.after = outcome.timed("evaluation", algo.evaluate)
            log.write(algo.iteration, {"evaluation": outcome.after})
            outcome.checkpoint = place_for(plan.directory, algo.iteration)
            outcome.timed("checkpoint", lambda: runs.save(algo, plan.directory))
            prompts = algo.source.heldout(config.evaluation_duration)
            outcome.baselines = baselines.baselines(config, prompts, algo.seed)
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


def lines_of(outcome: Outcome) -> Iterator[str]:
    """Yield the lines of the closing table."""
    plan, played = outcome.plan, outcome.iterations
    values, num_prompts = plan.values, outcome.after["num_prompts"]
    yield f"\n{values['model']} on {outcome.world}, seed {values['seed']}, {outcome.dtype}, engine {values['engine']}"
    accuracies = [(name, accuracy(results)) for name, results in (("before", outcome.before), ("after", outcome.after))]
    assert outcome.baselines is not None
    yield f"held-out accuracy, greedy, {num_prompts} prompts, 95 % interval"
    yield table([*accuracies, *baselines.rows_of(outcome.baselines)])
    rewards = [iteration.reward for iteration in played]
    yield f"reward by iteration  {sparkline(rewards)}"
    yield "  " + " ".join(map(rounded, rewards))
    tokens, training_s = sum(i.num_tokens for i in played), outcome.seconds["training"]
    rollout_s = sum(i.seconds_by_part["rollout"] for i in played)
    yield "generated tokens"
    yield table(
        [
            ("per iteration", f"{tokens / len(played):.0f}"),
            ("per second", f"{tokens / rollout_s:.0f} during rollouts, {tokens / training_s:.0f} in all of training"),
        ]
    )
    yield from memory_lines(outcome)
    yield "time by part"
    shares = seconds_by_part(outcome)
    total = sum(shares.values())
    yield "  " + "  ".join(f"{name} {share / total:.0%}" for name, share in shares.items())
    yield f"training + evaluation took {duration(total)}, the start {duration(outcome.seconds['start'])}"
    yield "files"
    yield table(
        [
            ("checkpoint", str(outcome.checkpoint)),
            ("TensorBoard", tensorboard(plan.directory)),
            ("transcripts", command("episodes", plan.directory)),
            ("report page", command("report", plan.directory)),
        ]
    )


def memory_lines(outcome: Outcome) -> Iterator[str]:
    """Yield the lines about the memory; none without a memory."""
    last = outcome.iterations[-1].memory
    if not last:
        return
    totals = {
        name: int(sum(iteration.memory[f"num_groups_{name}"] for iteration in outcome.iterations))
        for name in ("fresh", "revisit", "reuse")
    }
    num_played = totals["fresh"] + totals["revisit"]
    signal = sum(iteration.memory["num_signal_revisit"] for iteration in outcome.iterations)
    rates = [(i.memory["revisit_pass_rate"], i.memory["num_groups_revisit"]) for i in outcome.iterations]
    known = [(rate, num) for rate, num in rates if not math.isnan(rate)]
    recalled = rounded(sum(rate * num for rate, num in known) / sum(num for _, num in known) if known else None)
    lines = [
        ("items", f"{last['num_items']:.0f} prompts"),
        ("revisited", f"{totals['revisit']} of {num_played} prompts played ({totals['revisit'] / num_played:.0%})"),
        ("of these", f"{signal:.0f} had answers to learn from; {recalled} of the answers were right"),
    ]
    if totals["reuse"]:
        share = last["reuse_share_tokens"]
        lines.append(("reused", f"{totals['reuse']} groups trained on again ({share:.0%} of tokens)"))
    yield "memory"
    yield table([*lines, ("list items", command("memory", "list", outcome.plan.directory))])


def accuracy(results: dict[str, Any]) -> str:
    """Return an accuracy with its interval."""
    return with_interval(results["accuracy"], results["accuracy_low"], results["accuracy_high"])


def seconds_by_part(outcome: Outcome) -> dict[str, float]:
    """Return the seconds of training and evaluation by part; "other" is training time outside its parts."""
    parts = {name: sum(i.seconds_by_part[name] for i in outcome.iterations) for name in PARTS}
    other = max(0.0, outcome.seconds["training"] - sum(parts.values()))
    return {**parts, "evaluation": outcome.seconds["evaluation"], "other": other}


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return all metrics of a quick-start, as JSON types."""
    assert outcome.baselines is not None
    return {
        "settings": outcome.plan.values,
        "dtype": outcome.dtype,
        "before": outcome.before,
        "after": outcome.after,
        "baselines": baselines.as_json(outcome.baselines),
        "reward": [iteration.reward for iteration in outcome.iterations],
        "num_tokens": [iteration.num_tokens for iteration in outcome.iterations],
        "memory": [iteration.memory for iteration in outcome.iterations],
        "seconds": outcome.seconds,
        "seconds_by_part": seconds_by_part(outcome),
        "directory": str(outcome.plan.directory),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: quickstart(arguments), arguments.debug)

