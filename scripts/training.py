"""Start an algorithm from a plan, and iterate it while progress is shown and numbers are logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rllib_srl import SRLConfig
from scripts.cluster import StopRequest, hushed_stderr
from scripts.display import Progress, with_interval
from scripts.run_log import Iteration, RunLog
from scripts.runs import RunPlan, write_settings
from scripts.settings import SettingsError


def start(config: SRLConfig, plan: RunPlan, last: int, verbose: bool) -> Any:
    """Return the algorithm, at the plan's checkpoint if it has one; write the run's settings once it stands.

    Raises:
        SettingsError: the checkpoint is of iteration `last` or a later one.
    """
    with hushed_stderr(verbose):
        algo = config.build_algo()
    try:
        if plan.checkpoint is not None:
            algo.restore_from_path(str(plan.checkpoint))
        if algo.iteration >= last:
            raise SettingsError(f"the run is at iteration {algo.iteration} already; expected --iterations above that")
        write_settings(plan.directory, plan.values, algo)
    except BaseException:
        algo.stop()
        raise
    return algo


def train_until(
    algo: Any, last: int, directory: Path, progress: Progress, request: StopRequest | None = None
) -> list[Iteration]:
    """Train up to iteration `last`, or until a stop is asked for; return the iterations done."""
    log = RunLog(directory)
    done: list[Iteration] = []
    try:
        while algo.iteration < last and not (request and request.is_made):
            if not done:
                progress.begin(f"iteration {algo.iteration + 1}/{last} ...")
            result = algo.train()
            iteration = Iteration.of(result)
            done.append(iteration)
            log.write(iteration.number, result)
            progress.iteration(iteration.number, iteration.reward, iteration.tokens_per_s, iteration.seconds)
            if evaluation := result.get("evaluation"):
                shown = with_interval(*(evaluation[name] for name in ("accuracy", "accuracy_low", "accuracy_high")))
                progress.note(f"iteration {iteration.number}: held-out accuracy {shown}")
    finally:
        log.close()
    return done


def empty_or_new(directory: Path) -> None:
    """Refuse a directory to export into that holds something, before hours are spent.

    Raises:
        FileExistsError: it does.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"--export {directory} is not empty; expected a new directory")
