#!/usr/bin/env python3
"""Run a study of tune_configs with Ray Tune; without a name, list them.

    python scripts/tune.py
    python scripts/tune.py replay                                   its arms, paired by seed, at an equal budget
    python scripts/tune.py replay --resume                          after a kill: only what is not finished
    python scripts/tune.py replay --arms srl_diversity no_replay --seeds 1 2
    python scripts/tune.py replay --short                           two arms, two seeds, two short stages
    python scripts/tune.py learning_rate --model tiny --engine transformers --num_cpus_per_env_runner 0.5

Flags change the study's settings for all trials. Results lie under --storage, one directory a study, which is never
overwritten; `python scripts/report.py DIRECTORY` makes a page of what a study with arms found.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages
    from scripts.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

import tune_configs
from rllib_srl.continual.study import Study
from scripts import study_run, study_search
from scripts.cluster import run_cleanly
from scripts.display import table
from scripts.runs import RunError
from scripts.settings import add_settings, given_settings, with_underscores
from tune_configs import Search


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        usage="%(prog)s [STUDY] [--storage DIR] [--resume] [--arms ARM ...] [--seeds N ...] [--short] "
        "[--SETTING VALUE ...]",
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("study", nargs="?", help="a file of tune_configs/, without .py")
    parser.add_argument("--storage", type=Path, default=Path("results/tune"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with the study that lies under --storage")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="run these arms now (all)")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="run these of the study's seeds now (all)")
    parser.add_argument("--budget", type=int, metavar="TOKENS", help="that a trial generates (as the study says)")
    parser.add_argument("--short", action="store_true", help="two arms, two seeds, two short stages: a minute or two")
    parser.add_argument("--verbose", action="store_true", help="show what Ray, Tune, vLLM and transformers say")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_settings(parser)
    return parser.parse_args(with_underscores(argv))


def studies() -> dict[str, str]:
    """Return the names of all studies and the questions they ask."""
    names = sorted(module.name for module in pkgutil.iter_modules(tune_configs.__path__))
    modules = {name: module_of(name) for name in names}  # `arms` and `streams` are what studies share, and no study
    asking = {name: module for name, module in modules.items() if hasattr(module, "study")}
    return {name: (module.__doc__ or "").partition("\n")[0] for name, module in asking.items()}


def module_of(name: str) -> Any:
    """Return the module of a study."""
    return importlib.import_module(f"tune_configs.{name}")


def load(name: str) -> Study | Search:
    """Return a study.

    Raises:
        RunError: there is no such study.
    """
    known = studies()
    if name not in known:
        raise RunError(f"study {name!r} is unknown; expected one of {', '.join(known)}")
    found: Study | Search = module_of(name).study()
    return found


def run(arguments: argparse.Namespace) -> int:
    """Run a study, or list them; return the exit status."""
    if arguments.study is None:
        print("studies, for python scripts/tune.py STUDY:\n" + table(list(studies().items())))
        return 0
    study, given = load(arguments.study), given_settings(arguments)
    if isinstance(study, Search):
        return study_search.run(arguments.study, study_search.with_settings(study, given), arguments)
    return study_run.run(study, given, arguments)


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: run(arguments), arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
