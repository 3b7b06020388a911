"""Run the trials of a study through Ray Tune, two or more at once, and show the results.

    trials     whole pairs first, with the time left
    results    the table of `srl report`'s main figures, and whether the primary comparison holds

Finished trials are recorded in the study's directory (`rllib_srl.studies`), not in Tune's: a killed study is resumed
from there, finished trials are not run again, and the others continue from their last checkpoint.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import tune

from rllib_srl.cli.shared.cluster import command, message_of, start_ray
from rllib_srl.cli.shared.display import duration, table
from rllib_srl.cli.shared.settings import run_settings
from rllib_srl.cli.shared.stopping import WATCH
from rllib_srl.cli.tuning.plan import Plan, check_directory, config_of
from rllib_srl.storage.checkpoints import checkpoints_in, verify_own
from rllib_srl.studies.contrasts import (
    Contrast,
    curves_of,
    findings_of,
    verdict_of,
    warnings_of,
)
from rllib_srl.studies.measures import COSTS, MEASURES
from rllib_srl.studies.recording import finished_trials, write_study
from rllib_srl.studies.report.story import MAIN, number, span
from rllib_srl.studies.results import STUDY_FILE, read_results
from rllib_srl.studies.trial import CONFIG, StudyTrial, run_path

NO_LOGGERS = "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"
VERDICTS = {True: "holds", False: "does not hold", None: "undecided"}


class Run(NamedTuple):
    """How the trials of a study are run."""

    is_resumed: bool
    trusts: bool  # checkpoints sealed with any key
    verbose: bool
    max_failures: int  # new starts of a trial

    @classmethod
    def of(cls, arguments: argparse.Namespace, given: dict[str, Any]) -> Run:
        """Return what a command line says; the settings of `RunSettings` are taken out of `given`."""
        how_long = run_settings(given)
        WATCH.grace_s = how_long.grace_s
        for name in ("grace_s", "max_failures"):
            given.pop(name, None)
        return cls(bool(arguments.resume), arguments.trust_checkpoint, arguments.verbose, how_long.max_failures)


def run(plan: Plan, how: Run) -> int:
    """Run a study; return the exit status: 1 if a requested trial is not finished."""
    check_directory(plan.directory, how.is_resumed, (plan.directory / STUDY_FILE).is_file())
    errors: list[Exception] = []
    if missing := missing_of(plan, how.is_resumed):
        if not how.trusts:
            check_seals(plan, missing)
        start_ray(how.verbose)
        needed = needed_of(plan)
        at_once = min(len(missing), num_at_once(needed, ray.cluster_resources()))
        announce(plan, missing, at_once, needed)
        write_study(plan.directory, plan.study)
        try:
            errors = play(plan, missing, how)
        except BaseException as stop:
            stop.add_note(WATCH.last_words())
            raise
    else:
        print("all trials are finished", flush=True)
    show(plan)
    for error in errors:
        print(f"error: {message_of(error)}", file=sys.stderr)
    left = set(plan.trials()) - finished_trials(plan.directory, plan.study)
    if left:
        print(f"{len(left)} trials are not finished; {WATCH.last_words()}", file=sys.stderr)
    return 1 if left else 0


def missing_of(plan: Plan, is_resumed: bool) -> list[tuple[str, int]]:
    """Return arm and seed of the trials to run: all, or those that an earlier run has not finished.

    Leftovers of finished trials are deleted.
    """
    done = finished_trials(plan.directory, plan.study) if is_resumed else set()
    for trial in done:  # killed between its last row and the removal of its checkpoints
        shutil.rmtree(run_path(plan.directory, *trial), ignore_errors=True)
    return [trial for trial in plan.trials() if trial not in done]


def check_seals(plan: Plan, missing: Sequence[tuple[str, int]]) -> None:
    """Check, before anything starts, that the checkpoints to resume from are sealed with this user's key.

    Raises:
        CheckpointError: a checkpoint is sealed with another key, or damaged.
    """
    for arm, seed in missing:
        if found := checkpoints_in(run_path(plan.directory, arm, seed)):
            verify_own(found[-1], plan.study.settings_of(arm, seed).get("seal_key_file"))


def needed_of(plan: Plan) -> dict[str, float]:
    """Return the resources of one trial; if arms differ, the maximum of each.

    Raises:
        PlacementError: a trial needs more than the cluster has.
    """
    needed: dict[str, float] = {}
    for arm in plan.arms:
        request = StudyTrial.default_resource_request(config_of(plan, arm, plan.seeds[0], plan.directory))
        for resource, amount in request.required_resources.items():
            needed[resource] = max(needed.get(resource, 0.0), amount)
    return needed


def num_at_once(needed: Mapping[str, float], cluster: Mapping[str, float]) -> int:
    """Return the number of trials that the cluster can run concurrently."""
    return min(math.floor(cluster.get(name, 0.0) / n + 1e-9) for name, n in needed.items() if n)


def announce(plan: Plan, missing: Sequence[tuple[str, int]], at_once: int, needed: Mapping[str, float]) -> None:
    """Print the trials to run and their resources."""
    study, amounts = plan.study, ", ".join(f"{amount:g} {name}" for name, amount in needed.items())
    print(f"{study.name}: {study.question}")
    size = f"{study.budget:,} generated tokens in {study.num_stages} stages"
    print(f"{len(missing)} of {len(plan.trials())} trials to run ({len(plan.arms)} arms x {len(plan.seeds)} seeds)")
    print(f"each {size}, on {amounts}; {at_once} in parallel", flush=True)


# --- trials --------------------------------------------------------------------------------------


class Lines(tune.Callback):
    """Prints a line at the end of each stage of a trial, with the remaining time of all trials."""

    def __init__(self, plan: Plan, missing: Sequence[tuple[str, int]]) -> None:
        """Show progress through the trials in `missing`."""
        self._study, self._num, self._start = plan.study, len(missing), time.monotonic()
        self._tokens: dict[tuple[str, int], int] = {}
        self._first: dict[tuple[str, int], int] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Print the end of a stage."""
        about = result["study"]
        key = (about["arm"], about["seed"])
        self._first.setdefault(key, about["num_generated_tokens"])
        self._tokens[key] = about["num_generated_tokens"]
        if "accuracy" not in about:
            return
        done = sum(tokens >= self._study.budget for tokens in self._tokens.values())
        text = f"{key[0]} seed {key[1]}: stage {about['stage'] + 1}/{self._study.num_stages}"
        text += f"  average accuracy {about['accuracy']:.3f}  {about['num_generated_tokens']:,} tokens"
        print(f"{text}  {done}/{self._num} trials  {self._left()}", flush=True)

    def _left(self) -> str:
        written = sum(tokens - self._first[key] for key, tokens in self._tokens.items())
        ahead = self._num * self._study.budget - sum(min(n, self._study.budget) for n in self._tokens.values())
        if not written or not ahead:
            return "done" if not ahead else ""
        return f"{duration((time.monotonic() - self._start) * ahead / written)} left"


