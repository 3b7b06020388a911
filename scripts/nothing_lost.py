#!/usr/bin/env python3
"""Kill and break what serves a model, with real processes, and check that nothing that was acknowledged is lost.

    python scripts/nothing_lost.py --out results/nothing_lost               everything; hours on 2 cores
    python scripts/nothing_lost.py --out results/nothing_lost --kills 2 --parts gateway disk

    somebody chats and rates without end, while versions of the tiny model are trained, gated and pushed
      trainer, server, gateway   SIGKILL at a seeded moment; then an answer and its rating must be acknowledged
      requests                   200 broken ones: 4xx or an answer, and nothing without the token
      disk                       no file can grow: one line, 507; with room again all goes on
      raters                     two people rate the same answers at the same moment
      after each of them         all that was ever acknowledged is there, and the version that answers is the active one

Exit status 0: nothing was found, and after all of it another version was decided.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import sqlite3
import statistics
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages

from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.display import table
from rllib_srl.cli.shared.flags import help_of
from rllib_srl.people.rating import TAKEN_BACK
from rllib_srl.people.served_store import FILE
from rllib_srl.replay.admission import redact
from scripts.broken_requests import broken_requests
from scripts.evening import NotServed, Served, question_of

OF_KIND = {"trainer": "rllib_srl.cli.serving.trainer_process", "server": "rllib_srl.cli.serving.end_with_owner"}
KINDS = ("trainer", "server", "gateway")
PARTS = (*KINDS, "requests", "disk", "raters")
FLAGS = (
    *("tiny", "--keep", "compare", "--train-after", 8, "--lr", 1e-4, "--rank", 4, "--passes", 2),
    *("--slice-answers", 4, "--gate-prompts", 8, "--max-drop", 0.9, "--max-tokens", 16),
)
LONGEST_WAIT_S = 8.0  # before a kill
GAP_S = 0.4  # between two answers, in which the trainer advances
PATIENCE_S = 600.0
GONE_S = 60.0  # for what a killed gateway has started
ROOM = 20_000  # bytes that a full disk has left
NUM_REQUESTS, NUM_RATED = 200, 40
MOMENTARY = (429, 502, 503)  # statuses that may be while something is started again


class Cut(Exception):
    """A stream has ended without its end."""


@dataclass
class Ledger:
    """What was acknowledged. Invariant: a rating that was sent and not acknowledged leaves both values possible."""

    answers: dict[str, str] = field(default_factory=dict)  # id -> text
    possible: dict[str, set[str]] = field(default_factory=dict)  # id -> values that its rating may have
    num_ratings: int = 0
    errors: list[str] = field(default_factory=list)


def lost_of(ledger: Ledger, answers: Mapping[str, str], values: Mapping[str, str]) -> list[str]:
    """Return a line for each acknowledged answer or rating that is not stored as it was: id -> text, id -> value."""
    lost = [f"answer {name}" for name, text in ledger.answers.items() if answers.get(name) != redact(text)]
    for name, possible in ledger.possible.items():
        if (value := values.get(name, TAKEN_BACK)) not in possible:
            lost.append(f"rating of {name}: {value}; expected {' or '.join(sorted(possible))}")
    return lost


class Visitor(threading.Thread):
    """Chats and rates until stopped. Invariant: while `holding` is held, nothing is under way."""

    def __init__(self, served: Served, seed: int) -> None:
        """Visit a server, which may be replaced by setting `served`."""
        super().__init__(daemon=True, name="visitor")
        self.served, self.ledger, self.holding = served, Ledger(), threading.Lock()
        self._rng, self._is_over = random.Random(seed), threading.Event()

    def run(self) -> None:
        """Chat and rate."""
        while not self._is_over.is_set():
            self.try_once()
            self._is_over.wait(GAP_S)

    def stop(self) -> None:
        """End after the present exchange."""
        self._is_over.set()
        self.join(PATIENCE_S)

    def try_once(self) -> bool:
        """Ask and rate once; return whether both were acknowledged."""
        with self.holding:
            try:
                self.rate(self.ask(), self._rng.random() < 0.5)
                return True
            except urllib.error.HTTPError as error:
                if error.code not in MOMENTARY:
                    self.ledger.errors.append(f"status {error.code}: {error.read(300)!r}")
                return False
            except (OSError, HTTPException, Cut):
                return False

    def ask(self) -> str:
        """Ask; return the id of the answer."""
        said = {"model": "policy", "messages": [{"role": "user", "content": question_of(self._rng)}]}
        if self._rng.random() < 0.5:
            name, text = whole_of(self.served.read("POST", "/chat/completions", {**said, "stream": True}))
        else:
            reply = self.served.call("POST", "/chat/completions", said)
            name, text = reply["id"], reply["choices"][0]["message"]["content"] or ""
        self.ledger.answers[name] = text
        return name

    def rate(self, name: str, is_good: bool) -> None:
        """Rate an answer."""
        value = "good" if is_good else "bad"
        self.ledger.possible.setdefault(name, {TAKEN_BACK}).add(value)
        self.served.rate(name, is_good)
        self.ledger.possible[name] = {value}
        self.ledger.num_ratings += 1

    def resume_training(self) -> None:
        """Continue training, as a person would once it was paused since the trainer was killed thrice."""
        with suppress(OSError, HTTPException, ValueError):
            if self.served.call("GET", "/status")["training"]["is_paused"]:
                self.served.pause(False)


def whole_of(body: bytes) -> tuple[str, str]:
    """Return id and text of a stream.

    Raises:
        Cut: it is not whole.
    """
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    if not events or events.pop() != b"[DONE]":
        raise Cut
    values = [json.loads(event) for event in events]
    if any("error" in value for value in values):
        raise Cut
    deltas = [choice["delta"].get("content") or "" for value in values for choice in value["choices"]]
    return str(values[0]["id"]), "".join(deltas)


class Model:
    """A served model with a visitor. Invariant: between two methods `srl serve` runs."""

    def __init__(self, out: Path, seed: int) -> None:
        """Start both."""
        out.mkdir(parents=True)
        self.directory, self._log = out / "served", (out / "serve.log").open("w")
        self.rng = random.Random(seed)
        self.served = Served(FLAGS, self.directory, self._log)
        self.visitor = Visitor(self.served, seed)
        self.visitor.start()

    def stop(self) -> None:
        """End both."""
        self.visitor.stop()
        self.served.stop()
        self._log.close()

    def processes(self, kind: str) -> list[psutil.Process]:
        """Return the processes of a kind; of vLLM's server also those that compute, not a compiler or a tracker.

        Raises:
            NotServed: `srl serve` has ended by itself.
        """
        if self.served.process.poll() is not None:
            raise NotServed(f"srl serve has ended by itself with status {self.served.process.returncode}")
        gateway, processes = psutil.Process(self.served.process.pid), []
        if kind == "gateway":
            return [gateway]
        for child in gateway.children():
            with suppress(psutil.NoSuchProcess):
                if OF_KIND[kind] in child.cmdline():
                    inside = child.children(recursive=True) if kind == "server" else []
                    processes += [child, *(other for other in inside if "vllm" in " ".join(other.cmdline()).lower())]
        return [process for process in processes if is_alive(process)]

    def kill(self, kind: str) -> float:
        """Kill a process; return the seconds until others run, and an answer and its rating are acknowledged."""
        self._wait(lambda: bool(self.processes(kind)), f"there is no process to kill ({kind})")
        time.sleep(self.rng.uniform(0, LONGEST_WAIT_S))
        self._wait(lambda: bool(self.processes(kind)), f"there is no process to kill ({kind})")
        victims, family = self.processes(kind), psutil.Process(self.served.process.pid).children(recursive=True)
        victim, begun = self.rng.choice(victims), time.monotonic()
        victim.kill()
        if kind == "gateway":
            self.served.process.wait(GONE_S)
            left = [process for process in psutil.wait_procs(family, GONE_S)[1] if is_alive(process)]
            self.visitor.ledger.errors += [f"process {process.pid} outlives the gateway" for process in left]
            self.served = self.visitor.served = Served(FLAGS, self.directory, self._log)
        before = {process.pid for process in victims} if kind == "server" else {victim.pid}

        def goes_on() -> bool:
            now = {process.pid for process in self.processes(kind)}
            return bool(now) and not now & before and self.visitor.try_once()

        self._wait(goes_on, f"nothing goes on after the kill ({kind})")
        return time.monotonic() - begun

    def _wait(self, is_so: Callable[[], bool], otherwise: str) -> None:
        deadline, look_at = time.monotonic() + PATIENCE_S, 0.0
        while not is_so():
            if time.monotonic() > deadline:
                raise NotServed(f"{otherwise} within {PATIENCE_S:g} s")
            if time.monotonic() > look_at:
                self.visitor.resume_training()
                look_at = time.monotonic() + 2
            time.sleep(0.05)

    def rows(self, query: str) -> list[Any]:
        """Return rows of the model's database, read beside the server."""
        with closing(sqlite3.connect(f"file:{self.directory / FILE}?mode=ro", uri=True, timeout=GONE_S)) as database:
            return database.execute(query).fetchall()

    def num_lost(self) -> int:
        """Return how much of what was acknowledged is gone, and note it and what answers and should not."""
        query = "SELECT a.group_id, r.value FROM answers a JOIN ratings r ON r.seq = a.newest"
        with self.visitor.holding:
            answers = dict(self.rows("SELECT id, answer FROM conversations"))
            lost = lost_of(self.visitor.ledger, answers, dict(self.rows(query)))
        self.visitor.ledger.errors += lost
        return len(lost)

    def answers_as_it_says(self) -> None:
        """Note it if another version answers than the active one; the active one may change meanwhile."""
        query, seen = "SELECT number FROM versions WHERE state = 'active'", [self._active()]
        body = {"model": "policy", "messages": [{"role": "user", "content": "Name a fruit."}]}
        with suppress(OSError, HTTPException):
            said = self.served.call("POST", "/chat/completions", body)["system_fingerprint"]
            seen += [number for (number,) in self.rows(query)] or [0]
            if said not in {f"version-{number}" for number in seen}:
                self.visitor.ledger.errors.append(f"{said} answers; active is version {seen[-1]}")

    def _active(self) -> int:
        return int(next(iter(self.rows("SELECT number FROM versions WHERE state = 'active'")), (0,))[0])

    def decided(self) -> int:
        """Return how many versions have been decided."""
        query = "SELECT count(*) FROM versions WHERE state IN ('active', 'superseded', 'rejected', 'rolled_back')"
        return int(self.rows(query)[0][0])

    def wait_for_another(self) -> None:
        """Wait until another version is decided.

        Raises:
            NotServed: none is.
        """
        before = self.decided()
        self._wait(lambda: self.decided() > before, "no other version is decided")


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs, and is not only waited for."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# --- parts: each returns how many times something was done, and what was seen ---------------------------


