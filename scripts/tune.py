#!/usr/bin/env python3
"""Run a study of tune_configs with Ray Tune; without a name, list them.

    python scripts/tune.py
    python scripts/tune.py learning_rate
    python scripts/tune.py learning_rate --model tiny --engine transformers --num_cpus_per_env_runner 0.5
    python scripts/tune.py learning_rate --resume

Flags change the study's settings for all trials. Results lie under --storage, one directory a study, which is never
overwritten; --resume keeps the trials that ended well and starts the others again.
"""

from __future__ import annotations

import argparse
import importlib
import math
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages
    from scripts.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

import ray
from ray import tune
from ray.tune.search.variant_generator import generate_variants

import tune_configs
from rllib_srl import SRL, SRLConfig, register
from scripts.cluster import message_of, run_cleanly, start_ray
from scripts.display import rounded, table
from scripts.runs import RunError
from scripts.settings import ITERATIONS, add_settings, apply_settings, given_settings, with_underscores
from tune_configs import Study


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        usage="%(prog)s [STUDY] [--storage DIR] [--resume] [--SETTING VALUE ...]",
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("study", nargs="?", help="a file of tune_configs/, without .py")
    parser.add_argument("--storage", type=Path, default=Path("results/tune"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with the study that lies under --storage")
    parser.add_argument("--verbose", action="store_true", help="show what Ray, Tune, vLLM and transformers say")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_settings(parser)
    return parser.parse_args(with_underscores(argv))


def studies() -> dict[str, str]:
    """Return the names of all studies and the questions they ask."""
    names = sorted(module.name for module in pkgutil.iter_modules(tune_configs.__path__))
    modules = {name: module_of(name) for name in names}  # `streams` is what studies train on, and no study
    asking = {name: module for name, module in modules.items() if hasattr(module, "study")}
    return {name: (module.__doc__ or "").partition("\n")[0] for name, module in asking.items()}


def module_of(name: str) -> Any:
    """Return the module of a study."""
    return importlib.import_module(f"tune_configs.{name}")


def load(name: str, given: Mapping[str, Any]) -> Study:
    """Return a study with the given settings in it.

    Raises:
        RunError: there is no such study.
    """
    known = studies()
    if name not in known:
        raise RunError(f"study {name!r} is unknown; expected one of {', '.join(known)}")
    study = module_of(name).study()
    values = dict(given)
    if "model" in values and Path(values["model"]).is_dir():
        values["model"] = str(Path(values["model"]).absolute())  # trials run in directories of their own
    iterations = values.get(ITERATIONS.name, study.iterations)
    apply_settings(study.param_space, values)
    if study.metric.startswith("evaluation/") and not study.param_space.evaluation_interval:
        study.param_space.evaluation(evaluation_interval=iterations)
    return replace(study, iterations=iterations, varied=tuple(name for name in study.varied if name not in values))


def checked_trials(study: Study) -> tuple[int, dict[str, float]]:
    """Check each trial's settings and that the cluster can hold it.

    Returns:
        The number of trials, and the resources of one; of several kinds, the largest of each.

    Raises:
        ValueError: all faults of a trial's settings.
        PlacementError: a trial asks for more than the cluster has.
    """
    num_trials, needed = 0, dict[str, float]()
    for _, variant in generate_variants({"config": study.param_space.to_dict()}):
        SRLConfig().update_from_dict(variant["config"]).validate()
        for resource, amount in SRL.default_resource_request(variant["config"]).required_resources.items():
            needed[resource] = max(needed.get(resource, 0.0), amount)
        num_trials += 1
    return num_trials * study.num_samples, needed


def num_at_once(needed: Mapping[str, float], cluster: Mapping[str, float]) -> int:
    """Return how many trials the cluster runs at the same time."""
    return min(math.floor(cluster.get(name, 0.0) / n + 1e-9) for name, n in needed.items() if n)


class Lines(tune.Callback):
    """Prints a line for each result of a trial."""

    def __init__(self, study: Study) -> None:
        """Name trials by what `study` varies."""
        self._study = study

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        """Print reward, and accuracy where it was measured."""
        text = f"{label(trial.config, self._study)}: iteration {result['training_iteration']}/{self._study.iterations}"
        text += f"  reward {rounded(result['env_runners']['episode_return_mean'])}"
        if "evaluation" in result:
            text += f"  held-out accuracy {rounded(result['evaluation']['accuracy'])}"
        print(text, flush=True)


def label(config: Mapping[str, Any], study: Study) -> str:
    """Return "lr=3e-05 seed=1"."""
    return " ".join(f"{name}={config[name]}" for name in study.varied) or "trial"


def run(arguments: argparse.Namespace) -> int:
    """Run a study, or list them; return the exit status."""
    if arguments.study is None:
        print("studies, for python scripts/tune.py STUDY:\n" + table(list(studies().items())))
        return 0
    study = load(arguments.study, given_settings(arguments))
    target = arguments.storage.absolute() / arguments.study
    if target.exists() and not arguments.resume:
        raise RunError(f"{target} holds this study already; give another --storage, or go on with it: --resume")
    if arguments.resume and not tune.Tuner.can_restore(str(target)):
        raise RunError(f"{target} holds no study to resume; leave --resume out to start it")
    start_ray(arguments.verbose)
    register()  # once more: Tune's registry belongs to the Ray that runs, and this one has just started
    num_trials, needed = checked_trials(study)
    at_once = min(num_trials, num_at_once(needed, ray.cluster_resources()))
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in needed.items())
    each = f"{study.iterations} iterations on {amounts}"
    print(f"{num_trials} trials, each {each}; {at_once} run at once", flush=True)
    results = tuner(study, arguments, target).fit()
    print(table(list(rows_of(results, study))))
    print(f"all files   {target}")
    for error in results.errors:
        print(f"error: {message_of(error)}", file=sys.stderr)
    return 1 if results.errors else 0


def tuner(study: Study, arguments: argparse.Namespace, target: Path) -> tune.Tuner:
    """Return Tune's tuner, new or restored."""
    if arguments.resume:
        return tune.Tuner.restore(str(target), "SRL", param_space=study.param_space, restart_errored=True)
    return tune.Tuner(
        "SRL",
        param_space=study.param_space,
        # without the metric: Tune would demand it of every result, and evaluation comes last
        tune_config=tune.TuneConfig(num_samples=study.num_samples),
        run_config=tune.RunConfig(
            name=target.name,
            storage_path=str(target.parent),
            stop={"training_iteration": study.iterations},
            callbacks=[Lines(study)],
            verbose=int(arguments.verbose),
        ),
    )


def rows_of(results: tune.ResultGrid, study: Study) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of trials, the best first."""
    yield (*study.varied, study.metric, "reward", "seconds")
    found = []
    for result in results:
        metrics = result.metrics or {}
        value: Any = metrics
        for level in study.metric.split("/"):
            value = value.get(level, {}) if isinstance(value, Mapping) else {}
        found.append((value if isinstance(value, int | float) else math.nan, result.config or {}, metrics))
    sign = -1 if study.mode == "max" else 1
    for value, config, metrics in sorted(found, key=lambda row: (math.isnan(row[0]), sign * row[0])):
        reward = metrics.get("env_runners", {}).get("episode_return_mean")
        shown = "failed" if math.isnan(value) else f"{value:.3f}"
        varied = (str(config.get(name, "-")) for name in study.varied)
        yield (*varied, shown, rounded(reward), f"{metrics.get('time_total_s', 0):.0f}")


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: run(arguments), arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