def play(plan: Plan, missing: Sequence[tuple[str, int]], how: Run) -> list[Exception]:
    """Run the trials as `fit` does; return the errors."""
    configs = [config_of(plan, arm, seed, plan.directory, trust=how.trusts) for arm, seed in missing]
    name, callbacks = time.strftime("%Y%m%d-%H%M%S"), [Lines(plan, missing)]
    return list(fit(configs, plan.directory / "tune", name, callbacks, how.verbose, how.max_failures).errors)


def fit(
    configs: Sequence[dict[str, Any]],
    storage: Path,
    name: str,
    callbacks: list[tune.Callback],
    verbose: bool,
    retries: int = 0,
) -> tune.ResultGrid:
    """Run one trial per config; one that fails is started again `retries` times, and goes on from its checkpoint."""

    def named(trial: Any) -> str:
        told = trial.config[CONFIG]["_study"]
        return f"{told['arm']}--{told['seed']}"

    tuner = tune.Tuner(
        StudyTrial,
        param_space={CONFIG: tune.grid_search(list(configs))},
        tune_config=tune.TuneConfig(trial_name_creator=named, trial_dirname_creator=named),
        run_config=tune.RunConfig(
            name=name,
            storage_path=str(storage),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            failure_config=tune.FailureConfig(max_failures=retries),
            callbacks=callbacks,
            verbose=int(verbose),
        ),
    )
    with without_loggers():
        return tuner.fit()


@contextmanager
def without_loggers() -> Iterator[None]:
    """Disable Tune's loggers: the study's rows are the record, and Tune's logs would be megabytes per trial."""
    before = os.environ.get(NO_LOGGERS)
    os.environ[NO_LOGGERS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_LOGGERS]
        else:
            os.environ[NO_LOGGERS] = before


# --- results -------------------------------------------------------------------------------------


def show(plan: Plan) -> None:
    """Print the table, the verdict, and the command that writes the report."""
    results = read_results(plan.directory)
    curves = curves_of(results)
    findings = findings_of(curves)
    titles = [MEASURES[name].title for name in MAIN] + [COSTS[name].title for name in COSTS]
    rows = [("arm", "trials", *titles)]
    for arm in results.study.arms:
        cells = [f"{len(results.of(arm.name))}/{len(results.study.seeds)}"]
        for name in MAIN:
            found, unit = findings[arm.name][name], MEASURES[name].unit
            cells.append(f"{number(found.mean, unit)} ({span(*found.interval, unit)})")
        cells += [number(findings[arm.name][name].mean, COSTS[name].unit) for name in COSTS]
        rows.append((arm.name, *cells))
    print(table(rows))
    verdict = verdict_of(results, findings)
    primary = results.study.primary
    against = f"{primary.treatment} against {', '.join(primary.controls)}"
    print(f"primary comparison, {against}: {VERDICTS[verdict.holds]}")
    for contrast in verdict.contrasts:
        print(f"  {line_of(contrast)}")
    for line in [*verdict.reasons, *warnings_of(results, findings)]:
        print(f"  {line}")
    print(f"report: {command('report', plan.directory)}")


def line_of(contrast: Contrast) -> str:
    """Return a difference with its interval and p value."""
    unit = MEASURES[contrast.measure].unit
    text = f"{MEASURES[contrast.measure].title}, {contrast.first} minus {contrast.second}: "
    text += f"{number(contrast.mean, unit, signed=True)} ({span(*contrast.interval, unit, signed=True)})"
    return f"{text}, p = {contrast.p_holm:.2g} after correction, {len(contrast.differences)} pairs"
