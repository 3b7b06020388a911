#!/usr/bin/env python3
"""Kill a process of a small real run in each phase of an iteration, and check that the run ends as an undisturbed one.

    python scripts/kills.py                              runner, learner, buffer, driver: about forty minutes
    python scripts/kills.py --times 1 --kinds learner    one kill in each phase
    python scripts/kills.py --kinds engine               a worker of a vLLM engine with two (needs vLLM)
    python scripts/kills.py --model smollm2-135m         the same with a pretrained model

    srl train (supervisor.py) ──> driver ──> Ray: runners, learners, buffer
                                   play   remember   learn   sync   evaluate     SIGKILL when one of them begins,
                                    X        X         X       X       X         in another iteration each

A run of each kind is compared with one undisturbed run: weights, and the metrics of every iteration, are equal bit for
bit. vLLM's engines sample other tokens after a restart, so with them the counts of every iteration are compared. Exit
status: 0 if all are as they should be.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages

import psutil

from rllib_srl.cli import supervisor

VICTIMS = {  # kind: how the title of its processes begins; "": the driver itself
    "runner": "ray::LLMEnvRunner",
    "learner": "ray::_WrappedExecutable",
    "buffer": "ray::RLlibReplayBuffer",
    "engine": "VLLM::Worker_TP",
    "driver": "",
}
PHASES = ("play", "remember", "learn", "sync", "evaluate")
FIRST = 2  # iteration with a kill; before it there is no checkpoint
FLAGS = [
    *("--compute_dtype", "float32", "--seed", "5", "--lr", "3e-4"),
    *("--env", "compare", "--env_config", "num_shots=0", "--max_turn_tokens", "8", "--max_episode_tokens", "128"),
    *("--num_prompts_per_batch", "8", "--group_size", "4", "--checkpoint_every", "1"),
    *("--replay_reuse_fraction", "0.25", "--replay_min_buffer_size", "4"),
    *("--evaluation_interval", "1", "--evaluation_duration", "4"),
    *("--num_cpus_per_env_runner", "0.25", "--num_cpus_per_learner", "0.25", "--num_cpus_for_main_process", "0.25"),
]
LOCAL = [*FLAGS, "--engine", "transformers", "--num_env_runners", "2", "--num_learners", "2"]
OF_ENGINE = ["--engine", "vllm", "--engine_tensor_parallel_size", "2", "--engine_kv_cache_gib", "0.125"]
VLLM = [*FLAGS, *OF_ENGINE, "--num_env_runners", "1"]
# Of the process, not of the run: times, bytes in memory, how often something was started again or dropped.
OF_THE_PROCESS = re.compile(
    r"_s$|time|throughput|since_restore|num_groups_undone|num_restarts|num_runner_restarts"
    r"|num_groups_played_again|date|pid|hostname|node_ip|num_outstanding_async_reqs"
)
COUNTS = re.compile(r"^(training_iteration|env_runners/num_groups|env_runners/num_episodes|replay/num_groups_lost)$")
RUN_S, KILL_S = 300.0, 180.0  # for a run without kills, more for each kill
THERE_S, GONE_S = 120.0, 30.0  # for a process to appear (an engine takes a minute to start), and to end


# --- the command that is supervised ---------------------------------------------------------------


def train(kind: str, marks: Path, argv: list[str]) -> int:
    """Run `srl train` as the command does, with kills; each leaves a mark, so that it is done once."""
    if supervisor.is_needed(argv):
        return supervisor.supervise([sys.executable, *sys.orig_argv[1:]])
    supervisor.begin()
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose=False)
    from rllib_srl import SRL
    from rllib_srl.cli import train as command
    from rllib_srl.replay.client import ReplayClient
    from rllib_srl.rollout.runner_group import RunnerGroup
    from rllib_srl.weights.sync import WeightSync

    algos: list[SRL] = []
    before(SRL, "training_step", algos.append)
    methods = [(RunnerGroup, "play_groups"), (ReplayClient, "add"), (SRL, "_learn"), (WeightSync, "sync")]
    for phase, (owner, name) in zip(PHASES, [*methods, (SRL, "evaluate")], strict=True):
        before(owner, name, partial(strike, kind, phase, algos, marks))
    sys.argv[0] = "srl train"
    return int(command.main(argv) or 0)


def before(owner: type, name: str, action: Callable[[Any], object]) -> None:
    """Let every call of a method call `action` with its object first."""
    usual = getattr(owner, name)

    def begun(self: Any, *arguments: Any, **named: Any) -> Any:
        action(self)
        return usual(self, *arguments, **named)

    setattr(owner, name, begun)


def strike(kind: str, phase: str, algos: Sequence[Any], marks: Path, _: object) -> None:
    """Kill, if a mark is planned for the iteration and this phase and was not yet left."""
    if not algos:
        return
    now = algos[-1].iteration + 1
    planned, mark = marks / f"planned-{now}-{phase}", marks / f"done-{now}-{phase}"
    if planned.exists() and not mark.exists():
        mark.touch()
        kill(VICTIMS[kind])


def kill(title: str) -> None:
    """Kill one process below this one, and wait until it is gone; this one for the title ""."""
    if not title:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + THERE_S
    while time.monotonic() < deadline:  # it may be on its way back from the last kill
        names = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                names += (both := [(process.cmdline() or [""])[0], process.name()])
                if any(name.startswith(title) for name in both):
                    process.kill()
                    process.wait(GONE_S)
                    return
        time.sleep(0.1)
    raise RuntimeError(f"no process {title} was there within {THERE_S:g} s, but {', '.join(sorted(set(names)))}")


# --- runs and their comparison --------------------------------------------------------------------


def run(kind: str, directory: Path, last: int, kills: Sequence[tuple[int, str]], flags: Sequence[str]) -> list[str]:
    """Train to iteration `last` with kills; return what is wrong with how it went."""
    marks = directory / "marks"
    marks.mkdir(parents=True)
    for iteration, phase in kills:
        (marks / f"planned-{iteration}-{phase}").touch()
    words = [*flags, "--iterations", str(last), "--out", str(directory / "run"), "--export", str(directory / "model")]
    command = [sys.executable, __file__, "train", kind, str(marks), *words]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    limit_s = RUN_S + KILL_S * len(kills)
    with (directory / "said.txt").open("w", encoding="utf-8") as file:
        try:
            status: Any = subprocess.run(
                command, stdout=file, stderr=file, env=environment, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"no end within {limit_s:g} s"
    missing = [f"{phase} of iteration {at}" for at, phase in kills if not (marks / f"done-{at}-{phase}").exists()]
    tail = (directory / "said.txt").read_text(encoding="utf-8")[-1500:]
    return [f"ended with {status}: {tail}"] * (status != 0) + [f"nothing was killed in {place}" for place in missing]


def numbers_of(run: Path, wanted: re.Pattern[str] | None) -> dict[int, dict[str, float]]:
    """Return what each iteration measured of the run; of a repeated iteration the last time."""
    numbers = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        names = [name for name in line if (wanted.search(name) if wanted else not OF_THE_PROCESS.search(name))]
        numbers[int(line["training_iteration"])] = {name: line[name] for name in names}
    return numbers


def differences(one: Path, other: Path, is_exact: bool) -> list[str]:
    """Return what differs between two runs, [] if they ended alike."""
    wanted = None if is_exact else COUNTS
    ours, theirs = numbers_of(one / "run", wanted), numbers_of(other / "run", wanted)
    lines = [] if sorted(ours) == sorted(theirs) else [f"iterations {sorted(ours)} and {sorted(theirs)}"]
    for at in sorted(ours.keys() & theirs.keys()):
        names = ours[at].keys() | theirs[at].keys()
        if names := {name for name in names if ours[at].get(name) != theirs[at].get(name)}:
            lines.append(f"iteration {at} differs in {', '.join(sorted(names)[:6])}")
    if is_exact and digest(one) != digest(other):
        lines.append("the weights differ")
    return lines


def digest(directory: Path) -> str:
    """Return a digest of the exported weights."""
    return hashlib.sha256((directory / "model" / "model.safetensors").read_bytes()).hexdigest()


def kill_all(
    directory: Path, kinds: Sequence[str], phases: Sequence[str], times: int, model: str
) -> list[dict[str, Any]]:
    """Do all kills of each kind; return a row for each."""
    kills = [(FIRST + at, phase) for at, phase in enumerate([*phases] * times)]
    rows, last = [], FIRST + len(kills)
    for is_exact in sorted({kind != "engine" for kind in kinds}):
        flags, unbroken = (LOCAL, directory / "unbroken") if is_exact else (VLLM, directory / "unbroken-vllm")
        flags = ["--model", model, *flags]
        errors = run("driver", unbroken, last, [], flags)
        for kind in (name for name in kinds if (name != "engine") is is_exact):
            begin = time.monotonic()
            lines = errors or run(kind, directory / kind, last, kills, flags)
            lines = lines or differences(directory / kind, unbroken, is_exact)
            said = directory / kind / "said.txt"
            starts = said.read_text(encoding="utf-8").count("starting again from ") if said.exists() else 0
            rows.append({"model": model, "kind": kind, "kills": len(kills), "new_starts": starts, "errors": lines})
            rows[-1]["seconds"] = round(time.monotonic() - begin, 1)
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Do the kills, and print a line of JSON for each kind."""
    if sys.argv[1:2] == ["train"]:
        return train(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [kind for kind in VICTIMS if kind != "engine"]
    parser.add_argument("--kinds", nargs="+", choices=list(VICTIMS), default=usual, metavar="KIND")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, metavar="PHASE")
    parser.add_argument("--times", type=int, default=5, help="kills of each kind in each phase (default: %(default)s)")
    parser.add_argument("--model", default="tiny", help="model to train (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="new directory of the runs (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills_") as scratch:
        directory = (arguments.out or Path(scratch)).absolute()
        rows = kill_all(directory, arguments.kinds, arguments.phases, arguments.times, arguments.model)
    return int(any(row["errors"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