def kills(model: Model, kind: str, num: int) -> tuple[int, str]:
    """Kill the processes of a kind."""
    seconds = []
    for _ in range(num):
        seconds.append(model.kill(kind))
        model.num_lost()
        model.answers_as_it_says()
        errors = len(model.visitor.ledger.errors)
        print(f"{kind} killed; goes on after {seconds[-1]:.1f} s; errors so far: {errors}", flush=True)
    return num, f"goes on after {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s"


def requests(model: Model) -> tuple[int, str]:
    """Send broken requests."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "What is in the attic?"}]}
    name, url = model.served.call("POST", "/chat/completions", body)["id"], urlsplit(model.served.page)
    token = (model.directory / "token").read_text().strip()
    with model.visitor.holding:
        statuses, errors = broken_requests(url, token, name, b"attic", NUM_REQUESTS)
    model.visitor.ledger.errors += errors
    return NUM_REQUESTS, ", ".join(f"{status or 'waits'}: {num}" for status, num in sorted(statuses.items()))


def disk(model: Model) -> tuple[int, str]:
    """Let no file of the gateway grow: a limit of the process stands for a full disk."""
    process, refused, begun = psutil.Process(model.served.process.pid), 0, time.monotonic()
    sizes = [file.stat().st_size for file in model.directory.glob("*.db-wal")]
    usual = process.rlimit(resource.RLIMIT_FSIZE)
    with model.visitor.holding:
        process.rlimit(resource.RLIMIT_FSIZE, (max(sizes) + ROOM, usual[1]))
        while refused < 5 and time.monotonic() < begun + PATIENCE_S:
            try:
                model.visitor.rate(model.visitor.ask(), True)
            except Cut:  # a stream whose answer could not be logged
                refused += 1
            except urllib.error.HTTPError as error:
                refused += error.code == 507
                if error.code != 507:
                    model.visitor.ledger.errors.append(f"status {error.code} on a full disk: {error.read(300)!r}")
                    break
        process.rlimit(resource.RLIMIT_FSIZE, usual)
    if not refused or not model.visitor.try_once():
        model.visitor.ledger.errors.append("the full disk was not noticed, or nothing goes on afterwards")
    return refused, "refused with 507, or a stream without its end; all goes on with room"


def raters(model: Model) -> tuple[int, str]:
    """Let two people rate the same answers at the same moment."""
    changed: list[tuple[str, str]] = []

    def rate(name: str, value: str) -> None:
        body = {"rating": value, "rater": value}
        if model.served.call("PUT", f"/conversations/{name}/rating", body)["is_changed"]:
            changed.append((name, value))

    with model.visitor.holding:
        names = [model.visitor.ask() for _ in range(NUM_RATED)]
        for name in names:
            both = [threading.Thread(target=rate, args=(name, value)) for value in ("good", "bad")]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join(PATIENCE_S)
            model.visitor.ledger.possible[name] = {"good", "bad"}
            model.visitor.ledger.num_ratings += 2
    query = "SELECT a.group_id, r.value FROM answers a JOIN ratings r ON r.answer = a.number"
    stored = set(model.rows(query))
    model.visitor.ledger.errors += [f"rating {row} was acknowledged and is not stored" for row in set(changed) - stored]
    return 2 * NUM_RATED, f"{len(changed)} changes, all in the log"


def play(arguments: argparse.Namespace) -> int:
    """Do all parts, print a table; return the exit status."""
    if arguments.out.exists():
        raise ValueError(f"--out {arguments.out} exists; expected a new directory")
    others: dict[str, Callable[[Model], tuple[int, str]]] = {"requests": requests, "disk": disk, "raters": raters}
    rows, model = [["part", "times", "acknowledged so far", "lost", "seen"]], Model(arguments.out, arguments.seed)
    ledger = model.visitor.ledger
    try:
        for part in arguments.parts:
            num_errors = len(ledger.errors)
            num, seen = others[part](model) if part in others else kills(model, part, arguments.kills)
            so_far = f"{len(ledger.answers):,} answers, {ledger.num_ratings:,} ratings"
            rows.append([part, str(num), so_far, str(model.num_lost()), seen])
            print("  ".join(rows[-1]), f"{len(ledger.errors) - num_errors} errors", flush=True)
        model.wait_for_another()
    except (NotServed, OSError, HTTPException, psutil.Error) as error:
        ledger.errors.append(f"it has ended early: {type(error).__name__}: {error}")
    finally:
        num_decided = model.decided()
        model.stop()
    for line in ledger.errors:
        print(f"FOUND  {line}")
    print(table(rows))
    print(f"versions decided: {num_decided}")
    return 1 if ledger.errors else 0


def main() -> int:
    """Run the script."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is ended, too
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new directory")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="of each kind (default: 20)")
    text = f"of {', '.join(PARTS)} (default: all)"
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=text)
    parser.add_argument("--seed", type=int, default=0, help="of moments and chats (default: 0)")
    arguments = parser.parse_args()
    if arguments.kills < 1:
        parser.error(f"--kills {arguments.kills}; expected at least 1")
    return run_cleanly(lambda: play(arguments), debug=False)


if __name__ == "__main__":
    sys.exit(main())
