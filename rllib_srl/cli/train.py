"""Train a language model with SRL.

    srl train --env compare --lr 2e-5 --iterations 20
    srl train --config run.yaml --out results/first
    srl train --resume results/first --iterations 40
    ray job submit --address http://head:8265 --working-dir . -- srl train --config run.yaml --out DIR --resume auto

A resumed run keeps its settings and continues exactly; flags change them, except env, env_config, envs, model, seed
and optimizer_name. `--resume auto` resumes the run in --out, or starts it if there is no checkpoint yet; of a complete
run it only makes up a missing --export. Ctrl-C and SIGTERM stop after the current iteration, with a checkpoint; if
SIGKILL comes first, the last one remains. A run that loses a learner or its driver starts again from its newest
checkpoint (max_failures). Give --out a lasting path.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rllib_srl.cli.shared.cluster import command, tensorboard
from rllib_srl.cli.shared.flags import LIBRARIES, Program, add_trust, local_directory
from rllib_srl.cli.shared.settings import build_config, check, given_settings, run_settings
from rllib_srl.cli.shared.stopping import stop_between_iterations

AUTO = "auto"


def add_flags(parser: argparse.ArgumentParser) -> None:
    where = "new directory of the run (default: under results/)"
    parser.add_argument("--out", type=local_directory, metavar="DIR", help=where)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=False,  # not a str: argparse would convert it to a path
        type=lambda text: AUTO if text == AUTO else local_directory(text),
        metavar="CHECKPOINT|DIR",
        help="resume from a checkpoint, or from the newest one of a run (default: --out); auto: start if it has none",
    )
    parser.add_argument("--again", type=local_directory, help=argparse.SUPPRESS)  # the supervisor gives it
    text = "with --resume: accept a checkpoint of another user or machine, or an old one; its pickles can run any code"
    add_trust(parser, text)
    text = "write the trained model to a Hugging Face directory"
    parser.add_argument("--export", type=local_directory, metavar="DIR", help=text)


def error_of(arguments: argparse.Namespace) -> str:
    has_place = arguments.resume not in (False, AUTO) or arguments.out is not None
    return "" if has_place else "--resume; expected a checkpoint or the directory of a run, as its value or as --out"


def train(arguments: argparse.Namespace) -> int:
    """Train up to the last iteration, or until Ctrl-C or SIGTERM; print where the results are, or how to go on."""
    from rllib_srl.algorithm.checkpointing import has_model, refuse_not_empty
    from rllib_srl.cli import supervisor
    from rllib_srl.cli.shared import runs
    from rllib_srl.cli.shared.training import started, train_until

    resume = None if arguments.resume in (None, AUTO) else Path(arguments.resume or arguments.out)
    if is_auto := bool(arguments.again or arguments.resume == AUTO):
        arguments.out = arguments.again or arguments.out
        resume = runs.resume_or_restart(arguments.out) or resume
    plan = runs.plan_run(arguments.out, resume, given_settings(arguments), arguments.trust_checkpoint)
    how_long = run_settings(plan.values)
    last = how_long.iterations
    export: Path | None = arguments.export
    if is_auto and plan.is_done(last):
        print(f"complete    {plan.directory} has all {last} iterations")
        if export is None or has_model(export):
            return 0
    else:
        plan.refuse_done(last)
    config = build_config({**plan.values, "log_directory": str(plan.directory)})
    check(config)  # before anything starts
    again: tuple[object, ...] = ()
    if export:
        refuse_not_empty(export)
        again = ("--export", export.absolute())
    with started(config, plan, last, arguments.verbose, *again) as (algo, progress):
        supervisor.report(plan.directory, how_long.max_failures)
        if export:
            algo.check_export(export)
        with stop_between_iterations(progress.note) as request:
            for _ in train_until(algo, last, plan.directory, progress, request):
                pass
            progress.end()
            if request.is_made or config.checkpoint_every:
                print(f"checkpoint  {runs.save(algo, plan.directory)}")
        if request.is_made:
            print(f"stopped after iteration {algo.iteration} of {last}; {runs.how_to_resume(plan.directory, *again)}")
            return request.status
        if export:
            print(f"model       {algo.export_to_huggingface(export)}")
        print(f"all files   {plan.directory}")
        print(f"            TensorBoard: {tensorboard(plan.directory)}")
        print(f"            report page: {command('report', plan.directory)}")
        return 0


USAGE = "%(prog)s [--config YAML] [--out DIR] [--resume [CHECKPOINT|DIR]] [--SETTING VALUE ...]"
main = Program(__doc__, add_flags, train, usage=USAGE, without=(), verbose=LIBRARIES, error=error_of)
