"""Run a search of tune_configs: Ray Tune varies some settings, and the trials are listed, the best first.

Flags change the search's settings for all trials. Its directory is Tune's own; `--resume` keeps the trials that
finished without an error and restarts the others.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.search.variant_generator import generate_variants

from rllib_srl import SRL, SRLConfig, register
from rllib_srl.cli.shared.cluster import message_of, start_ray
from rllib_srl.cli.shared.display import rounded, table
from rllib_srl.cli.shared.runs import RunError
from rllib_srl.cli.shared.settings import apply_settings
from rllib_srl.cli.tuning.plan import check_directory, from_anywhere
from rllib_srl.tune_configs import Search


def with_settings(search: Search, given: Mapping[str, Any]) -> Search:
    """Return a search with the given settings; a given setting is no longer varied."""
    values = from_anywhere(given)
    iterations = values.get("iterations", search.iterations)
    apply_settings(search.param_space, values)
    if search.metric.startswith("evaluation/") and not search.param_space.evaluation_interval:
        search.param_space.evaluation(evaluation_interval=iterations)
    return replace(search, iterations=iterations, varied=tuple(name for name in search.varied if name not in values))


def run(name: str, search: Search, arguments: argparse.Namespace) -> int:
    """Run a search; return the exit status."""
    for flag in ("arms", "seeds", "short", "trust_checkpoint"):
        if getattr(arguments, flag):
            name_of_flag = flag.replace("_", "-")
            raise RunError(
                f"--{name_of_flag} is for studies of arms; {name!r} is a search: set its settings by flags"
            )
    target = arguments.storage.absolute() / name
    check_directory(target, arguments.resume, arguments.resume and tune.Tuner.can_restore(str(target)))
    start_ray(arguments.verbose)
    register()  # again: Tune's registry belongs to the running Ray, which has just started
    num_trials, needed = checked_trials(search)
    at_once = min(num_trials, num_at_once(needed, ray.cluster_resources()))
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in needed.items())
    each = f"{search.iterations} iterations on {amounts}"
    print(f"{num_trials} trials, each {each}; {at_once} in parallel", flush=True)
    results = tuner(search, arguments, target).fit()
    print(table(list(rows_of(results, search))))
    print(f"all files   {target}")
    for error in results.errors:
        print(f"error: {message_of(error)}", file=sys.stderr)
    return 1 if results.errors else 0


def checked_trials(search: Search) -> tuple[int, dict[str, float]]:
    """Validate the settings of each trial, and that it fits the cluster.

    Returns:
        The number of trials, and the resources of one trial; if they differ, the maximum of each.

    Raises:
        ValueError: all errors in a trial's settings.
        PlacementError: a trial needs more than the cluster has.
    """
    num_trials, needed = 0, dict[str, float]()
    for _, variant in generate_variants({"config": search.param_space.to_dict()}):
        SRLConfig().update_from_dict(variant["config"]).validate()
        for resource, amount in SRL.default_resource_request(variant["config"]).required_resources.items():
            needed[resource] = max(needed.get(resource, 0.0), amount)
        num_trials += 1
    return num_trials * search.num_samples, needed


def num_at_once(needed: Mapping[str, float], cluster: Mapping[str, float]) -> int:
    """Return the number of trials that the cluster can run concurrently."""
    return min(math.floor(cluster.get(name, 0.0) / n + 1e-9) for name, n in needed.items() if n)


class Lines(tune.Callback):
    """Prints a line for each result of a trial."""

    def __init__(self, search: Search) -> None:
        """Label trials by the settings that `search` varies."""
        self._search = search

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Print reward, and accuracy if it was measured, with the trial's settings.

        Trap: Tune calls its scheduler first, so a trial that copies another already has its new settings.
        """
        text = f"{label(result['config'], self._search)}: "
        text += f"iteration {result['training_iteration']}/{self._search.iterations}"
        text += f"  reward {rounded(result['env_runners']['episode_return_mean'])}"
        if "evaluation" in result:
            text += f"  held-out accuracy {rounded(result['evaluation']['accuracy'])}"
        print(text, flush=True)


def label(config: Mapping[str, Any], search: Search) -> str:
    """Return "lr=3e-05 seed=1"."""
    return " ".join(f"{name}={config[name]}" for name in search.varied) or "trial"


def tuner(search: Search, arguments: argparse.Namespace, target: Path) -> tune.Tuner:
    """Return Tune's tuner, new or restored."""
    scheduler = search.scheduler(search.iterations) if search.scheduler else None
    if arguments.resume:
        return tune.Tuner.restore(str(target), "SRL", param_space=search.param_space, restart_errored=True)
    return tune.Tuner(
        "SRL",
        param_space=search.param_space,
        # without the metric: Tune would require it in every result, but evaluation comes last
        tune_config=tune.TuneConfig(num_samples=search.num_samples, scheduler=scheduler),
        run_config=tune.RunConfig(
            name=target.name,
            storage_path=str(target.parent),
            stop={"training_iteration": search.iterations},
            failure_config=tune.FailureConfig(max_failures=arguments.max_failures),
            callbacks=[Lines(search)],
            verbose=int(arguments.verbose),
        ),
    )


def rows_of(results: tune.ResultGrid, search: Search) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of trials, the best first."""
    yield (*search.varied, search.metric, "reward", "seconds")
    found = []
    for result in results:
        metrics = result.metrics or {}
        value: Any = metrics
        for level in search.metric.split("/"):
            value = value.get(level, {}) if isinstance(value, Mapping) else {}
        found.append((value if isinstance(value, int | float) else math.nan, result.config or {}, metrics))
    sign = -1 if search.mode == "max" else 1
    for value, config, metrics in sorted(found, key=lambda row: (math.isnan(row[0]), sign * row[0])):
        reward = metrics.get("env_runners", {}).get("episode_return_mean")
        unknown = f"stopped at {metrics['training_iteration']}" if "training_iteration" in metrics else "failed"
        shown = unknown if math.isnan(value) else f"{value:.3f}"
        varied = (str(config.get(name, "-")) for name in search.varied)
        yield (*varied, shown, rounded(reward), f"{metrics.get('time_total_s', 0):.0f}")
