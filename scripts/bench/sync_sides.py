#!/usr/bin/env python3
"""Compare the share of the weight sync in an iteration of the quick-start between two commits, in one run.

    python -m scripts.bench.sync_sides --before COMMIT

The two sides run in turns, each time in a process of its own with an engine of its own, on the settings of the
quick-start. Wall time and processor time are given: the latter, of learner and engine together, hardly depends on what
else the machine does. The share of an iteration is that of one with the same number of threads and tokens.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

from rllib_srl.cli.shared.cluster import run_cleanly, start_ray
from rllib_srl.cli.shared.display import table
from scripts.bench import common as bench

SIDES = ("before", "after")
ROUND_TIMEOUT_S = 900
NUM_TRIES = 4  # Ray may not start on a busy machine
PARTS = ("pack_s", "put_s", "load_s", "learner_canary_s", "engine_canary_s")
Row = dict[str, float]


def clocks(pids: Sequence[int]) -> tuple[float, float]:
    """Return wall time and the processor time of all threads of some processes, seconds."""
    import psutil

    used = [psutil.Process(pid).cpu_times() for pid in pids]
    return time.perf_counter(), sum(one.user + one.system for one in used)


def measure(num_iterations: int, settings: Mapping[str, Any]) -> list[Row]:
    """Train with the package of this process; return one row for each update after the first."""
    start_ray(False)
    algo = bench.quickstart_config(**settings).build_algo()
    try:
        pids = {os.getpid(), *(int(algo.runners.where(i, 60)["pid"]) for i in algo.runners.ids)}
        spent: list[tuple[float, float]] = []
        algo._sync_weights = timed(algo._sync_weights, sorted(pids), spent)
        rows: list[Row] = []
        for _ in range(3 * num_iterations):
            spent.clear()
            start = clocks(sorted(pids))
            result = algo.train()
            wall, cpu = (now - then for now, then in zip(clocks(sorted(pids)), start, strict=True))
            if spent:  # an iteration without signal sends nothing
                row = {"wall": wall, "cpu": cpu, "sync_wall": spent[0][0], "sync_cpu": spent[0][1]}
                row |= {name: float(result["weight_sync"][name]) for name in ("canary_mean", *PARTS)}
                row |= {"rollout_wall": float(result["timers"]["rollout"])}
                row |= {"tokens": float(result["env_runners"]["num_generated_tokens"])}
                rows.append(row)
            if len(rows) > num_iterations:
                break
        return rows[1:]  # the first one warms up
    finally:
        algo.stop()


def timed(action: Callable[[], None], pids: Sequence[int], spent: list[tuple[float, float]]) -> Callable[[], None]:
    """Return an action that also appends its wall and processor time to `spent`."""

    def run() -> None:
        start = clocks(pids)
        action()
        end = clocks(pids)
        spent.append((end[0] - start[0], end[1] - start[1]))

    return run


def unpacked(commit: str, directory: Path) -> Path:
    """Write the package of a commit with these benchmarks into a directory and return it."""
    command = ["git", "-C", str(bench.ROOT), "archive", commit, "rllib_srl", "envs", "pyproject.toml"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=bench.GIT_TIMEOUT_S)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(directory, filter="data")
    shutil.copytree(bench.ROOT / "scripts", directory / "scripts")
    return directory


def one_round(root: Path, arguments: argparse.Namespace) -> list[Row]:
    """Run one side in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "scripts.bench.sync_sides", "--one-side", file.name]
        command += ["--num-iterations", str(arguments.num_iterations), "--set", *arguments.set]
        command += ["--model", arguments.model] if arguments.model else []
        environment = {**os.environ, "PYTHONPATH": str(root)}
        for _ in range(NUM_TRIES):
            if not subprocess.run(command, cwd=root, env=environment, timeout=ROUND_TIMEOUT_S, check=False).returncode:
                break
        rows: list[Row] = json.loads(Path(file.name).read_text(encoding="utf-8"))
    return rows


def lines(rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the table of both sides."""
    figures: dict[str, Callable[[Row], float]] = {
        "sync, share of wall time": lambda row: row["sync_wall"] / row["wall"],
        "sync, share of processor time": lambda row: row["sync_cpu"] / row["cpu"],
        "sync, seconds": lambda row: row["sync_wall"],
        "sync, processor seconds": lambda row: row["sync_cpu"],
        "iteration, seconds": lambda row: row["wall"],
        "iteration, processor seconds": lambda row: row["cpu"],
        "rollout, tokens a second": lambda row: row["tokens"] / row["rollout_wall"],
        "canary, mean gap in nats": lambda row: row["canary_mean"],
    }
    figures |= {f"  {name}": lambda row, name=name: row[name] for name in PARTS}  # type: ignore[misc]
    found = [
        (what, *(bench.spread([of(row) for row in rows[side]], 3) for side in SIDES)) for what, of in figures.items()
    ]
    share = {side: median(row["sync_cpu"] / row["cpu"] for row in rows[side]) for side in SIDES}
    return [
        table([("median (range)", *SIDES), *found], ""),
        f"{' and '.join(str(len(rows[side])) for side in SIDES)} updates; the learner's canary runs beside load after",
        f"share of processor time after over before: {share['after'] / share['before']:.2f}",
        bench.conditions("quick-start's format"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both sides in turns and print."""
    parser = argparse.ArgumentParser(description="Compare the weight sync of two commits in the quick-start.")
    parser.add_argument("--before", default="HEAD", help="commit of the other side (default: %(default)s)")
    parser.add_argument("--num-rounds", type=int, default=3, help="of each side")
    parser.add_argument("--num-iterations", type=int, default=5, help="of a round, after one to warm up")
    parser.add_argument("--model", help="default: the quick-start's")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings in place of its own")
    parser.add_argument("--one-side", type=Path, metavar="FILE", help="measure this package alone and write its rows")
    bench.add_output(parser)
    arguments = parser.parse_args(argv)

    from rllib_srl.cli.shared.settings import read_values

    if arguments.one_side:
        settings = read_values(dict(pair.split("=", 1) for pair in arguments.set))
        settings |= {"model": arguments.model} if arguments.model else {}
        arguments.one_side.write_text(json.dumps(measure(arguments.num_iterations, settings)), encoding="utf-8")
        return 0
    rows: dict[str, list[Row]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as directory:
        roots = {"before": unpacked(arguments.before, Path(directory)), "after": bench.ROOT}
        for number in range(arguments.num_rounds):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                rows[side] += one_round(roots[side], arguments)
    print("\n".join(lines(rows)))
    bench.write(arguments, "sync_sides", rows)
    return 0


if __name__ == "__main__":
    sys.exit(run_cleanly(main, debug="--verbose" in sys.argv))
