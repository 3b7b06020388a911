#!/usr/bin/env python3
"""Train a language model with SRL.

    python scripts/train.py --env compare --lr 3e-5 --iterations 20
    python scripts/train.py --config run.yaml --out results/first
    python scripts/train.py --resume results/first --iterations 40
    ray job submit --address http://head:8265 --working-dir . -- python scripts/train.py --config run.yaml --out DIR

A resumed run keeps its settings; flags given with --resume change them, except what is trained on what (env,
env_config, worlds, model, seed, optimizer_name). It goes on exactly: same prompts, same order. Ctrl-C stops after
the iteration that runs, with a checkpoint. As a job, give --out a path that outlives the job's working directory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages
    from scripts.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

from scripts import runs
from scripts.cluster import run_cleanly, start_ray, stop_at_ctrl_c
from scripts.display import Progress, show_warnings
from scripts.settings import (
    ITERATIONS,
    SettingsError,
    add_settings,
    build_config,
    given_settings,
    with_underscores,
)
from scripts.training import empty_or_new, start, train_until


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--config YAML] [--out DIR | --resume [CHECKPOINT|DIR]] [--SETTING VALUE ...]",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="new directory of the run (default: under results/)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="CHECKPOINT|DIR",
        help="go on from a checkpoint, or from the newest finished one of a run; alone: of --out",
    )
    parser.add_argument("--export", type=Path, metavar="DIR", help="at the end write a Hugging Face directory")
    parser.add_argument("--verbose", action="store_true", help="show what Ray, RLlib, vLLM and transformers say")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_settings(parser)
    arguments = parser.parse_args(with_underscores(argv))
    if arguments.resume == "" and arguments.out is None:
        parser.error("--resume needs a checkpoint or the directory of a run, here or as --out")
    return arguments


def train(arguments: argparse.Namespace) -> int:
    """Train, and say where everything lies."""
    resume = None if arguments.resume is None else Path(arguments.resume or arguments.out)
    plan = runs.plan_run(arguments.out, resume, given_settings(arguments))
    last = plan.values.get(ITERATIONS.name, ITERATIONS.default)
    if not isinstance(last, int) or last < 1:
        raise SettingsError(f"iterations = {last!r}; expected an integer of at least 1")
    if arguments.export:
        empty_or_new(arguments.export)
    config = build_config({**plan.values, "log_directory": str(plan.directory)})
    config.validate()  # before anything starts
    progress = Progress(last)
    show_warnings(progress)
    progress.begin("starting Ray, engine and learner ...")
    start_ray(arguments.verbose)
    algo = start(config, plan, last, arguments.verbose)
    try:
        return run(algo, plan, last, progress, arguments.export)
    except (Exception, KeyboardInterrupt) as error:
        error.add_note(runs.how_to_resume(plan.directory))
        raise
    finally:
        progress.end()
        algo.stop()


def run(algo: Any, plan: runs.RunPlan, last: int, progress: Progress, export: Path | None) -> int:
    """Train up to iteration `last`, or to Ctrl-C; return the exit status."""
    with stop_at_ctrl_c(progress.note) as request:
        train_until(algo, last, plan.directory, progress, request)
        progress.end()
        if request.is_made or algo.config.checkpoint_every:
            print(f"checkpoint  {runs.save(algo, plan.directory)}")
    if request.is_made:
        print(f"stopped after iteration {algo.iteration} of {last}; {runs.how_to_resume(plan.directory)}")
        return 130
    if export:
        print(f"model       {algo.export_to_huggingface(export)}")
    print(f"all files   {plan.directory}")
    print(f"            TensorBoard: tensorboard --logdir {plan.directory}")
    print(f"            transcripts: python scripts/episodes.py {plan.directory}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: train(arguments), arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
