#!/usr/bin/env python3
"""Kill vLLM's server, the gateway and the trainer of `srl serve` at seeded moments, and check that nothing is lost.

    python scripts/chaos/serving.py --out results/chaos                     20 kills of each, about an hour on 2 cores
    python scripts/chaos/serving.py --out results/chaos --kind gateway --kills 5 --seed 3

    somebody chats, rates and changes ratings without end; versions of the tiny model are trained, gated and pushed
       │  SIGKILL  while an answer, a rating, a slice, the gates or a push is under way
       └─> once an answer and a rating are acknowledged again: served_state.py looks at all that was ever acknowledged,
           at the versions, and at what the server computes

The gateway is `srl serve` itself, which is started again by the same command; it starts the two others again. Exit
status 0: no check has found anything, and after the last kill another version was decided.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not scripts/chaos, whose files would hide packages

from rllib_srl.cli.serving.adapter import AdapterError, read_json
from rllib_srl.cli.serving.job import PROGRESS
from rllib_srl.cli.serving.place import Place
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.command_line import help_of
from rllib_srl.cli.shared.display import table
from scripts.chaos.served_state import Ledger, Visitor, faults_of, now_in
from scripts.evening import NotServed, Served

PHASES = {  # kind -> what is under way when it is killed
    "server": ("answer", "rating", "training", "push"),
    "gateway": ("answer", "rating", "training", "push"),
    "trainer": ("answer", "rating", "start", "training", "gates"),
}
DELAYS_S = {"answer": 0.15, "rating": 0.01, "start": 8.0, "training": 6.0, "gates": 2.0, "push": 0.6}  # at most
PHASE_TIMEOUT_S = 120.0  # after which the kill comes anyway
RECOVERY_TIMEOUT_S = 300.0
DECIDED_TIMEOUT_S = 400.0
GONE_TIMEOUT_S = 20.0  # for what a killed gateway has started
ASK_STATUS_S = 2.0  # between two looks at the status
FLAGS = (
    *("tiny", "--keep", "compare", "--train-after", 8, "--lr", 1e-4, "--rank", 4, "--passes", 2),
    *("--slice-answers", 4, "--gate-prompts", 8, "--max-drop", 0.9, "--max-tokens", 16),
)


@dataclass
class Kills:
    """The kills of one kind."""

    phases: list[str] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    num_lost: int = 0
    faults: list[str] = field(default_factory=list)


class Evening:
    """A served model with a visitor. Invariant: between two methods `srl serve` runs and answers."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        """Start both."""
        self._rng, self._looked_at = rng, 0.0
        directory.mkdir(parents=True)
        self._log = (directory / "serve.log").open("w")
        self.place = Place(directory / "served")
        self.ledger = Ledger()
        self.served = self._served()
        self.visitor = Visitor(self.served, self.ledger, rng.randrange(2**31))
        self.visitor.start()

    def _served(self) -> Served:
        return Served(FLAGS, self.place.directory, self._log)

    def stop(self) -> None:
        """End both."""
        if hasattr(self, "visitor"):
            self.visitor.stop()
        self.served.stop()
        self._log.close()

    # --- killing ---------------------------------------------------------------------------------

    def kill(self, kind: str, phase: str, kills: Kills) -> None:
        """Kill a process in a phase, wait until all goes on, and note what was lost."""
        reached = self._wait_for(kind, phase)
        time.sleep(self._rng.uniform(0, DELAYS_S[phase]))
        victims = self._victims(kind)
        kept = {one.pid for one in self._processes("server")}
        family = psutil.Process(self.served.process.pid).children(recursive=True)
        victim = self._rng.choice(victims)
        begun = time.monotonic()
        with suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)
        kills.phases.append(phase if reached else "none")
        if kind == "gateway":
            self.served.process.wait(GONE_TIMEOUT_S)
            left = psutil.wait_procs(family, GONE_TIMEOUT_S)[1]
            kills.faults += [f"{' '.join(one.cmdline()[:4])} outlives the gateway" for one in left if is_alive(one)]
            self.visitor.served = self.served = self._served()
        is_back = self._goes_on(kind, kept if kind == "server" else {victim.pid}, begun)
        kills.recoveries_s.append(time.monotonic() - begun)
        found, num_lost = faults_of(self.place, self.served, self.visitor)
        found += [] if is_back else [f"nothing goes on within {RECOVERY_TIMEOUT_S:g} s"]
        kills.num_lost += num_lost
        kills.faults += [f"{kind} killed in phase {phase}: {one}" for one in found]

    def _victims(self, kind: str) -> list[psutil.Process]:
        """Wait for processes of a kind: a trainer may have ended just now."""
        deadline = time.monotonic() + RECOVERY_TIMEOUT_S
        while time.monotonic() < deadline:
            if found := self._processes(kind):
                return found
            self._resume()
            time.sleep(0.01)
        raise NotServed(f"there was no process to kill ({kind}) for {RECOVERY_TIMEOUT_S:g} s")

    def _wait_for(self, kind: str, phase: str) -> bool:
        """Wait for a phase; return whether it was reached."""
        deadline = time.monotonic() + PHASE_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._is_in(phase) and self._processes(kind):
                return True
            self._resume()
            time.sleep(0.005)
        return False

    def _is_in(self, phase: str) -> bool:
        if phase in ("answer", "rating"):
            return self.visitor.doing == phase
        if phase == "push":
            return bool(now_in(self.place, "candidate"))
        training = now_in(self.place, "training")
        if not training or not self._processes("trainer"):
            return False
        try:
            progress = read_json(self.place.version(training[0]) / PROGRESS)
        except AdapterError:  # no slice yet
            return phase == "start"
        is_done = progress["done"] == progress["of"]
        return phase == ("gates" if is_done else "training")

    def _processes(self, kind: str) -> list[psutil.Process]:
        """Return the processes of a kind: for vLLM's server its keeper, itself and its engine.

        Raises:
            NotServed: `srl serve` has ended by itself.
        """
        if self.served.process.poll() is not None:
            raise NotServed(f"srl serve has ended by itself with status {self.served.process.returncode}")
        gateway = psutil.Process(self.served.process.pid)
        if kind == "gateway":
            return [gateway]
        part = "rllib_srl.cli.serving.trainer.process" if kind == "trainer" else "rllib_srl.cli.serving.kept"
        found = []
        for one in gateway.children():
            with suppress(psutil.NoSuchProcess):
                if part in one.cmdline():
                    inside = one.children(recursive=True) if kind == "server" else []
                    found += [one, *(other for other in inside if "resource_tracker" not in " ".join(other.cmdline()))]
        return [one for one in found if is_alive(one)]

    # --- going on --------------------------------------------------------------------------------

    def _goes_on(self, kind: str, before: set[int], begun: float) -> bool:
        """Wait until others than the processes before run, and an answer and a rating are acknowledged."""
        while time.monotonic() < begun + RECOVERY_TIMEOUT_S:
            self._resume()
            now = {one.pid for one in self._processes(kind)}
            if now and not now & before and self.visitor.try_once():
                return True
            time.sleep(0.05)
        return False

    def _resume(self) -> None:
        """Resume training as a person would, once it was paused since the trainer failed thrice."""
        if time.monotonic() < self._looked_at + ASK_STATUS_S:
            return
        self._looked_at = time.monotonic()
        if self.visitor.is_training_paused():
            self.ledger.num_paused += 1
            self.visitor.resume_training()

    def is_another_decided(self) -> bool:
        """Wait until a version that is not decided yet is; return whether one is in time."""
        self.visitor.may_change = False
        deadline, states = time.monotonic() + DECIDED_TIMEOUT_S, ("active", "superseded", "rejected")
        before = set(now_in(self.place, *states))
        while time.monotonic() < deadline:
            if set(now_in(self.place, *states)) - before:
                return True
            self._resume()
            time.sleep(0.2)
        return False


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs, and is not only waited for."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def play(arguments: argparse.Namespace) -> int:
    """Kill, check, print a table; return the exit status."""
    if arguments.out.exists():
        raise ValueError(f"--out {arguments.out} exists; expected a new directory")
    if arguments.kills < 1:
        raise ValueError(f"--kills {arguments.kills}; expected 1 or more")
    rng = random.Random(arguments.seed)
    kinds = [arguments.kind] if arguments.kind else list(PHASES)
    phases = {kind: rng.sample(PHASES[kind], len(PHASES[kind])) for kind in kinds}
    order = [(kind, phases[kind][at % len(phases[kind])]) for kind in kinds for at in range(arguments.kills)]
    rng.shuffle(order)
    found = {kind: Kills() for kind in kinds}
    is_decided, until = False, time.monotonic() + (arguments.limit or float("inf"))
    evening = Evening(arguments.out, rng)
    try:
        for kind, phase in order:
            if time.monotonic() > until:
                break
            evening.kill(kind, phase, found[kind])
            print(f"{kind:8} {phase:9} {found[kind].recoveries_s[-1]:6.1f} s", flush=True)
        is_decided = evening.is_another_decided()
    except NotServed as error:
        evening.ledger.faults.append(f"the loop has ended: {error}")
    finally:
        evening.stop()
    return reported(found, evening, is_decided)


def reported(found: dict[str, Kills], evening: Evening, is_decided: bool) -> int:
    """Print faults first, then the table; return the exit status."""
    faults = [one for kills in found.values() for one in kills.faults] + evening.ledger.faults
    faults += [] if is_decided else ["after the last kill no other version was decided"]
    for one in faults:
        print(f"FOUND  {one}")
    rows = [["kind", "kills", "lost", "median s", "longest s", "phases"]]
    for kind, kills in found.items():
        seconds = kills.recoveries_s or [float("nan")]
        phases = ", ".join(f"{phase} {kills.phases.count(phase)}" for phase in sorted(set(kills.phases)))
        times = [f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"]
        rows.append([kind, str(len(kills.phases)), str(kills.num_lost), *times, phases])
    print(table(rows))
    ledger = evening.ledger
    print(f"acknowledged: {len(ledger.answers)} answers, {ledger.num_ratings} ratings")
    print(f"training was paused, since the trainer failed thrice, and resumed by hand: {ledger.num_paused}")
    states = {state: len(now_in(evening.place, state)) for state in ("active", "superseded", "rejected", "stale")}
    print("versions: " + ", ".join(f"{num} {state}" for state, num in states.items()))
    return 1 if faults else 0


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new directory")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="of each kind (default: 20)")
    parser.add_argument("--kind", choices=tuple(PHASES), help="only this kind")
    parser.add_argument("--seed", type=int, default=0, help="of order, moments and chats (default: 0)")
    parser.add_argument("--limit", type=float, metavar="S", help="begin no kill after so many seconds")
    arguments = parser.parse_args()
    return run_cleanly(lambda: play(arguments), debug=False)


if __name__ == "__main__":
    sys.exit(main())
