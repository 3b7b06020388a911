"""What a served model has acknowledged to a visitor, and whether it still holds: the checks of `serving.py`."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import threading
import urllib.error
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path

import psutil

from rllib_srl.cli.serving import adapter
from rllib_srl.cli.serving.adapter import AdapterError
from rllib_srl.cli.serving.canary import check, continuations
from rllib_srl.cli.serving.place import Place, Stores
from rllib_srl.cli.serving.serving import name_of
from rllib_srl.cli.serving.vllm_server import ServerError, VLLMServer
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.people.lineage.versions import VERSIONS
from rllib_srl.people.rating import TAKEN_BACK
from rllib_srl.replay.admission.secrets import redact
from scripts.evening import Served, question_of

GAP_S = 0.4  # between two answers, in which the trainer advances
SHARE_STREAMED, SHARE_CHANGED = 0.5, 0.04  # of answers; of ratings, by which an older one is changed
MOMENTARY = (429, 502, 503)  # statuses that may be while something is started again
READ_TIMEOUT_S = 10.0
TRIES = 5


@dataclass
class Ledger:
    """What was acknowledged. Invariant: a rating that was sent and not acknowledged leaves both values possible."""

    answers: dict[str, str] = field(default_factory=dict)  # id -> text
    possible: dict[str, set[str]] = field(default_factory=dict)  # id -> values that its rating may have
    num_ratings: int = 0
    num_paused: int = 0
    faults: list[str] = field(default_factory=list)


class Visitor(threading.Thread):
    """Chats and rates until stopped. Invariant: `doing` is what it waits for, "" between two requests."""

    def __init__(self, served: Served, ledger: Ledger, seed: int) -> None:
        """Visit a server, which may be replaced by setting `served`."""
        super().__init__(daemon=True, name="visitor")
        self.served, self.ledger, self.doing = served, ledger, ""
        self._rng, self._is_over = random.Random(seed), threading.Event()
        self.holding = threading.Lock()  # held for one exchange, and while all is checked
        self.may_change = True  # ratings of before, by which versions in training get stale

    def run(self) -> None:
        """Chat and rate."""
        while not self._is_over.is_set():
            self.try_once()
            self._is_over.wait(GAP_S)

    def stop(self) -> None:
        """End after the present exchange."""
        self._is_over.set()
        self.join(300)

    def try_once(self) -> bool:
        """Ask and rate once; return whether both were acknowledged."""
        with self.holding:
            try:
                name = self._asked()
                changed = self.may_change and self._rng.random() < SHARE_CHANGED
                self._rate(self._rng.choice(sorted(self.ledger.possible)) if changed and self.ledger.possible else name)
                return True
            except urllib.error.HTTPError as error:
                if error.code not in MOMENTARY:
                    said = error.read(300).decode(errors="replace")
                    self.ledger.faults.append(f"status {error.code} while the visitor is {self.doing}: {said}")
                return False
            except (OSError, HTTPException, Cut):
                return False
            finally:
                self.doing = ""

    def _asked(self) -> str:
        question, is_streamed = question_of(self._rng), self._rng.random() < SHARE_STREAMED
        self.doing = "answer"
        said = {"model": "policy", "messages": [{"role": "user", "content": question}], "stream": is_streamed}
        if is_streamed:
            name, text = whole_of(self.served.read("POST", "/chat/completions", said))
        else:
            reply = self.served.call("POST", "/chat/completions", said)
            name, text = reply["id"], reply["choices"][0]["message"]["content"] or ""
        self.ledger.answers[name] = text
        return name

    def _rate(self, name: str) -> None:
        is_good = self._rng.random() < 0.5
        value = "good" if is_good else "bad"
        self.ledger.possible.setdefault(name, {TAKEN_BACK}).add(value)
        self.doing = "rating"
        self.served.rate(name, is_good)
        self.ledger.possible[name] = {value}
        self.ledger.num_ratings += 1

    # --- training, as a person sees it ---------------------------------------------------------------

    def is_training_paused(self) -> bool:
        """Return whether training is paused; False also while nothing answers."""
        try:
            return bool(self.served.call("GET", "/status")["training"]["is_paused"])
        except (OSError, HTTPException, ValueError):
            return False

    def resume_training(self) -> None:
        """Resume training, unless nothing answers."""
        with suppress(OSError, HTTPException):
            self.served.call("POST", "/training", {"paused": False})


class Cut(Exception):
    """A stream has ended without its end."""


def whole_of(body: bytes) -> tuple[str, str]:
    """Return id and text of a stream.

    Raises:
        Cut: it is not whole.
    """
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    if not events or events.pop() != b"[DONE]":
        raise Cut
    values = [json.loads(one) for one in events]
    if any("error" in value for value in values):
        raise Cut
    deltas = [choice["delta"].get("content") or "" for value in values for choice in value["choices"]]
    return str(values[0]["id"]), "".join(deltas)


def now_in(place: Place, *states: str) -> list[int]:
    """Return the numbers of the versions in some states, read beside the server."""
    path = place.directory / VERSIONS
    if not path.exists():
        return []
    marks = ", ".join("?" * len(states))
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=READ_TIMEOUT_S)) as database:
        query = f"SELECT number FROM versions WHERE state IN ({marks}) ORDER BY number"
        return [number for (number,) in database.execute(query, states)]


# --- checks ------------------------------------------------------------------------------------------


def faults_of(place: Place, served: Served, visitor: Visitor) -> tuple[list[str], int]:
    """Return what does not hold, and how much of what was acknowledged is lost, while the visitor is held."""
    with visitor.holding:
        stores = Stores(place)
        try:
            lost = lost_of(stores, visitor.ledger)
            faults = lost + lineage_faults(stores)
        finally:
            stores.close()
        for _ in range(TRIES):
            active, found = now_in(place, "active"), served_faults(place, served)
            if active == now_in(place, "active"):
                return faults + found, len(lost)
        return [*faults, "the active version changes all the time"], len(lost)


def lost_of(stores: Stores, ledger: Ledger) -> list[str]:
    """Return a line for each acknowledged answer or rating that is not there as it was."""
    lost = []
    for name, text in ledger.answers.items():
        found = stores.now(partial(stores.conversations.find, name))
        if found is None or found.answer != redact(text):
            lost.append(f"answer {name} is {'lost' if found is None else 'another one'}")
    values = {one.answer.group_id: one.value for one in stores.now(stores.ratings.all)}
    for name, possible in ledger.possible.items():
        if values.get(name, TAKEN_BACK) not in possible:
            lost.append(f"rating of {name} is {values.get(name, TAKEN_BACK)}; expected {' or '.join(possible)}")
    return lost


def lineage_faults(stores: Stores) -> list[str]:
    """Return what contradicts itself in the versions."""
    rows = stores.now(lambda: [(one, stores.lineage.history(one.number)) for one in stores.lineage.all()])
    states = [one.state for one, _ in rows]
    faults = [f"{states.count(one)} versions are {one}" for one in ("active", "training") if states.count(one) > 1]
    by_number = {one.number: one for one, _ in rows}
    for one, history in rows:
        if history[-1][0] != one.state:
            faults.append(f"version {one.number} is {one.state}, and its last change was to {history[-1][0]}")
        if one.parent and one.parent not in by_number:
            faults.append(f"version {one.number} has the parent {one.parent}, which is missing")
        elif one.state == "active" and one.parent and by_number[one.parent].state != "superseded":
            faults.append(f"version {one.number} is active beside its parent, which is {by_number[one.parent].state}")
    return faults


def served_faults(place: Place, served: Served) -> list[str]:
    """Return what speaks against the version that answers: its number, its files, and what the server computes."""
    active = (now_in(place, "active") or [0])[0]
    said = {"model": "policy", "messages": [{"role": "user", "content": "Name a fruit."}]}
    try:
        answered = served.call("POST", "/chat/completions", said)["system_fingerprint"]
        told = served.call("GET", "/versions")["active"]
    except (OSError, HTTPException) as error:
        return [f"no answer right after one was acknowledged: {error}"]
    faults = [] if told == active else [f"the server says version {told}; the lineage {active}"]
    if answered != f"version-{active}":
        faults.append(f"{answered} answers; active is version {active}")
    return faults + (asyncio.run(canary_faults(place, served, active)) if active else [])


async def canary_faults(place: Place, served: Served, active: int) -> list[str]:
    """Return why the server does not compute the active version as its trainer did."""
    stores = Stores(place)
    version = stores.now(lambda: stores.lineage.version(active))
    stores.close()
    directory, fixed = place.version(active), place.settings()
    engine = VLLMServer(Path(fixed["model"]), fixed["context"], fixed["rank"], place.log, has_template=False)
    engine.connect(socket_of(served))
    try:
        adapter.verify(directory, version.files)
        expected = continuations(adapter.read_json(directory / adapter.CANARY))
        check(expected, await engine.continuations(name_of(active), expected), active)
    except (AdapterError, WeightSyncError, ServerError) as error:
        return [f"version {active}: {error}"]
    finally:
        await engine.stop()
    return []


def socket_of(served: Served) -> Path:
    """Return the socket of the engine of a running server."""
    for one in psutil.Process(served.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words = one.cmdline()
            if "--uds" in words:
                return Path(words[words.index("--uds") + 1])
    raise ProcessLookupError("srl serve runs no engine")
