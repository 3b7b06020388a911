"""Run a study of tune_configs with Ray Tune; without a name, list them.

    srl tune
    srl tune replay                                   its arms, paired by seed, at an equal budget
    srl tune replay --resume                          after a kill: only what is not finished
    srl tune replay --arms uniform no_replay --seeds 1 2
    srl tune replay --short                           two arms, two seeds, two short stages
    srl tune replay --model smollm2-135m --num_prompts_per_batch 8

Flags change the study's settings for all trials, but those of tasks, seeds and lengths, which the study fixes. Results
are under --storage, one directory per study, which is never overwritten; `srl report DIRECTORY` writes the report. To
search for a good value of a setting, use Ray Tune: docs/examples/tune_search.py.

Finished trials are recorded in the study's directory (`rllib_srl.studies`), not in Tune's: a killed study is resumed
from there, finished trials are not run again, and the others continue from their last checkpoint. `--arms` and
`--seeds` select trials of the same study; any other setting makes it another study, which an existing results
directory refuses.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rllib_srl import tune_configs
from rllib_srl.cli.shared.cluster import command, message_of, start_ray
from rllib_srl.cli.shared.display import table, text_of
from rllib_srl.cli.shared.flags import Program, local_directory
from rllib_srl.cli.shared.runs import RunError
from rllib_srl.cli.shared.settings import build_config, given_settings, listed, run_settings
from rllib_srl.cli.shared.stopping import ENDING
from rllib_srl.common.foreign_names import nearest
from rllib_srl.studies.records import STUDY_FILE, read_results, run_path, write_study
from rllib_srl.studies.report.study_page import summary_of
from rllib_srl.studies.study import Primary, Study

OF_TASKS = ("env", "env_config", "envs", "mixture", "stream")
FIXED = (*OF_TASKS, "seed", "iterations", "evaluation_interval")
REFUSED = (*FIXED, "data", "reward")  # the last two stand for env and env_config
SHORT = {"num_prompts_per_batch": 8, "group_size": 4, "evaluation_duration": 32, "checkpoint_every": 2}
SHORT_STAGES, SHORT_SEEDS, SHORT_TOKENS = 2, 2, 800  # of a stage: an iteration must not be longer
LIBRARIES = "Ray, Tune, vLLM and transformers"  # whose output --verbose shows
CHECKPOINT_EVERY = 10  # iterations, in addition to the checkpoint after each stage


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
    study: Study = module_of(name).study()
    return study


def run(arguments: argparse.Namespace) -> int:
    if arguments.study is None:
        print(f"studies ({command('tune')} STUDY):\n" + table(list(studies().items())))
        return 0
    study, settings = load(arguments.study), given_settings(arguments)
    max_failures = max_failures_in(settings)
    study = shortened(study) if arguments.short else study
    storage = arguments.storage.absolute()
    plan = planned(study, settings, storage / study.name, arguments.arms, arguments.seeds)
    words = command("tune", arguments.study, "--storage", storage, "--resume")
    how_to_resume = f"resume with: {words}, and the flags of the first start"
    is_resumed = arguments.resume
    return run_study(plan, max_failures, how_to_resume, is_resumed=is_resumed, verbose=arguments.verbose)


@dataclass(frozen=True)
class Plan:
    """The trials to run. Invariant: arms and seeds are those of the study, in its order."""

    study: Study
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    directory: Path

    def trials(self) -> list[tuple[str, int]]:
        """Return arm and seed of every trial, whole pairs first."""
        return [(arm, seed) for seed in self.seeds for arm in self.arms]


def planned(
    study: Study,
    settings: Mapping[str, Any],
    directory: Path,
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
) -> Plan:
    """Return the plan of a study, validated as far as possible; RunError: all errors, one per line.

    The settings `given` override those of all arms; without `arms` or `seeds` all are run.
    """
    study = with_settings(study, settings)
    errors = study.errors()
    errors += _unknown("arm", arms or (), [arm.name for arm in study.arms])
    errors += _unknown("seed", seeds or (), study.seeds)
    if errors := errors or errors_of_trials(study):
        raise RunError(f"study {study.name!r} cannot be run:\n" + "\n".join(f"  {error}" for error in errors))
    chosen = tuple(arm.name for arm in study.arms if not arms or arm.name in arms)
    return Plan(study, chosen, tuple(seed for seed in study.seeds if not seeds or seed in seeds), directory)


def with_settings(study: Study, settings: Mapping[str, Any]) -> Study:
    """Return a study whose arms all have the given settings; RunError: it fixes one, or its arms differ in it."""
    errors = errors_of_fixed(settings, {"seed": "--seeds"})
    for name in settings:
        arms = [arm.name for arm in study.arms if name in arm.settings]
        if arms and name not in FIXED:
            errors.append(f"  {name}: set by the arms ({', '.join(arms)}); expected other settings")
    if errors:
        raise RunError(f"study {study.name!r} does not accept these settings:\n" + "\n".join(errors))
    values = {name: listed(value) for name, value in settings.items()}
    if "model" in values and Path(values["model"]).is_dir():  # each trial runs in its own directory
        values["model"] = str(Path(values["model"]).absolute())
    return replace(study, settings={**study.settings, **values})


def errors_of_fixed(settings: Iterable[str], instead: Mapping[str, str]) -> list[str]:
    """Return an error for each setting that a study fixes, with the flag that is expected `instead`, if any."""
    hints = {name: f"; expected {flag}" for name, flag in instead.items()}
    return [f"  {name}: fixed by the study{hints.get(name, '')}" for name in settings if name in FIXED]


def shortened(study: Study) -> Study:
    """Return a study of two arms, two seeds and two stages that takes a minute, as a smoke test."""
    primary = study.primary
    kept = (primary.treatment, primary.controls[0])
    stream = [{**stage, "tokens": SHORT_TOKENS} for stage in study.settings["stream"][:SHORT_STAGES]]
    domains = [d for d in study.domains if d.learned_at is not None and d.learned_at < len(stream)]
    return replace(
        study,
        name=f"{study.name}_short",
        arms=tuple(arm for arm in study.arms if arm.name in kept),
        domains=tuple(domains),
        num_stages=len(stream),
        seeds=study.seeds[:SHORT_SEEDS],
        budget=SHORT_TOKENS * len(stream),
        primary=Primary(primary.treatment, kept[1:], primary.measures),
        settings={**study.settings, **SHORT, "stream": stream},
    )


def errors_of_trials(study: Study) -> list[str]:
    errors: dict[str, list[str]] = {}
    for arm in study.arms:
        try:
            build_config(study.settings_of(arm.name, study.seeds[0])).validate()
        except (TypeError, ValueError) as error:
            lines = str(error).splitlines()
            for line in lines[1:] or lines:
                errors.setdefault(line.strip(), []).append(arm.name)
    every = len(study.arms)
    return [line if len(of) == every else f"arm {', '.join(of)}: {line}" for line, of in errors.items()]


def config_of(plan: Plan, arm: str, seed: int) -> dict[str, Any]:
    values = plan.study.settings_of(arm, seed)
    config: dict[str, Any] = build_config({**values, "checkpoint_every": 0}).to_dict()  # the trial writes its own
    every = values.get("checkpoint_every", CHECKPOINT_EVERY)
    return config | {
        "_study": {"directory": str(plan.directory), "arm": arm, "seed": seed, "checkpoint_every": every}
    }


def run_study(plan: Plan, max_failures: int, how_to_resume: str, *, is_resumed: bool, verbose: bool) -> int:
    """Run a study; return 1 if a requested trial is not finished. RunError: the directory is in use or has no study."""
    has_study = (plan.directory / STUDY_FILE).is_file()
    if is_resumed and not has_study:
        raise RunError(f"{plan.directory} has no study to resume; omit --resume to start it")
    if not is_resumed and plan.directory.exists():
        raise RunError(f"{plan.directory} already has this study; set another --storage, or resume it: --resume")
    if has_study:
        write_study(plan.directory, plan.study)  # refuses another study
    done = read_results(plan.directory).finished if has_study else set()
    for trial in done:  # killed between its last evaluation and the removal of its checkpoints
        shutil.rmtree(run_path(plan.directory, *trial), ignore_errors=True)
    missing = [trial for trial in plan.trials() if trial not in done]
    errors: list[Exception] = []
    if missing:
        from rllib_srl.cli.tuning.trials import fit  # imports Ray, which --help does without

        study = plan.study
        print(f"{study.name}: {study.question}")
        print(f"{len(missing)} of {len(plan.trials())} trials to run ({len(plan.arms)} arms x {len(plan.seeds)} seeds)")
        print(f"each {study.budget:,} generated tokens in {study.num_stages} stages", flush=True)
        start_ray(verbose)
        write_study(plan.directory, plan.study)
        ENDING.last_words = lambda: how_to_resume
        try:
            configs = [config_of(plan, *trial) for trial in missing]
            errors = list(fit(configs, study, plan.directory / "tune", max_failures, verbose).errors)
        except BaseException as stop:
            stop.add_note(how_to_resume)
            raise
    else:
        print("all trials are finished", flush=True)
    show(plan.directory)
    for error in errors:
        print(f"error: {message_of(error)}", file=sys.stderr)
    left = set(plan.trials()) - read_results(plan.directory).finished
    if left:
        print(f"{len(left)} trials are not finished; {how_to_resume}", file=sys.stderr)
    return 1 if left else 0


def show(directory: Path) -> None:
    """Print the answer, the table of the arms, and the command that writes the report."""
    print(text_of(summary_of(read_results(directory))))
    print(f"report: {command('report', directory)}")


def max_failures_in(settings: dict[str, Any]) -> int:
    num = run_settings(settings).max_failures
    settings.pop("max_failures", None)
    return num


def _unknown(what: str, asked: Iterable[Any], known: Sequence[Any]) -> list[str]:
    errors = []
    for name in asked:
        if name not in known:
            near = nearest(name, known) if what == "arm" else ""
            hint = f"; did you mean {near}?" if near else ""
            errors.append(f"{what} {name!r} is unknown; expected some of {', '.join(map(str, known))}{hint}")
    return errors


USAGE = "%(prog)s [STUDY] [--storage DIR] [--resume] [--arms ARM ...] [--seeds N ...] [--short] [--SETTING VALUE ...]"
main = Program(__doc__, add_flags, run, usage=USAGE, without=(), refused=REFUSED, verbose=LIBRARIES)
