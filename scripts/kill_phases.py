#!/usr/bin/env python3
"""Kill a runner and a buffer in each phase of an iteration, and check each time that the run lost nothing but work.

    python scripts/kill_phases.py --rounds 10

    play ── remember ── learn ── sync ── evaluate ── (rest)
      │  SIGKILL to a runner at the start of one phase, to the buffer at that of another, in every iteration anew
      └─> the run continues; every prompt is played or counted; all engines compute with the newest weights; no
          acknowledged item or group is missing from the memory; no draw is trained on twice

A phase begins with the call in `PHASES`. In "rest", between iterations, the killed process may restart unnoticed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

import psutil
import ray
from ray.exceptions import RayActorError

from rllib_srl import SRLConfig
from rllib_srl.cli.shared.cluster import start_ray
from rllib_srl.common.remote_calls import RunnerFailure
from rllib_srl.replay.journal.codec import decode
from rllib_srl.replay.journal.journal import Journal

# phase: whose method begins it, and the method
PHASES: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "play": (lambda algo: algo.runners, "play_groups"),
    "remember": (lambda algo: algo.memory, "add"),
    "learn": (lambda algo: algo, "_learn"),
    "sync": (lambda algo: algo.weight_sync, "sync"),
    "evaluate": (lambda algo: algo, "evaluate"),
}
REST = "rest"
CANARY = 1e-3  # mean gap of log-probs, nats; an engine with other weights always exceeds it
BACK_S = 120.0  # time for a process to come back


def small_config(directory: Path, model: str = "tiny") -> SRLConfig:
    """Return settings of a small run with two runners and a memory that forgets nothing."""
    config: SRLConfig = (
        SRLConfig()
        .environment("compare", env_config={"num_shots": 0})
        .rl_module(model_config={"model": model})
        .env_runners(engine="transformers", num_env_runners=2, num_cpus_per_env_runner=0.25)
        .env_runners(max_turn_tokens=8, max_episode_tokens=128)
        .learners(num_cpus_per_learner=0.25)
        .training(lr=3e-4, num_prompts_per_batch=8, group_size=4, compute_dtype="float32", checkpoint_every=0)
        .training(log_directory=str(directory))
        .replay(revisit_fraction=0.25, reuse_fraction=0.25, min_buffer_size=4, groups_per_item=99, max_logp_gap=None)
        .evaluation(evaluation_interval=1, evaluation_duration=4)
        .resources(num_cpus_for_main_process=0.25)
        .debugging(seed=1)
    )
    return config


class Books:
    """The acknowledged operations of a run's memory: the groups it took, and how often it returned each."""

    def __init__(self, memory: Any) -> None:
        """Record every answer of `memory` from now on."""
        self.kept: set[str] = set()
        self.drawn: Counter[str] = Counter()
        add, sample = memory.add, memory.sample

        def noted_add(groups: Any, *arguments: Any) -> Any:
            visits = add(groups, *arguments)
            self.kept |= {group_id for group_id, visit in visits.items() if not visit.refused}
            return visits

        def noted_sample(*arguments: Any) -> Any:
            groups = sample(*arguments)
            self.drawn.update(group.group_id for group in groups)
            return groups

        memory.add, memory.sample = noted_add, noted_sample

    def faults(self, memory: Any, directory: Path) -> list[str]:
        """Return a message for each difference between journals and acknowledged operations; nothing may be evicted."""
        memory.snapshot(directory)
        uses: Counter[str] = Counter()
        for index in range(memory.num_shards):
            with Journal(directory / f"shard_{index}.sqlite") as journal:
                stored = journal.load()
                for seq, row in zip(stored.seqs.tolist(), stored.groups, strict=True):
                    uses[decode(journal.read_group(seq)).group_id] = int(row["uses"])
        faults = [f"acknowledged groups are missing: {sorted(lost)}"] if (lost := self.kept - set(uses)) else []
        if set(uses) - self.kept:
            faults.append(f"groups that were never acknowledged: {sorted(set(uses) - self.kept)}")
        if +uses != self.drawn:
            faults.append(f"draws {dict(self.drawn)} but uses {dict(+uses)}")
        return faults


def pid_of_runner(algo: Any, runner_id: int) -> int:
    """Return a runner's process id once it answers."""

    def ask() -> int | None:
        try:
            return int(algo.runners.where(runner_id, BACK_S)["pid"])
        except RunnerFailure:
            return None

    return _once_back(ask)


def pid_of_buffer(algo: Any, shard: int = 0) -> int:
    """Return a buffer's process id once it answers."""

    def ask() -> int | None:
        asked = algo.memory._shards[shard].__ray_call__.remote(lambda self: os.getpid())
        try:
            return int(ray.get(asked, timeout=BACK_S))
        except RayActorError:
            return None

    return _once_back(ask)


def _once_back(ask: Callable[[], int | None]) -> int:
    deadline = time.monotonic() + BACK_S
    while (pid := ask()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"a killed process did not come back within {BACK_S:g} s")
        time.sleep(0.2)
    return pid


def kill(pid: int) -> None:
    """Kill a process, and wait until it is gone."""
    process = psutil.Process(pid)
    process.kill()
    process.wait(10)


