"""Measure whether correcting predicted recall in a run lowers its log loss on reviews that were not fitted to.

    python -m scripts.bench.recall                       3 seeds of 240 iterations, without a model, some minutes
    python -m scripts.bench.recall --seeds 1 --iterations 120 --json FILE

Two domains in turn, 40 iterations each, on the stub engine (docs/stub.md), whose skills decay while the other domain
trains. Half of the prompts are revisits. Four sides: off; a line every `--recalibrate-every` iterations; refits of the
rule every `--refit-every`; both.

    same reviews   the log of the run with corrections off; predictions are made anew, with fits to earlier reviews only
    own reviews    a run of each side; the predictions that its memory acted on

Log loss is in nats an episode, over all reviews with a prediction, those before the first fit included. The gain is
that of a side over "off", with a standard error clustered by item (all seeds together). The constant is the best one in
hindsight.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when the libraries are loaded

import numpy as np

from rllib_srl import SRLConfig
from rllib_srl.cli.shared.cluster import run_cleanly, start_ray
from rllib_srl.cli.shared.command_line import help_of
from rllib_srl.replay.journal.reader import reading
from rllib_srl.replay.schedule.calibration import ReviewLog, cross_entropy_N, report
from rllib_srl.replay.schedule.correction import Correction
from rllib_srl.replay.schedule.refit import whole_log
from rllib_srl.replay.schedule.review_log import RECENT
from rllib_srl.replay.schedule.spacing.fitting import Histories
from rllib_srl.replay.settings import ReplaySettings
from scripts.bench.common import add_output, write

WORLDS = {"compare": {"num_shots": 0}, "chain_sum": {"num_shots": 0}}
STAGE = 40  # iterations of one domain
LAW = {"name": "stub", "learns": 0.2, "forgets": 0.1}
OFF = "off"


def stages(num_iterations: int) -> list[list[object]]:
    """Return the schedule of a stream whose domains take turns."""
    starts = range(0, num_iterations, STAGE)
    names = [list(WORLDS)[n % 2] for n in range(len(starts))]
    return [[at, {name: 1.0}] for start, name in zip(starts, names) for at in (start, start + STAGE - 1)]


def log_of(seed: int, num_iterations: int, spacing: str, every: Mapping[str, Any], directory: Path) -> ReviewLog:
    """Train without a model; return the run's reviews."""
    entries = [{"world": name, "domain": name, "env_config": own} for name, own in WORLDS.items()]
    config = (
        SRLConfig()
        .environment(stream={"domains": entries, "schedule": stages(num_iterations)})
        .rl_module(model_config={"model": "tiny"})
        .env_runners(engine=dict(LAW), num_env_runners=0, num_transcripts=0)
        .training(num_prompts_per_batch=8, group_size=4, checkpoint_every=0, log_directory=str(directory))
        .replay(revisit_fraction=0.5, reuse_fraction=0.0, spacing={"name": spacing, **every})
        .replay(selection="srl", load_control="throttle_new", leeches=8, diversity=0.5)  # which acts on predictions
        .debugging(seed=seed)
    )
    algo = config.build_algo()
    try:
        for _ in range(num_iterations):
            algo.train()
    finally:
        algo.stop()
    with reading(directory) as memory:
        return whole_log(memory)


def predicted_in_turn(log: ReviewLog, spacing: str, every: Mapping[str, Any]) -> ReviewLog:
    """Return the log with the predictions that a memory with these corrections makes before each iteration's visits."""
    correction, whole = Correction(ReplaySettings(spacing=spacing, **every)), Histories(log)
    raw_N = whole.predict(correction.rule, log)
    predicted_N = np.full(len(log), np.nan)
    for now in np.unique(log.now).tolist():
        if correction.is_due(now):
            fits = correction.fit(log[log.now < now][-RECENT:], now)
            raw_N = whole.predict(correction.rule, log) if fits.is_refitted else raw_N
        at_N = (log.now == now) & ~np.isnan(raw_N)
        predicted_N[at_N] = correction.line(raw_N[at_N])
    return ReviewLog.from_arrays({**log.to_arrays(), "predicted": predicted_N})


def joined(logs: Sequence[ReviewLog]) -> ReviewLog:
    """Return the reviews of all seeds as one log; each seed's items stay its own."""
    arrays = [{**log.to_arrays(), "key": log.key + np.uint64(seed)} for seed, log in enumerate(logs)]
    return ReviewLog.from_arrays({name: np.concatenate([one[name] for one in arrays]) for name in arrays[0]})


def gain_over(log: ReviewLog, base: ReviewLog) -> tuple[float, float]:
    """Return the mean log loss of `base` minus that of `log`, of the same reviews, and its error clustered by item."""
    log, base = log.predictable(), base.predictable()
    gain_N = cross_entropy_N(base.predicted, base.num_success, base.n) - cross_entropy_N(
        log.predicted, log.num_success, log.n
    )
    num = float(log.n.sum())
    _, item_N = np.unique(log.key, return_inverse=True)
    residual_K = np.bincount(item_N, gain_N - gain_N.sum() / num * log.n)
    num_items = len(residual_K)
    return float(gain_N.sum()) / num, float(np.sqrt(num_items / (num_items - 1) * (residual_K**2).sum())) / num


def figures_of(log: ReviewLog) -> dict[str, float]:
    """Return the losses of a log's predictions."""
    found = report(log)
    return {
        "reviews": found.num_reviews,
        "log_loss": found.log_loss,
        "constant": found.log_loss_constant,
        "calibration_error": found.calibration_error,
    }


def measure(arguments: argparse.Namespace) -> int:
    """Run every side on every seed and print both tables."""
    start_ray(False)
    line, rule = {"recalibrate_every": arguments.recalibrate_every}, {"refit_every": arguments.refit_every}
    sides = {OFF: {}, "recalibrated": line, "refitted": rule, "both": {**line, **rule}}
    own: dict[str, list[ReviewLog]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in arguments.seeds:
            for side, every in sides.items():
                directory = Path(scratch) / f"{seed}.{side}"
                own[side].append(log_of(seed, arguments.iterations, arguments.spacing, every, directory))
    figures: dict[str, dict[str, dict[str, float]]] = {"same reviews": {}, "own reviews": {}}
    logs = {
        side: joined([predicted_in_turn(log, arguments.spacing, every) for log in own[OFF]])
        for side, every in sides.items()
    }
    for side in sides:
        gain, error = gain_over(logs[side], logs[OFF])
        figures["same reviews"][side] = {**figures_of(logs[side]), "gain": gain, "gain_error": error}
        figures["own reviews"][side] = figures_of(joined(own[side]))
    for title, rows in figures.items():
        print(title)
        for side, row in rows.items():
            print(f"  {side:14s}" + "".join(f"  {name} {value:.4g}" for name, value in row.items()))
    write(arguments, "recall", figures)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--iterations", type=int, default=240, metavar="N")
    parser.add_argument("--spacing", default="fsrs", help="a rule's name (default: %(default)s)")
    parser.add_argument("--recalibrate-every", type=int, default=10, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--refit-every", type=int, default=50, metavar="N", help="(default: %(default)s)")
    add_output(parser)
    arguments = parser.parse_args(argv)
    return run_cleanly(lambda: measure(arguments), debug=True)


if __name__ == "__main__":
    raise SystemExit(main())
