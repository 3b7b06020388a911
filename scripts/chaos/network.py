"""A slow network between the processes of a live run: every message is late, or one of them is lost.

    delays   a run in a process of its own, whose Ray holds each message back for a random time, from start to end
    losses   the driver's next request to one of its actors is lost, or the reply to it

Both are switches of Ray for its own tests: `RAY_testing_asio_delay_us`, which each process reads when it starts, and
`testing_rpc_failure`, which can be changed in a running process. Ray draws its delays from C's `rand()` without a
seed, so they are the same after each start; the seed of a fault decides their range. Connections between learners
(gloo) are not Ray's, and are not slowed.

    python scripts/chaos/network.py < faults.json     put faults into a live run in this process, and print their rows
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not scripts/chaos/, whose files would hide packages
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose=False)
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: on a busy machine workers would wait for minutes

import ray

from scripts.chaos.faults import Fault

DELAYS = "RAY_testing_asio_delay_us"
# The messages of an actor's call and of fetching an object: when the request arrives, and when the reply does.
DELAYED = tuple(
    f"{service}.{end}.{method}"
    for service, methods in {
        "CoreWorkerService": ("PushTask", "GetObjectStatus", "PubsubLongPolling"),
        "NodeManagerService": ("RequestWorkerLease",),
        "ObjectManagerService": ("Push", "Pull"),
    }.items()
    for method in methods
    for end in ("grpc_server", "grpc_client")
)
SHORTEST_MS, LONGEST_MS = (5, 20), (40, 120)  # from which the least and the longest delay of a run are drawn
FAULTS_PER_RUN = 5  # a new range of delays after so many
START_S, FAULT_S = 300.0, 180.0  # timeout of a run with delays: of its start, and of each fault
ROW = "chaos row: "
REINIT = "_ZN3ray3rpc7testing4InitEv"  # ray::rpc::testing::Init()


def delays_of(faults: Sequence[Fault], seed: int) -> str:
    """Return Ray's setting for the run of these faults: a range of microseconds for each kind of message."""
    chance = random.Random(f"{seed} delays {faults[0].number}")
    shortest, longest = (1000 * chance.randint(*bounds) for bounds in (SHORTEST_MS, LONGEST_MS))
    return ",".join(f"{name}={shortest}:{longest}" for name in DELAYED)


def delayed_rows(faults: Sequence[Fault], seed: int, model: str, until: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of faults that are put into runs with delays, in processes of their own.

    Raises:
        RuntimeError: that process ended without a row for each fault.
    """
    if not faults or time.monotonic() > until:
        return
    usual_s = _rows_of((), seed, model, {})[0]["usual_s"]  # without delays
    for at in range(0, len(faults), FAULTS_PER_RUN):
        if time.monotonic() > until:
            return
        some = faults[at : at + FAULTS_PER_RUN]
        for row in _rows_of(some, seed, model, {DELAYS: delays_of(some, seed)}):
            yield {**row, "usual_s": usual_s}


def _rows_of(faults: Sequence[Fault], seed: int, model: str, delays: dict[str, str]) -> list[dict[str, Any]]:
    """Run `main` as a child; without faults the only row tells how long an iteration takes."""
    asked = {"faults": [dataclasses.asdict(one) for one in faults], "seed": seed, "model": model}
    timeout_s = START_S + FAULT_S * len(faults)
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, **delays},
        timeout=timeout_s,
        check=False,
    )
    rows = [json.loads(line.removeprefix(ROW)) for line in done.stdout.splitlines() if line.startswith(ROW)]
    if not rows or (len(rows) < len(faults) and all(row["survived"] for row in rows)):
        raise RuntimeError(f"a run with delays ended with {done.returncode}: {done.stderr[-600:]}")
    return rows


def lose_one(victim: float) -> None:
    """Let Ray lose the next request of this process to an actor, or the reply to it.

    Args:
        victim: in [0, 1): below a half it is the request.
    """
    lost = "req_failure_prob" if victim < 0.5 else "resp_failure_prob"
    other = {"req_failure_prob": 0, "resp_failure_prob": 0, "in_flight_failure_prob": 0}
    _set_losses({"CoreWorkerService.grpc_client.PushTask": {"num_failures": 1, **other, lost: 100}})


def lose_none() -> None:
    """Undo `lose_one`, if nothing was sent since."""
    _set_losses({})


def _set_losses(losses: dict[str, Any]) -> None:
    core: Any = ray._raylet
    core.Config.initialize(json.dumps({"testing_rpc_failure": json.dumps(losses)}))
    ctypes.CDLL(core.__file__)[REINIT]()  # Ray reads the setting at its start only


def main() -> int:
    """Read faults from standard input, put them into a live run, and print a row for each as it is done."""
    from rllib_srl.cli.shared.cluster import start_ray
    from scripts.chaos.live import LiveRun
    from scripts.chaos.run import live_rows

    asked = json.loads(sys.stdin.read())
    faults = [Fault(**one) for one in asked["faults"]]
    start_ray(verbose=False)
    try:
        for row in live_rows(faults, asked["seed"], asked["model"], float("inf")):
            print(ROW + json.dumps(row), flush=True)
        if not faults:
            with tempfile.TemporaryDirectory(prefix="chaos_") as directory:
                run = LiveRun(Path(directory), asked["model"])
                print(ROW + json.dumps({"usual_s": run.usual_s["iteration"], "survived": True}), flush=True)
                run.stop()
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
