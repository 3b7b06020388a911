#!/usr/bin/env python3
"""Put faults into a small real run at seeded moments, check what is left after each, and print how long recovery takes.

    python scripts/chaos/run.py --faults 20                                  every kind, 20 of each way
    python scripts/chaos/run.py --faults 50 --kinds runner buffer --out FILE     skip the faults that are in FILE
    python scripts/chaos/run.py --table --out FILE                           print the table of what was done

    play ── remember ── learn ── sync ── evaluate ── (rest)
      │  runner, buffer, learner: SIGKILL, SIGSTOP     driver: SIGKILL, SIGTERM, SIGSTOP     slow processes
      │  a worker of an engine (vLLM, needs its packages): SIGKILL, SIGSTOP     late messages, a lost message
      │  a flipped bit in an engine's weights          a full disk (needs the right to mount, or limits file sizes)
      └─> counts add up; nothing acknowledged is lost; all engines compute with the newest weights; no draw is repeated;
          after the driver's death the resumed run has the weights and metrics of one that was not disturbed

Time to recover: from the fault to the end of the first iteration after it in which nothing was left to repair. It
includes that iteration itself. Exit status: 0 if every fault was survived.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not scripts/chaos/, whose files would hide packages
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: on a busy machine workers would wait for minutes

from rllib_srl.cli.shared.cluster import start_ray
from scripts.chaos.driver import DriverRun
from scripts.chaos.faults import DRIVER, ENGINE, KINDS, Fault, plan
from scripts.chaos.live import LiveRun, Outcome
from scripts.chaos.network import delayed_rows
from scripts.chaos.small_disk import Disk, Limited, Tmpfs

SMALL_DISK = "400m"
FAULTS_PER_RUN = 25  # a memory that forgets nothing grows; a new run keeps the checks short


def row_of(fault: Fault, outcome: Outcome, seed: int, usual_s: float) -> dict[str, Any]:
    """Return one line of the results."""
    row = {"seed": seed, **dataclasses.asdict(fault), **dataclasses.asdict(outcome), "usual_s": usual_s}
    return {**row, "survived": not outcome.faults}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of recoveries, a line for each kind and way, and below it the faults that were not survived."""
    head = ["kind", "way", "phases", "faults", "survived", "median s", "max s", "without s"]
    lines = []
    for kind, way in sorted({(row["kind"], row["way"]) for row in rows}):
        own = [row for row in rows if (row["kind"], row["way"]) == (kind, way)]
        took = [row["recovered_s"] for row in own if row["recovered_s"] is not None]
        phases = sorted({row["phase"] for row in own})
        times = [f"{statistics.median(took):.1f}", f"{max(took):.1f}"] if took else ["-", "-"]
        usual = f"{statistics.median(row['usual_s'] for row in own):.1f}"
        survived = sum(row["survived"] for row in own)
        lines.append([kind, way, " ".join(phases) if len(phases) < 6 else "all", len(own), survived, *times, usual])
    out = ["| " + " | ".join(map(str, line)) + " |" for line in [head, ["---"] * len(head), *lines]]
    for row in rows:
        out += [f"{row['kind']} {row['way']} {row['number']} in {row['phase']}: {fault}" for fault in row["faults"]]
    return "\n".join(out)


@contextmanager
def small_disk(directory: Path) -> Iterator[Disk]:
    """Mount a small disk, or limit the size of files where this process may not."""
    if Tmpfs.is_allowed(directory):
        with Tmpfs.mounted(directory / "disk", SMALL_DISK) as disk:
            yield disk
    else:
        (directory / "disk").mkdir()
        yield Limited(directory / "disk")


def live_rows(faults: Sequence[Fault], seed: int, model: str, until: float) -> Iterator[dict[str, Any]]:
    """Put faults into live runs, a new one after `FAULTS_PER_RUN` and after a fault that was not survived.

    All faults are of engines' workers, or none is: those need another run.
    """
    waiting, is_split = list(faults), any(fault.kind == ENGINE for fault in faults)
    while waiting and time.monotonic() < until:
        with tempfile.TemporaryDirectory(prefix="chaos_") as directory, small_disk(Path(directory)) as disk:
            run = LiveRun(disk.path, model, disk, is_split)
            try:
                for _ in range(min(FAULTS_PER_RUN, len(waiting))):
                    if time.monotonic() > until:
                        break
                    fault = waiting.pop(0)
                    row = row_of(fault, run.meet(fault), seed, run.usual_s["iteration"])
                    yield row
                    if not row["survived"]:
                        break
            finally:
                run.stop()


def driver_rows(faults: Sequence[Fault], seed: int, until: float) -> Iterator[dict[str, Any]]:
    """Put faults into one run's driver, and compare the run with an undisturbed one."""
    with tempfile.TemporaryDirectory(prefix="chaos_") as directory:
        run, rows = DriverRun(Path(directory)), []
        try:
            for fault in faults:
                if time.monotonic() > until:
                    break
                rows.append(row_of(fault, run.meet(fault), seed, run.usual_s))
                if not rows[-1]["survived"]:
                    break
            differences = run.faults() if rows else []
            for row in rows:  # a difference may come from any of them
                row["faults"] += differences
                row["survived"], row["usual_s"] = not row["faults"], run.usual_s
        finally:
            run.stop()
        yield from rows


def done_before(out: Path | None) -> list[dict[str, Any]]:
    """Return the rows of a file, [] if there is none."""
    if out is None or not out.exists():
        return []
    return [json.loads(line) for line in out.read_text().splitlines()]


def go(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Put the planned faults that were not done before into runs; return the rows of all of them."""
    rows = done_before(arguments.out)
    done = {(row["seed"], row["kind"], row["way"], row["number"]) for row in rows}
    planned = [one for one in plan(arguments.kinds, arguments.faults, arguments.seed) if one.way in arguments.ways]
    left = [one for one in planned if (arguments.seed, one.kind, one.way, one.number) not in done]
    until = time.monotonic() + arguments.limit_s
    delayed = [one for one in left if one.way == "delays"]
    engine = [one for one in left if one.kind == ENGINE]
    driver = [one for one in left if one.kind in DRIVER]
    live = [one for one in left if one not in (*delayed, *engine, *driver)]

    def here(faults: Sequence[Fault]) -> Iterator[dict[str, Any]]:
        if faults:
            start_ray(arguments.verbose)
        yield from live_rows(faults, arguments.seed, arguments.model, until)

    new = chain(
        delayed_rows(delayed, arguments.seed, arguments.model, until),
        here(live),
        here(engine),
        driver_rows(driver, arguments.seed, until),
    )
    for row in new:
        rows.append(row)
        took = "never" if row["recovered_s"] is None else f"{row['recovered_s']:.1f} s"
        what = f"{row['kind']} {row['way']} {row['number']} in {row['phase']}"
        print(f"{what}: {took}, {'survived' if row['survived'] else row['faults']}", flush=True)
        if arguments.out is not None:
            with arguments.out.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
    return rows


def main() -> int:
    """Run, print the table; return 0 if every fault was survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=6, help="of each kind and way; 6: one in each phase")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    ways = sorted({way for some in KINDS.values() for way in some})
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, help="of these kinds only these ways")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--out", type=Path, help="JSON lines; faults that are in it are not repeated")
    parser.add_argument("--limit_s", type=float, default=float("inf"), help="begin no fault after that time")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    parser.add_argument("--verbose", action="store_true", help="show the output of Ray and RLlib")
    arguments = parser.parse_args()
    rows = done_before(arguments.out) if arguments.table else go(arguments)
    print(table(rows))
    return 0 if rows and all(row["survived"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
