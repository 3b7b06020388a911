"""Train SRL on a small model and evaluate it on held-out prompts before and after.

    srl quickstart
    srl quickstart --seed 2 --iterations 20

All tuned settings are in `SETTINGS` of rllib_srl/cli/quickstart.py, by the names of srl train. The result is a run
like any other: `srl train --resume`, `srl evaluate` and `srl report` take its directory.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rllib_srl.cli.shared import baselines, runs
from rllib_srl.cli.shared.cluster import command, tensorboard
from rllib_srl.cli.shared.display import duration, rounded, table, with_interval
from rllib_srl.cli.shared.flags import LIBRARIES, Program, integer_from, local_directory
from rllib_srl.cli.shared.run_log import RunLog
from rllib_srl.cli.shared.settings import build_config, check
from rllib_srl.cli.shared.stopping import stop_between_iterations
from rllib_srl.cli.shared.training import started, train_until

if TYPE_CHECKING:
    from rllib_srl.algorithm.config import SRLConfig

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


def add_flags(parser: argparse.ArgumentParser) -> None:
    for name, kind in (("seed", int), ("iterations", integer_from(1)), ("engine", str), ("model", str)):
        parser.add_argument(f"--{name}", type=kind, default=SETTINGS[name], help="(default: %(default)s)")
    where = "new directory of the run (default: under results/)"
    parser.add_argument("--out", type=local_directory, metavar="DIR", help=where)


class Outcome(NamedTuple):
    """The result of a quick-start. Invariant: `status` is 0, or it was stopped and has no `after`."""

    status: int  # exit status
    results: Sequence[Mapping[str, Any]]  # of each iteration
    checkpoint: Path
    before: dict[str, Any]
    after: dict[str, Any]
    baselines: baselines.Baselines
    start_s: float
    training_s: float  # with both evaluations


def quickstart(arguments: argparse.Namespace) -> int:
    names = ("seed", "iterations", "engine", "model")
    values = {**SETTINGS, **{name: getattr(arguments, name) for name in names}}
    if values["engine"] == "vllm" and importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: using the TransformersEngine, which is slower.")
        values["engine"] = "transformers"
    out = (arguments.out or runs.new_directory("quickstart")).absolute()
    runs.refuse_used(out)
    config = build_config({**values, "log_directory": str(out)})
    check(config)
    print(f"Computing in {config.compute_dtype}.")
    outcome = measured(config, runs.RunPlan(out, None, values), arguments.verbose)
    if outcome.status:
        print(f"stopped; {runs.how_to_resume(out)}")
        return outcome.status
    envs = ", ".join(config.env_configs())
    print(f"\n{values['model']} on {envs}, seed {values['seed']}, {config.compute_dtype}, engine {values['engine']}")
    print(*lines_of(outcome), sep="\n")
    shown = {"report page": command("report", out), "TensorBoard": tensorboard(out)}
    shown |= {"memory": command("memory", "list", out)}
    print("files\n" + table([("checkpoint", str(outcome.checkpoint)), *shown.items()]))
    return 0


def measured(config: SRLConfig, plan: runs.RunPlan, verbose: bool) -> Outcome:
    last, begun = plan.values["iterations"], time.perf_counter()
    with started(config, plan, last, verbose) as (algo, progress):
        start_s = time.perf_counter() - begun
        log = RunLog(plan.directory, algo.report.writer)

        def evaluated(when: str) -> dict[str, Any]:
            progress.begin(f"playing {config.evaluation_duration} held-out prompts {when} training ...")
            evaluation: dict[str, Any] = algo.evaluate()
            log.write(algo.iteration, {"evaluation": evaluation})
            return evaluation

        before = evaluated("before")
        with stop_between_iterations(progress.note) as request:
            results = list(train_until(algo, last, plan.directory, progress, request))
            checkpoint = runs.save(algo, plan.directory)
        after = {} if request.is_made else evaluated("after")
        guessed = baselines.baselines(config, algo.source.heldout(config.evaluation_duration), algo.seed)
        training_s = time.perf_counter() - begun - start_s
    return Outcome(request.status, results, checkpoint, before, after, guessed, start_s, training_s)


def lines_of(outcome: Outcome) -> Iterator[str]:
    """Yield what was learned, and what happened in training: rewards, revisits and time."""
    results = outcome.results
    yield f"held-out accuracy, greedy, {outcome.after['num_prompts']} prompts, 95 % interval"
    measured_ones = [("before", with_interval(outcome.before)), ("after", with_interval(outcome.after))]
    yield table([*measured_ones, *baselines.rows_of(outcome.baselines)])
    rewards = (rounded(result["env_runners"]["episode_return_mean"]) for result in results)
    yield f"reward by iteration  {' '.join(rewards)}"
    if memory := results[-1].get("replay"):
        origins = ("fresh", "revisit")
        fresh, revisits = (int(sum(line["replay"][f"num_groups_{origin}"] for line in results)) for origin in origins)
        played_again = f"{revisits} of {fresh + revisits} prompts played were revisited"
        yield f"memory  {memory['num_items']:.0f} prompts; {played_again}"
    tokens = sum(result["env_runners"]["num_generated_tokens"] for result in results)
    rollout_s = sum(result["timers"]["rollout"] for result in results)
    spent = f"start {duration(outcome.start_s)}, training and evaluation {duration(outcome.training_s)}"
    yield f"time  {spent}; {tokens / rollout_s:.0f} generated tokens per second of rollout"


main = Program(__doc__, add_flags, quickstart, verbose=LIBRARIES)
