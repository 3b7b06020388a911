"""Run a study of tune_configs with Ray Tune; without a name, list them.

    srl tune
    srl tune replay                                   its arms, paired by seed, at an equal budget
    srl tune replay --resume                          after a kill: only what is not finished
    srl tune replay --arms uniform no_replay --seeds 1 2
    srl tune replay --short                           two arms, two seeds, two short stages
    srl tune replay --model smollm2-135m --num_prompts_per_batch 8

Flags change the study's settings for all trials. Results are under --storage, one directory per study, which is never
overwritten; `srl report DIRECTORY` writes the report. To search for a good value of a setting, use Ray Tune:
docs/examples/tune_search.py.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from pathlib import Path
from typing import Any

from rllib_srl import tune_configs
from rllib_srl.cli.shared.cluster import command
from rllib_srl.cli.shared.display import table
from rllib_srl.cli.shared.flags import Program, local_directory
from rllib_srl.cli.shared.runs import RunError
from rllib_srl.cli.shared.settings import given_settings
from rllib_srl.cli.tuning import study as study_run
from rllib_srl.cli.tuning.study import planned, shortened
from rllib_srl.common.foreign_names import nearest
from rllib_srl.studies.study import Study


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", nargs="?", help="name of a file in tune_configs/, without .py")
    default = Path("results/tune")
    text = "directory of the results (default: %(default)s)"
    parser.add_argument("--storage", type=local_directory, default=default, metavar="DIR", help=text)
    parser.add_argument("--resume", action="store_true", help="resume the study in --storage")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="arms to run (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="seeds to run (default: all)")
    parser.add_argument("--short", action="store_true", help="two arms, two seeds, two short stages: a minute or two")


def studies() -> dict[str, str]:
    """Return study name -> its question, the first line of the module's docstring."""
    names = sorted(module.name for module in pkgutil.iter_modules(tune_configs.__path__))
    modules = {name: module_of(name) for name in names}  # `arms` and `streams` are shared parts, not studies
    asking = {name: module for name, module in modules.items() if hasattr(module, "study")}
    return {name: (module.__doc__ or "").partition("\n")[0] for name, module in asking.items()}


def module_of(name: str) -> Any:
    return importlib.import_module(f"rllib_srl.tune_configs.{name}")


def load(name: str) -> Study:
    known = studies()
    if name not in known:
        guess = f"did you mean {near}?" if (near := nearest(name, known)) else f"expected one of {', '.join(known)}"
        raise RunError(f"study {name!r} is unknown; {guess}")
    found: Study = module_of(name).study()
    return found


def run(arguments: argparse.Namespace) -> int:
    if arguments.study is None:
        print(f"studies ({command('tune')} STUDY):\n" + table(list(studies().items())))
        return 0
    study, given = load(arguments.study), given_settings(arguments)
    max_failures = study_run.max_failures_in(given)
    study = shortened(study) if arguments.short else study
    storage = arguments.storage.absolute()
    plan = planned(study, given, storage / study.name, arguments.arms, arguments.seeds)
    words = command("tune", arguments.study, "--storage", storage, "--resume")
    how_to_resume = f"resume with: {words}, and the flags of the first start"
    is_resumed = arguments.resume
    return study_run.run(plan, max_failures, how_to_resume, is_resumed=is_resumed, verbose=arguments.verbose)


USAGE = "%(prog)s [STUDY] [--storage DIR] [--resume] [--arms ARM ...] [--seeds N ...] [--short] [--SETTING VALUE ...]"
main = Program(__doc__, add_flags, run, usage=USAGE, without=(), verbose=study_run.LIBRARIES)