@contextmanager
def killed_in(algo: Any, phase: str, pid: int, delay_s: float = 0.0) -> Iterator[None]:
    """Kill a process when a phase next begins.

    Args:
        algo: the algorithm.
        phase: a key of `PHASES`.
        pid: of the process to kill.
        delay_s: from the start of the phase to the kill; 0: before the phase does anything.
    """
    find, name = PHASES[phase]
    owner = find(algo)
    usual, is_done = getattr(owner, name), threading.Event()
    killer = threading.Timer(delay_s, kill, (pid,))

    def fatal(*arguments: Any, **named: Any) -> Any:
        if not is_done.is_set():
            is_done.set()
            killer.start()
            if not delay_s:
                killer.join()
        return usual(*arguments, **named)

    was_own = vars(owner).get(name)
    setattr(owner, name, fatal)
    try:
        yield
    finally:
        if was_own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, was_own)
    if not is_done.is_set():
        raise RuntimeError(f"phase {phase} never came")
    killer.join()


def faults_of(algo: Any, result: Mapping[str, Any]) -> list[str]:
    """Return an error message for each fault after an iteration."""
    played, learnt, faults = result["env_runners"], result["learners"]["default_policy"], []
    num_groups = sum(played[f"num_groups_{kind}"] for kind in ("with_signal", "without_signal", "dropped"))
    if num_groups != algo.config.num_prompts_per_batch:
        faults.append(f"{num_groups:g} prompts of {algo.config.num_prompts_per_batch} are accounted for")
    if result["replay"]["num_groups_lost"]:
        faults.append(f"{result['replay']['num_groups_lost']:g} groups were lost on the way to the memory")
    if learnt["reuse/num_tokens"] and not learnt["reuse/gradient_norm"] > 0:
        faults.append("reused groups have no gradient")
    prints = list(algo.runners.fingerprint(algo.runners.ids, BACK_S).values())
    if any(one != prints[0] for one in prints):
        faults.append("the engines hold different weights")
    gap, lost = algo.weight_sync.sync(algo.version)
    if lost or gap is None or not gap.mean < CANARY:
        faults.append(f"the engines do not compute with version {algo.version}: {gap}, lost {sorted(lost)}")
    elif list(algo.runners.fingerprint(algo.runners.ids, BACK_S).values()) != prints:
        faults.append(f"the engines did not hold version {algo.version}")
    return faults


def kill_phases(
    algo: Any,
    num_rounds: int,
    directory: Path,
    seed: int,
    delay_s: float = 0.0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train one iteration per phase and round, each with the kill of a runner and, in another phase, of a buffer.

    Args:
        algo: with two runners and a memory that evicts nothing; it evaluates in every iteration.
        num_rounds: number of times each phase has its two kills.
        directory: for copies of the journals.
        seed: chooses the killed runners.
        delay_s: from the start of "play" to a runner's kill, so that it dies while it plays.
        say: called with a line for each iteration.

    Returns:
        The number of iterations and kills, the restarts that were counted, and all faults.
    """
    chance, phases, books = random.Random(seed), list(PHASES), Books(algo.memory)
    result = algo.train()  # so that there are items to draw
    kills: Counter[str] = Counter()
    faults, num_reused = faults_of(algo, result), 0.0
    for number in range(num_rounds):
        for at, phase in enumerate([*phases, REST]):
            victim = chance.choice(algo.runners.ids)
            runner, of_buffer = pid_of_runner(algo, victim), phases[(at + 2) % len(phases)]
            if phase == REST:
                kill(runner)
                pid_of_runner(algo, victim)  # wait until it has restarted, with the weights of its files
                result = algo.train()
            else:
                with (
                    killed_in(algo, phase, runner, delay_s if phase == "play" else 0.0),
                    killed_in(algo, of_buffer, pid_of_buffer(algo)),
                ):
                    result = algo.train()
                kills[f"buffer in {of_buffer}"] += 1
            kills[f"runner in {phase}"] += 1
            num_reused += result["learners"]["default_policy"]["reuse/num_tokens"]
            where = f"round {number + 1}, a runner in {phase}, the buffer in {of_buffer if phase != REST else 'none'}"
            found = [f"{where}: {fault}" for fault in faults_of(algo, result)]
            faults += found
            say(f"{where}: {len(found)} faults")
    if not num_reused:
        faults.append("no group was reused, so reuse was not tested")
    faults += books.faults(algo.memory, directory)
    return {
        "num_iterations": algo.iteration,
        "kills": dict(kills),
        "num_runner_restarts": int(result["num_runner_restarts"]),
        "num_buffer_restarts": int(result["replay"]["num_restarts"]),
        "num_reused_tokens": int(num_reused),
        "faults": faults,
    }


def main() -> int:
    """Run, print the result as JSON; return 0 if no fault was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="show the output of Ray and RLlib")
    arguments = parser.parse_args()
    start_ray(arguments.verbose)
    with tempfile.TemporaryDirectory(prefix="kill_phases_") as directory:
        algo = small_config(Path(directory) / "log", arguments.model).build_algo()
        try:
            place = Path(directory) / "copy"
            result = kill_phases(algo, arguments.rounds, place, arguments.seed, say=partial(print, flush=True))
        finally:
            algo.stop()
    print(json.dumps(result))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
