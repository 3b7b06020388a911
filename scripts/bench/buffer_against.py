#!/usr/bin/env python3
"""Benchmark the replay buffer of this checkout beside that of a commit, in one run and on the same journals.

    python -m scripts.bench.buffer_against main                          4,096, 65,536 and a million items
    python -m scripts.bench.buffer_against main --sizes 500 --iterations 4

Each side is a process that opens a copy of the same journal. The two run their iterations of the quick-start's size in
turns (scripts/bench/buffer_sizes.py), and their draws must agree in every iteration: a change of the numbers ends the
run with an error. Exit status: 0, or 1 if the calls of an iteration take more processor time than their share of
ITERATION_S. The rest of the wall time is the wait for the disk and for other work on the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZES = (4096, 65_536, 1_000_000)
ITERATION_S = 2.0  # of the quick-start, at its fastest
MANY = 65_536  # items up to which the calls may take 1 % of an iteration; beyond, 2 %
TIMEOUT_S = 600
HEADER = "| items | call | before, ms | now, ms | before, processor ms | now, processor ms |\n" + "|---" * 6 + "|"


def serve(checkout: Path, directory: Path, num_items: int) -> None:
    """Run an iteration on the checkout's buffer for each line read; write its times and draws as a line of JSON."""
    sys.path.insert(0, str(checkout))
    from rllib_srl.replay.buffer import SRLReplayBuffer

    if not Path(sys.modules["rllib_srl"].__file__ or "").is_relative_to(checkout):
        raise ImportError(f"rllib_srl was imported from {sys.modules['rllib_srl'].__file__}; expected {checkout}")
    sys.path.insert(0, str(ROOT))  # the benchmark is this checkout's on both sides
    from scripts.bench import buffer_sizes

    buffer: SRLReplayBuffer = buffer_sizes.opened(directory, num_items)
    iterations = buffer_sizes.calls(buffer, num_items)
    print(json.dumps({"state_bytes": buffer.store.nbytes / num_items, "resident": buffer_sizes.resident()}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(next(iterations)), flush=True)
    buffer.close()


class Side:
    """A process that serves one checkout's buffer."""

    def __init__(self, checkout: Path, directory: Path, num_items: int) -> None:
        """Start the process, which opens its buffer."""
        command = [sys.executable, __file__, "--serve", str(checkout), str(directory), str(num_items)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, cwd=checkout, **pipes)

    def opened(self) -> dict[str, float]:
        """Wait until the buffer is open; return its bytes."""
        sizes: dict[str, float] = self._line()
        return sizes

    def iteration(self) -> tuple[dict[str, list[float]], list[str]]:
        """Return the seconds and processor seconds of each call of one iteration, and what was drawn."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        times, drawn = self._line()
        return times, drawn

    def close(self) -> None:
        """End the process."""
        try:
            self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended with status {self._process.wait(TIMEOUT_S)}")
        return json.loads(line)


def measure(
    theirs: Path, directory: Path, num_items: int, num_iterations: int, span: int
) -> tuple[list[dict[str, list[list[float]]]], list[dict[str, float]]]:
    """Return the times of each side's calls, ours first, and the bytes of each side after opening."""
    from scripts.bench import buffer_sizes

    places = [directory / f"{side}.{num_items}" for side in ("ours", "theirs")]
    buffer_sizes.fill(places[0], num_items, span)
    shutil.copytree(places[0], places[1])
    sides = [Side(checkout, place, num_items) for checkout, place in zip((ROOT, theirs), places, strict=True)]
    opened = [side.opened() for side in sides]
    found: list[dict[str, list[list[float]]]] = [{}, {}]
    warm_up = max(1, num_iterations // 4)
    for iteration in range(warm_up + num_iterations):
        drawn = {}
        for which in (0, 1) if iteration % 2 else (1, 0):
            times, drawn[which] = sides[which].iteration()
            if iteration >= warm_up:
                for name, values in times.items():
                    found[which].setdefault(name, []).append(values)
        if drawn[0] != drawn[1]:
            raise RuntimeError(f"draws differ in iteration {iteration}: ours {drawn[0]}, theirs {drawn[1]}")
    for side in sides:
        side.close()
    for place in places:
        shutil.rmtree(place)
    return found, opened


def lines_of(found: list[dict[str, list[list[float]]]], num_items: int) -> tuple[list[str], bool]:
    """Return the medians in milliseconds as lines of a table, and whether the budget of this checkout holds."""
    from scripts.bench import common as bench

    out, total = [], [[0.0, 0.0], [0.0, 0.0]]
    for name in found[0]:
        medians = [[1e3 * median(column) for column in zip(*side[name])] for side in found]
        total = [[a + b for a, b in zip(*pair)] for pair in zip(total, medians)]
        out.append(_line(num_items, name, medians))
    budget = ITERATION_S * (10 if num_items <= MANY else 20)
    is_met = total[0][1] <= budget
    out.append(_line(num_items, "all", total))
    out.append(f"  at most {budget:g} ms of processor time: {bench.verdict(is_met)}")
    return out, is_met


def _line(num_items: int, name: str, medians: list[list[float]]) -> str:
    (wall, cpu), (wall_before, cpu_before) = medians
    return f"| {num_items:,} | {name} | {wall_before:.2f} | {wall:.2f} | {cpu_before:.2f} | {cpu:.2f} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    if (argv or sys.argv[1:])[:1] == ["--serve"]:
        checkout, directory, num_items = (argv or sys.argv[1:])[1:]
        serve(Path(checkout), Path(directory), int(num_items))
        return 0
    from scripts.bench import common as bench

    parser = argparse.ArgumentParser(description="Measure the buffer of this checkout beside that of a commit.")
    parser.add_argument("commit", help="the other side: a commit, branch or tag")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="items")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--span", type=int, default=2000, help="iterations over which due dates are spread")
    parser.add_argument("--directory", type=Path, default=Path("."), help="on the disk to be measured")
    bench.add_output(parser)
    arguments = parser.parse_args(argv)
    is_met, figures = True, {}
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix=".bench_buffer_") as place:
        theirs = Path(place).resolve() / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(theirs), arguments.commit], check=True, timeout=TIMEOUT_S)
        try:
            print(HEADER)
            for num_items in arguments.sizes:
                found, opened = measure(theirs, Path(place), num_items, arguments.iterations, arguments.span)
                lines, is_fine = lines_of(found, num_items)
                is_met &= is_fine
                for side, calls in zip(("now", "before"), found, strict=True):
                    seconds = {name: dict(zip(("wall", "processor"), zip(*pairs))) for name, pairs in calls.items()}
                    figures[f"{num_items} {side}"] = seconds
                print("\n".join(lines), flush=True)
                for side, values in zip(("now", "before"), opened, strict=True):
                    resident = values["resident"] / num_items
                    print(f"  {side}: {values['state_bytes']:.0f} bytes an item in the store, {resident:.0f} resident")
        finally:
            subprocess.run([*git, "remove", "--force", str(theirs)], check=True, timeout=TIMEOUT_S)
    print(bench.conditions("float32"))
    bench.write(arguments, "buffer_against", figures)
    return 0 if is_met else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        sys.path.pop(0)  # scripts/bench/, whose files would hide packages
    else:
        sys.path[0] = str(ROOT)
    sys.exit(main())
