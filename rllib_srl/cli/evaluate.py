"""Evaluate a checkpoint or a model on held-out prompts.

    srl evaluate results/first --evaluation_duration 500      the newest checkpoint of a run
    srl evaluate results/first/checkpoint_000010 --evaluation_pass_k 8
    srl evaluate smollm2-135m --env compare --json accuracy.json

Prints greedy accuracy with its 95 % interval (Wilson), by domain if there are several, pass@k with
--evaluation_pass_k, and two baselines: always giving the most frequent answer of the training prompts, and guessing.
A checkpoint is evaluated with the settings of its run; flags override them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rllib_srl.cli.shared import baselines, runs
from rllib_srl.cli.shared.display import Progress, showing_progress, table, with_interval
from rllib_srl.cli.shared.flags import LIBRARIES, Program, add_trust
from rllib_srl.cli.shared.settings import SettingsError, build_config, check, given_settings
from rllib_srl.cli.shared.training import built
from rllib_srl.storage.checkpoints import verify_sealed

TRUST = "use the reward functions that the settings of someone else's run name; they are code"
WITHOUT = ("iterations", "max_failures", "model")  # settings of training, or decided by what is evaluated


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="CHECKPOINT|DIR|MODEL", help="a checkpoint, a run's directory, or a model")
    text = 'write all results to FILE as JSON; "-": print only the JSON'
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)
    add_trust(parser, TRUST)


def evaluate(arguments: argparse.Namespace) -> int:
    flags = given_settings(arguments, WITHOUT)
    options = (arguments.trust_checkpoint, flags.get("seal_key_file"))
    checkpoint, settings = runs.source_of(arguments.what, *options, needs_settings=False)
    if checkpoint:
        verify_sealed(checkpoint)
    if not settings and "env" not in flags and "envs" not in flags:
        raise SettingsError(f"{arguments.what} has no {runs.SETTINGS_FILE}; expected its settings by --config")
    figures = measured({**settings, **flags}, checkpoint, arguments.verbose, arguments.json == Path("-"))
    title = f"{figures['what']} on {', '.join(figures['envs'])}"
    report(figures, [title, table(list(rows_of(figures)))], arguments.json)
    return 0


def report(figures: Mapping[str, Any], lines: Sequence[str], path: Path | None) -> None:
    """Print lines and write figures as JSON to a file; "-": print only the JSON; None: print only the lines."""
    text = json.dumps(figures, indent=1) + "\n"
    if path == Path("-"):
        print(text, end="")
        return
    print(*lines, sep="\n")
    if path:
        path.write_text(text, encoding="utf-8")


def measured(values: Mapping[str, Any], checkpoint: Path | None, verbose: bool, is_quiet: bool) -> dict[str, Any]:
    """Evaluate and return all metrics; leave no files behind."""
    with (
        showing_progress(1, sys.stderr if is_quiet else None) as progress,
        started(values, checkpoint, verbose, progress) as algo,
    ):
        config = algo.config
        progress.begin(f"playing up to {config.evaluation_duration} held-out prompts ...")
        results = algo.evaluate()
        prompts = algo.source.heldout(config.evaluation_duration)
        reference = baselines.baselines(config, prompts, algo.seed)
        return {
            "what": str(checkpoint or values["model"]),
            "engine": config.engine,
            "iteration": algo.iteration,
            "envs": list(config.env_configs()),
            "dtype": config.compute_dtype,
            "pass_k": config.evaluation_pass_k,
            "baselines": asdict(reference),
            **{name: value for name, value in results.items() if name != "env_runners"},
            "reward": results["env_runners"]["episode_return_mean"],
        }


@contextmanager
def started(
    values: Mapping[str, Any], checkpoint: Path | None, verbose: bool, progress: Progress
) -> Iterator[Any]:
    """Start an algorithm to evaluate a checkpoint's weights; None: those of the model. Leave no files behind."""
    with tempfile.TemporaryDirectory(prefix="rllib_srl-") as scratch:
        changed = {"log_directory": scratch, "checkpoint_every": 0, "evaluation_interval": 1, "callbacks": None}
        config = build_config({**values, **changed})
        check(config)
        with built(config, verbose, progress) as algo:
            if checkpoint:
                algo.restore_weights(checkpoint)
            yield algo


def rows_of(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "greedy accuracy, 95 % interval", with_interval(figures)
    if len(figures["by_domain"]) > 1:
        for domain, result in figures["by_domain"].items():
            yield f"  {domain}", f"{result['accuracy']:.3f}"
    if figures["pass_k"]:
        yield "pass@1, sampled", f"{figures['pass_at_1']:.3f}"
        yield f"pass@{figures['pass_k']}", f"{figures['pass_at_k']:.3f}"
        yield f"pass^{figures['pass_k']}, all correct", f"{figures['pass_hat_k']:.3f}"
        yield "two sampled answers differ", f"{figures['answer_diversity']:.3f}"
    yield from baselines.rows_of(baselines.Baselines(**figures["baselines"]))
    lost = f" ({figures['num_lost']} failed, not counted)" if figures["num_lost"] else ""
    yield "held-out prompts", f"{figures['num_prompts']}{lost}"
    if not math.isclose(figures["reward"], figures["accuracy"], abs_tol=1e-9):
        yield "mean reward", f"{figures['reward']:.3f}"


USAGE = "%(prog)s CHECKPOINT|DIR|MODEL [--json FILE] [--SETTING VALUE ...]"
main = Program(__doc__, add_flags, evaluate, usage=USAGE, without=WITHOUT, verbose=LIBRARIES)

