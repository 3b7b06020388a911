"""A live run on real Ray that faults are put into, one after another.

    run = LiveRun(directory)         two runners, two learners, a memory, a checkpoint in every iteration
                                     (is_split: one runner, whose engine has two workers)
    run.meet(fault) -> Outcome       one iteration with the fault, further ones until everything is repaired, the checks
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray

from rllib_srl import SRLConfig
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.storage.checkpoints import checkpoints_in
from rllib_srl.storage.disk import DiskFull
from scripts.chaos.faults import (
    ENGINE,
    PROCESSES,
    Fault,
    end,
    flip_a_bit,
    flip_when_loading,
    is_left_behind,
    pid_of,
    pulses,
    send,
)
from scripts.chaos.invariants import ANSWER_S, Books, faults_of
from scripts.chaos.network import lose_none, lose_one
from scripts.chaos.phases import at_moment_of, seconds_of_phases
from scripts.chaos.small_disk import Disk

SLOW = ("pulses", "delays")  # ways in which nothing dies, so that nothing may be repaired
MOST_ITERATIONS = 4  # until a fault has struck and everything is repaired
# Metrics that count repairs
REPAIRS = ("num_runner_restarts", "num_learner_rebuilds")


def small_config(directory: Path, model: str = "tiny", is_split: bool = False) -> SRLConfig:
    """Return settings of a small run with a memory that forgets nothing, and with timeouts of seconds.

    Args:
        directory: for the run's files.
        model: what to train.
        is_split: whether the engine is vLLM with two workers, which takes longer for everything, in place of two
            engines without any.
    """
    config: SRLConfig = (
        SRLConfig()
        .environment("compare", env_config={"num_shots": 0})
        .rl_module(model_config={"model": model})
        .env_runners(engine="transformers", num_env_runners=2, num_cpus_per_env_runner=0.25)
        .env_runners(max_turn_tokens=8, max_episode_tokens=128, sample_timeout_s=15.0)
        .learners(num_learners=2, num_cpus_per_learner=0.25)
        .training(lr=3e-4, num_prompts_per_batch=8, group_size=4, compute_dtype="float32")
        .training(update_timeout_s=15.0, sync_timeout_s=15.0, start_timeout_s=120.0)
        .training(checkpoint_every=1, log_directory=str(directory))
        .replay(revisit_fraction=0.25, reuse_fraction=0.25, min_buffer_size=4, groups_per_item=99, max_logp_gap=None)
        .replay(timeout_s=20.0)  # a restart must fit in it
        .evaluation(evaluation_interval=1, evaluation_duration=4)
        .resources(num_cpus_for_main_process=0.25)
        .debugging(seed=1)
    )
    if is_split:
        engine = {"name": "vllm", "tensor_parallel_size": 2, "kv_cache_gib": 0.125}
        config.env_runners(engine=engine, num_env_runners=1, sample_timeout_s=40.0)
        config.training(start_timeout_s=400.0, sync_timeout_s=60.0)
    return config


@dataclass
class Outcome:
    """What came of a fault.

    Invariant: `recovered_s`, from the fault to the end of the first iteration after it in which nothing was left to
    repair, is None if the fault never struck; no `faults` means that every check passed.
    """

    recovered_s: float | None = None
    num_iterations: int = 0
    num_repairs: int = 0
    error: str = ""  # that ended an iteration, as it should for a full disk and a corrupted weight
    faults: list[str] = field(default_factory=list)


class LiveRun:
    """A run that meets faults. Invariant: after a fault that it did not survive it is not used again."""

    def __init__(
        self, directory: Path, model: str = "tiny", disk: Disk | None = None, is_split: bool = False
    ) -> None:
        """Start it, and let it run until its memory holds enough to draw from.

        Args:
            directory: an empty one, for the run's files and copies of its journals; on `disk`, if there is one.
            model: what to train.
            disk: to be filled.
            is_split: see `small_config`.
        """
        self.algo = small_config(directory / "log", model, is_split).build_algo()
        self._copies, self._disk = directory / "copies", disk
        self.books = Books(self.algo.memory)
        self.algo.train()
        self.usual_s = seconds_of_phases(self.algo)
        self.num_reused = 0.0

    def stop(self) -> None:
        """End it."""
        self.algo.stop()

    def meet(self, fault: Fault) -> Outcome:
        """Put one fault into an iteration, run on until everything is repaired, and check what is left."""
        outcome, before = Outcome(), self._num_repairs()
        is_process = fault.kind in (*PROCESSES, ENGINE)
        pid = pid_of(self.algo, fault.kind, fault.victim) if is_process else None
        try:
            struck_at, result = self._struck(fault, pid, outcome)
            outcome.num_repairs = self._num_repairs() - before
            if not outcome.num_repairs and fault.way not in SLOW:  # it may have come after this process's last call
                result = self._iteration(outcome)
                outcome.num_repairs = self._num_repairs() - before
            outcome.recovered_s = time.monotonic() - struck_at
            if fault.way == "losses":
                lose_none()
            if fault.kind == "disk" and not outcome.error and self._disk is not None:
                self._disk.free()
            outcome.faults += faults_of(self.algo, result)
            outcome.faults += self.books.faults(self.algo.memory, self._copies)
            self.num_reused += result["learners"]["default_policy"]["reuse/num_tokens"]
        except Exception as error:  # any: the run did not survive this fault, which the table counts
            outcome.faults.append(f"{type(error).__name__}: {error}")
        outcome.faults += _faults_of_outcome(fault, outcome)
        if pid is not None and is_left_behind(pid):
            outcome.faults.append(f"the stopped process {pid} is left behind")
            end(pid)
        return outcome

    def _struck(self, fault: Fault, pid: int | None, outcome: Outcome) -> tuple[float, Any]:
        """Run iterations until the fault has struck; return when that was, and the result of the last iteration."""
        for _ in range(MOST_ITERATIONS):
            has_begun = threading.Event()
            strike = self._strike_of(fault, pid, has_begun)
            slow = pulses(self._slow_pid(fault), has_begun) if fault.kind == "slow" else nullcontext()
            delay_s = fault.share * self.usual_s[fault.phase] * (fault.kind not in ("weight", "disk"))
            with ExitStack() as stack:
                stack.enter_context(slow)
                moment = stack.enter_context(at_moment_of(self.algo, fault.phase, strike, delay_s))
                result = self._iteration(outcome, self._after_error(fault))
            if moment.struck_at is not None:
                return moment.struck_at, result
        raise RuntimeError(f"phase {fault.phase} never came in {MOST_ITERATIONS} iterations")

    def _slow_pid(self, fault: Fault) -> int:
        kind = PROCESSES[fault.number % len(PROCESSES)]
        return pid_of(self.algo, kind, fault.victim)

    def _strike_of(self, fault: Fault, pid: int | None, has_begun: threading.Event) -> Callable[[], None]:
        if pid is not None:
            return partial(send, pid, fault.way)
        if fault.way == "pulses":
            return has_begun.set
        if fault.kind == "network":
            return partial(lose_one, fault.victim) if fault.way == "losses" else _nothing
        if fault.kind == "disk":
            if self._disk is None:
                raise ValueError("kind = disk; expected a run on a small disk")
            return self._disk.fill
        actors = self.algo.runners.actors()
        actor = actors[int(fault.victim * len(actors))]
        how = flip_when_loading if fault.way == "loading" else flip_a_bit

        def spoil() -> None:
            ray.get(actor.__ray_call__.remote(how, fault.victim * len(actors) % 1.0), timeout=ANSWER_S)

        return spoil

    def _after_error(self, fault: Fault) -> Callable[[], None] | None:
        """Return what a user does after the error that a fault ends the iteration with; None: it ends with none."""
        if fault.kind == "disk" and self._disk is not None:
            return self._disk.free
        return self._go_back if fault.kind == "weight" else None

    def _go_back(self) -> None:
        self.algo.restore_from_path(checkpoints_in(Path(self.algo.logdir))[-1])

    def _iteration(self, outcome: Outcome, after_error: Callable[[], None] | None = None) -> Any:
        """Run one iteration; after an error that the user must see, do what the user would, and run it again."""
        outcome.num_iterations += 1
        try:
            return self.algo.train()
        except (DiskFull, WeightSyncError) as error:
            if after_error is None:
                raise
            outcome.error = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            after_error()
        outcome.num_iterations += 1
        return self.algo.train()

    def _num_repairs(self) -> int:
        counts = sum(self.algo.metrics.peek(name, default=0) for name in REPAIRS)
        return int(counts) + int(self.algo.memory.num_restarts)


def _nothing() -> None:
    """Do nothing: a run with delays has them from its start."""


def _faults_of_outcome(fault: Fault, outcome: Outcome) -> list[str]:
    if fault.way in SLOW and outcome.num_repairs:
        return [f"{outcome.num_repairs} slow processes were taken for dead"]
    if fault.kind == "disk" and "disk full" not in outcome.error:
        return [f"a full disk was not named: {outcome.error or 'there was no error'}"]
    if fault.way == "loading" and "WeightSyncError" not in outcome.error:
        return ["the canary did not find the weight"]
    return []
