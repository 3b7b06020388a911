"""Learn tasks one after another, and measure what is right before, while and after they are learned.

    srl stream                                              the five tasks of the stream cpu, tiny model
    srl stream --tasks compare lookup my.jsonl --model smollm2-135m --tokens 20000 --out results/mine
    srl stream --tasks 'registers#larger={task: larger}' 'registers#smaller={task: smaller}' --orders 2
    srl stream --short                                      two tasks in two orders: two to three minutes
    srl stream --resume results/mine                        after a kill: only what is not finished

A task is an environment or a file of questions (.jsonl, .json, .csv, .parquet). Each order of the tasks is learned with
and without memory, with the same seeds. Prompts are answered once before they are trained on: the share of right first
answers is the online accuracy. Prints online and final accuracy, forgetting, accuracy gained per 1,000 generated tokens
and per iteration, and how far the final accuracy of a task depends on the order, each with its 95 % interval and the
paired difference of memory minus no memory; docs/continual.md defines them. DIR/stream.json has all of it, and a line
per trial. Settings with replay_ in front are those of the memory; others hold for both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray

from rllib_srl.cli.continual.stream_plan import NUM_ORDERS, ORDER, SEEDS, STREAM, WITHOUT, plans_of
from rllib_srl.cli.shared.cluster import command, message_of, run_cleanly, start_ray
from rllib_srl.cli.shared.command_line import add_debug, add_verbose, help_of
from rllib_srl.cli.shared.display import table
from rllib_srl.cli.shared.flags import Parser, add_settings, add_trust, with_underscores
from rllib_srl.cli.shared.paths import local_directory
from rllib_srl.cli.shared.runs import RunError, new_directory
from rllib_srl.cli.shared.settings import given_settings, run_setting
from rllib_srl.cli.shared.stopping import WATCH
from rllib_srl.cli.tuning.plan import Plan
from rllib_srl.cli.tuning.study import announce, check_seals, missing_of, needed_of, num_at_once, play
from rllib_srl.studies.recording import finished_trials, write_study, write_whole
from rllib_srl.studies.results import STUDY_FILE, read_results, read_study
from rllib_srl.studies.task_stream import TITLES, Estimate, StreamResults

RESULTS = "stream.json"
BESIDE = ("resume", "trust_checkpoint", "verbose", "debug")  # flags allowed with --resume


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(
        usage="%(prog)s [--stream NAME | --tasks TASK ...] [--orders N] [--seeds N ...] [--tokens N] [--out DIR] "
        "[--short] [--SETTING VALUE ...]\n       %(prog)s --resume DIR",
        **help_of(__doc__),
    )
    text = "environments (ENV, ENV#NAME={settings}) or files of questions, in the first order"
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help=text)
    text = f"a stream of rllib_srl.tune_configs.streams (default: {STREAM})"
    parser.add_argument("--stream", dest="built_in", metavar="NAME", help=text)  # `stream` is a setting, too
    text = f"orders of the tasks, the given one first, the others drawn (default: {NUM_ORDERS})"
    parser.add_argument("--orders", type=_count, metavar="N", help=text)
    text = f"seeds of each arm in each order (default: {' '.join(map(str, SEEDS))})"
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help=text)
    parser.add_argument("--tokens", type=_count, metavar="N", help="generated tokens of a task (default: 40000)")
    parser.add_argument("--short", action="store_true", help="two tasks, two orders, one seed, a few iterations")
    parser.add_argument("--out", type=local_directory, metavar="DIR", help="new directory (default: under results/)")
    parser.add_argument("--resume", type=local_directory, metavar="DIR", help="resume a stream; takes no settings")
    add_trust(parser)
    add_verbose(parser, "Ray, Tune, vLLM and transformers")
    add_debug(parser)
    add_settings(parser, without=WITHOUT)
    arguments: argparse.Namespace = parser.parse_args(with_underscores(argv))
    changed = [name for name, value in vars(arguments).items() if value != parser.get_default(name)]
    if arguments.resume is not None and (given := [name for name in changed if name not in BESIDE]):
        parser.error(f"--resume DIR keeps all settings; expected no others, not {', '.join(given)}")
    for seed in arguments.seeds or ():
        if seed < 0 or arguments.seeds.count(seed) > 1:
            parser.error(f"--seeds {' '.join(map(str, arguments.seeds))}; expected different integers of at least 0")
    return arguments


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected an integer of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run what is not finished of a stream and print the results; return 1 if a trial is not finished."""
    if arguments.resume is not None:
        directory = arguments.resume.absolute()
        plans, arguments.max_failures = earlier(directory), run_setting("max_failures", {})
    else:
        given = given_settings(arguments)
        WATCH.grace_s = float(run_setting("grace_s", given))
        arguments.max_failures = run_setting("max_failures", given)  # of each trial
        for name in ("grace_s", "max_failures"):
            given.pop(name, None)
        arguments.out = directory = (arguments.out or new_directory("stream")).absolute()
        if directory.exists():
            raise RunError(f"--out {directory} exists; expected a new directory, or --resume {directory}")
        plans = plans_of(arguments, given)
    how = f"resume with: {command('stream', '--resume', directory)}"
    WATCH.last_words = lambda: how
    try:
        errors = complete(plans, arguments)
    except BaseException as error:
        if directory.exists():
            error.add_note(how)
        raise
    results = StreamResults.of([read_results(plan.directory) for plan in plans])
    write_whole(directory / RESULTS, json.dumps(results.as_json(), indent=1) + "\n")
    print(*lines_of(results), f"results: {directory / RESULTS}", sep="\n")
    for failure in errors:
        print(f"error: {message_of(failure)}", file=sys.stderr)
    num_left = sum(len(set(plan.trials()) - finished_trials(plan.directory, plan.study)) for plan in plans)
    if num_left:
        print(f"{num_left} trials are not finished; {how}", file=sys.stderr)
    return 1 if num_left else 0


