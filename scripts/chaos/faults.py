"""The kinds of faults that are put into a live run, and how one is planned.

    runner, buffer, learner   SIGKILL; or SIGSTOP, which a timeout must find
    slow                      one of these three is stopped and continued again and again, for less than any timeout
    engine                    a worker of an engine that is split over two (tensor parallelism): SIGKILL or SIGSTOP
    network                   messages between processes are late for a whole run, or one of them is lost (`network.py`)
    weight                    one bit of an engine's weights flips: while it loads an update, or between two updates
    disk                      the disk of the run's directory is full, then has room again
"""

from __future__ import annotations

import os
import random
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError

from rllib_srl.common.remote_calls import RunnerFailure
from scripts.chaos.invariants import ANSWER_S
from scripts.chaos.phases import EVERY, EVERY_PHASE

ENGINE = "engine"
# kind -> ways in which it happens
LIVE = {
    "runner": ("KILL", "STOP"),
    "buffer": ("KILL", "STOP"),
    "learner": ("KILL", "STOP"),
    "slow": ("pulses",),
    ENGINE: ("KILL", "STOP"),
    "network": ("delays", "losses"),
    "weight": ("loading", "resting"),
    "disk": ("full",),
}
DRIVER = {"driver": ("KILL", "TERM", "STOP")}
KINDS = {**LIVE, **DRIVER}
PROCESSES = ("runner", "buffer", "learner")  # of every live run
WORKER = "VLLM::Worker_TP"  # how vLLM names the processes of an engine
PHASE_OF = {"loading": "sync", "delays": EVERY}  # ways that are bound to a phase, or to none
LATEST = 0.9  # of a phase's usual time; what comes later may miss the phase
STOPPED_S, MOVING_S = 0.4, 0.1  # of a slow process


@dataclass(frozen=True)
class Fault:
    """One fault of a plan: `number` of its kind and way; `share` of the phase's usual time after its beginning."""

    kind: str
    way: str
    number: int
    phase: str
    share: float
    victim: float  # in [0, 1): which of the processes or weights


def plan(kinds: Sequence[str], num: int, seed: int) -> Iterator[Fault]:
    """Yield `num` faults of each kind and way, in turns; each kind goes through the phases one after another."""
    for number in range(num):
        for at, kind in enumerate(kinds):
            for way in KINDS[kind]:
                chance = random.Random(f"{seed} {kind} {way} {number}")
                phase = PHASE_OF.get(way, EVERY_PHASE[(number + at) % len(EVERY_PHASE)])
                yield Fault(kind, way, number, phase, LATEST * chance.random(), chance.random())


def pid_of(algo: Any, kind: str, victim: float) -> int:
    """Return the id of one process of a kind, once it answers.

    Raises:
        TimeoutError: it did not come back.
    """
    deadline = time.monotonic() + ANSWER_S
    while (pid := _pid_now(algo, kind, victim)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"a {kind} did not come back within {ANSWER_S:g} s")
        time.sleep(0.2)
    return pid


def _pid_now(algo: Any, kind: str, victim: float) -> int | None:
    if kind == "learner":
        workers = algo.learner_group._backend_executor.worker_group.workers
        return int(workers[int(victim * len(workers))].metadata.pid)
    try:
        if kind in ("runner", ENGINE):
            ids = algo.runners.ids
            runner = int(algo.runners.where(ids[int(victim * len(ids))], ANSWER_S)["pid"])
            return runner if kind == "runner" else _worker_of(runner, victim * len(ids) % 1.0)
        asked = algo.memory._shards[int(victim * algo.memory.num_shards)].__ray_call__.remote(lambda self: os.getpid())
        return int(ray.get(asked, timeout=ANSWER_S))
    except (RunnerFailure, RayActorError):  # it is being restarted
        return None


def _worker_of(runner: int, victim: float) -> int | None:
    """Return the process id of one worker of a runner's engine."""
    workers = [one for one in psutil.Process(runner).children() if one.name().startswith(WORKER)]
    return workers[int(victim * len(workers))].pid if workers else None


def send(pid: int, way: str) -> None:
    """Send SIGKILL and wait until the process is gone, or send SIGSTOP."""
    process = psutil.Process(pid)
    process.send_signal(getattr(signal, f"SIG{way}"))
    if way == "KILL":
        process.wait(10)


def is_left_behind(pid: int) -> bool:
    """Return whether a process is stopped, or dead without having been waited for."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def end(pid: int) -> None:
    """End a process that was left behind."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def pulses(pid: int, has_begun: threading.Event) -> Iterator[None]:
    """Stop and continue a process again and again, from the event to the end of the context."""
    is_over = threading.Event()

    def beat() -> None:
        has_begun.wait()
        process = psutil.Process(pid)
        while not is_over.is_set():
            process.suspend()
            is_over.wait(STOPPED_S)
            process.resume()
            is_over.wait(MOVING_S)

    thread = threading.Thread(target=beat, name="slow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        has_begun.set()
        thread.join()


# --- in the process of a runner -----------------------------------------------------------------------


def flip_a_bit(runner: Any, victim: float) -> str:
    """Flip the highest bit of the exponent of one weight of a runner's engine, and return the tensor's name."""
    import torch

    model = runner.engine._model
    named = [(name, weight) for name, weight in model.named_parameters() if weight.dtype == torch.float32]
    at = int(victim * sum(weight.numel() for _, weight in named))
    for name, weight in named:
        if at < weight.numel():
            with torch.no_grad():
                flat = weight.view(-1)
                flat[at] = _flipped(float(flat[at]))
            return str(name)
        at -= weight.numel()
    raise ValueError(f"victim = {victim}; expected a number in [0, 1)")


def _flipped(value: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (flipped,) = struct.unpack("<f", struct.pack("<I", bits ^ 1 << 30))
    return float(flipped)


def flip_when_loading(runner: Any, victim: float) -> None:
    """Flip a bit after the engine's next update, before the canary is computed."""
    load: Callable[[Any], None] = runner.engine.load_weights

    def spoilt(bundle: Any) -> None:
        del runner.engine.load_weights
        load(bundle)
        flip_a_bit(runner, victim)

    runner.engine.load_weights = spoilt
