"""Learn tasks one after another, with and without memory: a study of tasks of your own.

    srl stream                                              the five tasks of the stream cpu, tiny model
    srl stream --tasks compare lookup my.jsonl --model smollm2-135m --tokens 20000 --out results/mine
    srl stream --tasks 'registers#larger={task: larger}' 'registers#smaller={task: smaller}'
    srl stream --short                                      two short tasks: a minute or two
    srl stream --resume results/mine                        after a kill: only what is not finished

A task is an environment or a file of questions (.jsonl, .json, .csv, .parquet). The tasks are learned in the given
order, with and without memory, with the same seeds. Prompts are answered once before they are trained on: the share of
right first answers is the online accuracy. Prints the measures of both with 95 % intervals and whether the memory is
better; docs/continual.md defines them, `srl report DIR` writes the report. Settings with replay_ in front are those of
the memory; others hold for both.
"""

from __future__ import annotations

import argparse

from rllib_srl.cli.shared.cluster import command
from rllib_srl.cli.shared.command_line import integer_from, local_directory
from rllib_srl.cli.shared.flags import Program
from rllib_srl.cli.shared.runs import RunError, new_directory
from rllib_srl.cli.shared.settings import given_settings
from rllib_srl.cli.tuning import study as study_run
from rllib_srl.cli.tuning.study import FIXED, SHORT, SHORT_STAGES, SHORT_TOKENS, Plan, planned
from rllib_srl.cli.tuning.tasks import STREAM, stages_of, study_of
from rllib_srl.studies.records import read_study
from rllib_srl.tune_configs.arms import STAGE_TOKENS

BESIDE = ("resume", "verbose", "debug")  # flags allowed with --resume
SEEDS = (1, 2)
WITHOUT = (*FIXED, "data", "reward")  # settings that the tasks replace


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    text = f"environments (ENV, ENV#NAME={{settings}}) or files of questions (default: those of the stream {STREAM})"
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help=text)
    text = f"seeds of each arm (default: {' '.join(map(str, SEEDS))})"
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help=text)
    text = f"generated tokens of a task (default: {STAGE_TOKENS})"
    parser.add_argument("--tokens", type=integer_from(1), metavar="N", help=text)
    parser.add_argument("--short", action="store_true", help="two tasks, one seed, a few iterations")
    parser.add_argument("--out", type=local_directory, metavar="DIR", help="new directory (default: under results/)")
    parser.add_argument("--resume", type=local_directory, metavar="DIR", help="resume a stream; takes no settings")


def fault_of(arguments: argparse.Namespace) -> str:
    """Return what is wrong with the flags together."""
    others = [name for name, value in vars(arguments).items() if value and name not in BESIDE]
    if arguments.resume and others:
        return f"--resume DIR keeps all settings; expected no others, not {', '.join(others)}"
    seeds = arguments.seeds or ()
    if len({*seeds}) < len(seeds) or min(seeds, default=0) < 0:
        return f"--seeds {' '.join(map(str, seeds))}; expected different integers of at least 0"
    return ""


def run(arguments: argparse.Namespace) -> int:
    """Run what is not finished of a stream and print the results; return 1 if a trial is not finished."""
    given = {} if arguments.resume else given_settings(arguments)
    max_failures = study_run.max_failures_in(given)
    if arguments.resume:
        study = read_study(directory := arguments.resume.absolute())
        plan = Plan(study, tuple(arm.name for arm in study.arms), study.seeds, directory)
    else:
        directory = (arguments.out or new_directory("stream")).absolute()
        if directory.exists():
            raise RunError(f"--out {directory} exists; expected a new directory, or --resume {directory}")
        stages = stages_of(arguments.tasks, arguments.tokens or (SHORT_TOKENS if arguments.short else STAGE_TOKENS))
        seeds = arguments.seeds or SEEDS[: 1 if arguments.short else None]
        if arguments.short:
            stages, given = stages[:SHORT_STAGES], {**SHORT, **given}
        plan = planned(study_of(directory.name, stages, seeds, given), {}, directory)
    how_to_resume = f"resume with: {command('stream', '--resume', directory)}"
    is_resumed = bool(arguments.resume)
    return study_run.run(plan, max_failures, how_to_resume, is_resumed=is_resumed, verbose=arguments.verbose)


USAGE = "%(prog)s [--tasks TASK ...] [--seeds N ...] [--tokens N] [--out DIR] [--short] [--SETTING VALUE ...]\n"
USAGE += "       %(prog)s --resume DIR"
main = Program(
    __doc__, add_flags, run, usage=USAGE, without=WITHOUT, verbose=study_run.LIBRARIES, fault=fault_of
)