def earlier(directory: Path) -> list[Plan]:
    """Return the plans of a stream that was stopped, from the studies in its directory.

    Raises:
        RunError: the directory has none.
        ResultsError: a study is damaged.
    """
    found = sorted(directory.glob(f"{ORDER}*/{STUDY_FILE}"), key=lambda path: int(path.parent.name.removeprefix(ORDER)))
    if not found:
        raise RunError(f"--resume {directory} has no {ORDER}0/{STUDY_FILE}; expected the directory of a stream")
    studies = [read_study(path.parent) for path in found]
    arms = tuple(arm.name for arm in studies[0].arms)
    pairs = zip(studies, found, strict=True)
    return [Plan(study, arms, study.seeds, path.parent) for study, path in pairs]


def complete(plans: Sequence[Plan], arguments: argparse.Namespace) -> list[Exception]:
    """Run the trials that are not finished, order by order; return the errors."""
    missing = [missing_of(plan, arguments.resume is not None) for plan in plans]
    errors: list[Exception] = []
    for plan, left in zip(plans, missing, strict=True):
        if left and not arguments.trust_checkpoint:
            check_seals(plan, left)
    if not any(missing):
        return errors
    start_ray(arguments.verbose)
    needed = needed_of(plans[0])
    at_once = min(len(plans[0].trials()), num_at_once(needed, ray.cluster_resources()))
    first = next(at for at, left in enumerate(missing) if left)
    announce(plans[first], missing[first], at_once, needed)
    for plan in plans:  # all of them, so that a resume finds every order
        write_study(plan.directory, plan.study)
    for number, (plan, left) in enumerate(zip(plans, missing, strict=True), 1):
        names = " > ".join(domain.name for domain in plan.study.domains)
        print(f"order {number}/{len(plans)}: {names}" + ("" if left else "  finished"), flush=True)
        how = (arguments.verbose, arguments.trust_checkpoint, arguments.max_failures)
        errors += play(plan, left, *how) if left else []
    return errors


def lines_of(results: StreamResults) -> Iterator[str]:
    """Yield the table of the arms, that of their differences, and that of the tasks."""
    seeds = ", ".join(map(str, results.seeds))
    yield f"{len(results.orders)} orders of {', '.join(results.tasks)}; seeds {seeds}"
    first, *others = results.arms
    titles = [*results.arms, *(f"{first} - {other}" for other in others)]
    rows = [["", *titles, "p"]]
    for name, title in TITLES.items():
        gaps = [results.difference(first, other, name) for other in others]
        cells = [shown(results.estimate(arm, name)) for arm in results.arms]
        rows.append([title, *cells, *(shown(gap, "+") for gap in gaps), *(_p(gap) for gap in gaps)])
    yield table(rows)
    yield "means, 95 % intervals over orders and seeds, of disparities over seeds; of two values it is their range"
    rows = [["task", *(f"{arm}: {what}" for arm in results.arms for what in ("online", "final"))]]
    for task in results.tasks:
        cells = []
        for arm in results.arms:
            own = [trial for trial in results.trials if trial.arm == arm]
            online = [trial.online_of[task] for trial in own if task in trial.online_of]
            final = [trial.final_of[task] for trial in own]
            cells += [f"{sum(found) / len(found):.3f}" if found else "-" for found in (online, final)]
        rows.append([task, *cells])
    yield table(rows)


def shown(found: Estimate, sign: str = "") -> str:
    """Return a mean with its interval, "-" if there is none."""
    if not found.num:
        return "-"
    text = f"{found.mean:{sign}.3f}"
    low, high = found.interval
    return text if found.num < 2 else f"{text} [{low:{sign}.3f}, {high:{sign}.3f}]"


def _p(found: Estimate) -> str:
    return f"{found.p:.2g}" if found.num > 1 else "-"


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: run(arguments), arguments.debug)
