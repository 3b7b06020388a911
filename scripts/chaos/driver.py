"""`srl train` as a child process that is killed, terminated or paused, and started again by the same command.

    python scripts/chaos/driver.py --out DIR --resume auto ...     `srl train`, with a line where each phase begins
    run = DriverRun(directory); run.meet(fault); run.faults()   the parent: the run equals an undisturbed one
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not scripts/chaos/, whose files would hide packages
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

import psutil

from rllib_srl.storage.checkpoints import checkpoints_in
from scripts.chaos.faults import Fault
from scripts.chaos.live import Outcome
from scripts.chaos.phases import PHASES, REST, beginning

MARK = "chaos:"
PATIENCE_S = 240.0  # for a start on a busy machine
PAUSE_S = 3.0  # of SIGSTOP
FLAGS = [
    *("--model", "tiny", "--engine", "transformers", "--compute_dtype", "float32", "--seed", "5", "--lr", "3e-4"),
    *("--env", "compare", "--env_config", "num_shots=0", "--max_turn_tokens", "8", "--max_episode_tokens", "128"),
    *("--num_prompts_per_batch", "8", "--group_size", "4", "--checkpoint_every", "1", "--num_env_runners", "2"),
    *("--evaluation_interval", "1", "--evaluation_duration", "4", "--replay_min_buffer_size", "4"),
    *("--num_cpus_per_env_runner", "0.25", "--num_cpus_per_learner", "0.25", "--num_cpus_for_main_process", "0.25"),
]
# What tells of the process and not of the run: times, what it holds in memory, since when it runs, and how many groups
# of the iteration that is repeated had been stored before the end.
OF_THE_PROCESS = re.compile(r"_s$|time|throughput|num_bytes_in_memory|num_read_back|since_restore|num_orphan")


class DriverRun:
    """A run whose driver meets faults. Invariant: the same command starts and continues it."""

    def __init__(self, directory: Path) -> None:
        """Take an empty directory."""
        self._directory = directory
        self._child: _Child | None = None
        self.usual_s = float("nan")  # of an iteration of the undisturbed run, once `faults` has run it

    def meet(self, fault: Fault) -> Outcome:
        """Let one fault strike the driver, start it again, and wait for the next iteration."""
        outcome = Outcome()
        try:
            child = self._child or self._start()
            child.wait_for(fault.phase, after=1 if child.is_new else 0)
            child.is_new = False
            time.sleep(fault.share * 0.2)
            struck_at = time.monotonic()
            if fault.way == "STOP":
                child.send(signal.SIGSTOP)
                time.sleep(PAUSE_S)
                child.send(signal.SIGCONT)
                self._child = child
            else:
                outcome.faults += child.ended_by(getattr(signal, f"SIG{fault.way}"))
                self._child = child = self._start()
                outcome.num_repairs = 1
            child.wait_for(REST)
            child.is_new = fault.way == "STOP" and child.is_new
            outcome.recovered_s, outcome.num_iterations = time.monotonic() - struck_at, 1
        except Exception as error:  # any: the run did not survive this fault, which the table counts
            outcome.faults.append(f"{type(error).__name__}: {error}")
            self.stop()
        return outcome

    def faults(self) -> list[str]:
        """Let the run end, run one without faults, and return what differs."""
        self.stop()
        sides = {}
        for name in ("run", "undisturbed"):
            found = checkpoints_in(self._directory / "run")
            newest = int(found[-1].name.removeprefix("checkpoint_")) if found else 0
            last = newest + 1 if name == "run" else newest
            child = _Child(self._directory, name, last, "--export", str(self._directory / f"model of {name}"))
            said = child.wait_for_end()
            if child.returncode != 0:
                return [f"{name} ended with {child.returncode}: {said[-400:]}"]
            sides[name] = (_numbers_of(self._directory / name), _digest_of(self._directory / f"model of {name}"))
        lines = (self._directory / "undisturbed" / "metrics.jsonl").read_text().splitlines()
        self.usual_s = statistics.median(json.loads(line)["time_this_iter_s"] for line in lines)
        (numbers, digest), (want, wanted) = sides["run"], sides["undisturbed"]
        different = [] if digest == wanted else ["the resumed run has other weights than an undisturbed one"]
        for iteration, line in want.items():
            other = numbers.get(iteration, {})
            if differ := sorted(name for name in line if line[name] != other.get(name)):
                different.append(f"iteration {iteration} differs in {', '.join(differ[:8])}")
        return different

    def stop(self) -> None:
        """End the child and what it has started."""
        if self._child is not None:
            self._child.clean_up()
            self._child = None

    def _start(self) -> _Child:
        self._child = _Child(self._directory, "run", 10_000)
        return self._child


class _Child:
    """One life of the driver."""

    def __init__(self, directory: Path, name: str, last: int, *more: str) -> None:
        command = [sys.executable, __file__, *FLAGS, "--out", str(directory / name), "--resume", "auto"]
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RAY_ADDRESS")}
        self._process = subprocess.Popen(
            [*command, "--iterations", str(last), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
            cwd=directory,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._said: list[str] = []
        self._left: list[psutil.Process] = []  # what a driver that was ended had started
        threading.Thread(target=self._read, daemon=True).start()
        self.is_new = True

    @property
    def returncode(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self._process.poll()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, phase: str, after: int = 0) -> None:
        """Return when a phase begins, of the first iteration that is announced, or of a later one.

        Raises:
            RuntimeError: the process ended first.
            TimeoutError: it never began.
        """
        deadline, num_ends = time.monotonic() + PATIENCE_S, 0
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left_s)
            except queue.Empty:
                break
            if line is None:
                raise RuntimeError(f"the driver ended with {self._process.wait(30)}: {''.join(self._said)[-600:]}")
            if f"{MARK} {phase}" in line and num_ends >= after:
                return
            num_ends += f"{MARK} {REST}" in line
        raise TimeoutError(f"phase {phase} did not begin within {PATIENCE_S:g} s: {''.join(self._said)[-600:]}")

    def wait_for_end(self) -> str:
        """Return what it has written, once it has ended."""
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self.clean_up()
        return "".join(self._said)

    def send(self, number: int) -> None:
        """Send a signal to the driver, and to nothing that it started."""
        self._process.send_signal(number)

    def ended_by(self, number: int) -> list[str]:
        """Send a signal, wait for the end, and return what was wrong with it; nothing else is killed."""
        family = self._family()
        self.send(number)
        status = self._process.wait(60)
        want = 143 if number == signal.SIGTERM else -number
        found = [] if status == want else [f"the driver ended with {status} instead of {want}"]
        if "Traceback" in "".join(self._said):
            found.append("the driver ended with a traceback")
        self._left = family
        return found

    def clean_up(self) -> None:
        """Kill it and all it has started."""
        family = [*self._family(), *self._left]
        if self._process.poll() is None:
            self._process.kill()
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()  # psutil compares the time at which a process was started
        self._process.wait(30)

    def _family(self) -> list[psutil.Process]:
        try:
            return [*psutil.Process(self._process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _numbers_of(run: Path) -> dict[int, dict[str, float]]:
    """Return what each iteration measured of the run; of a repeated iteration the last time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {}
    for line in lines:
        numbers = {name: value for name, value in line.items() if not OF_THE_PROCESS.search(name)}
        found[int(line["training_iteration"])] = numbers
    return found


def _digest_of(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def main() -> int:
    """Run `srl train`; write a line where each phase of an iteration begins."""
    from rllib_srl.algorithm.srl import SRL
    from rllib_srl.cli.main import main as srl
    from rllib_srl.replay.client import ReplayClient
    from rllib_srl.rollout.runner_group import RunnerGroup
    from rllib_srl.weights.sync import WeightSync

    classes = SimpleNamespace(runners=RunnerGroup, memory=ReplayClient, weight_sync=WeightSync)

    def say(phase: str) -> None:
        print(f"\n{MARK} {phase}", flush=True)

    usual = SRL.log_result

    def log_result(self: SRL, result: dict[str, Any]) -> None:
        usual(self, result)
        say(REST)

    with ExitStack() as stack:
        for phase, (find, name) in PHASES.items():
            owner = find(classes)
            stack.enter_context(beginning(SRL if owner is classes else owner, name, partial(say, phase)))
        SRL.log_result = log_result  # type: ignore[method-assign]
        return srl(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
