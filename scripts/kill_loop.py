#!/usr/bin/env python3
"""Kill a process that writes a journal, again and again, and check each time that no acknowledged commit is lost.

    python scripts/kill_loop.py --kills 500

    parent ──fork──> writer: commit, tidy up, copy ... each commit acknowledged through a pipe once it has returned
       │  SIGKILL at a random moment
       └─> opens the journal: every acknowledged commit is there, at most one more is, and the content equals that of a
           dictionary that followed the same commits; a copy, if there is one, is complete too

Commit i is a function of (seed, i), so the parent can compute what each one changed. A kill does not show what a
machine without power loses; it shows that no state on disk is half a commit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages

from rllib_srl.replay.journal.journal import Commit, Journal, Stored
from rllib_srl.types import Prompt

ITEM = np.dtype([("key", "u8"), ("due", "f8")])
GROUP = np.dtype([("seq", "u8"), ("slot", "i4"), ("uses", "i4")])
NUM_SLOTS = 40
LONGEST_LIFE_S = 0.1
SHARE_OF_OPENINGS = 0.2  # of kills that may come while the journal is still being opened
_ACKNOWLEDGED = 8  # bytes of a position in the pipe


def row_of(dtype: np.dtype, *values: float) -> bytes:
    """Return the bytes of one record."""
    return np.array(tuple(values), dtype).tobytes()


class Twin:
    """The expected content of a journal: dictionaries that follow the same commits.

    Invariant: equal seeds and positions give equal twins.
    """

    def __init__(self, seed: int) -> None:
        """Start empty, at position 0."""
        self.seed, self.position = seed, 0
        self.items: dict[int, tuple[bytes, Prompt]] = {}
        self.vectors: dict[int, bytes] = {}
        self.groups: dict[int, tuple[bytes, bytes]] = {}
        self.state: dict[str, Any] = {}
        self.answers: dict[str, Any] = {}

    def next(self) -> Commit:
        """Return the next commit; it depends on the seed and on the commits before."""
        i = self.position + 1
        generator = np.random.default_rng([self.seed, i])
        slots = generator.choice(NUM_SLOTS, 6, replace=False).tolist()
        removed = [slot for slot in slots[:2] if slot in self.items]
        written = {slot: row_of(ITEM, slot, generator.random()) for slot in slots[1:]}
        new_groups = {4 * i + k: generator.bytes(int(generator.integers(1, 20_000))) for k in range(2)}
        old = generator.permutation(sorted(self.groups)).tolist()
        rows = {seq: row_of(GROUP, seq, seq % 7, i) for seq in [*new_groups, *old[:3]]}
        needs_prompt = [slot for slot in written if slot not in self.items or slot in removed]
        return Commit(
            items=written,
            prompts={slot: Prompt("kill", f"{slot}.{i}") for slot in needs_prompt},
            vectors={slot: generator.random(8, np.float32) for slot in slots[3:]},
            removed_slots=removed,
            groups=rows,
            payloads=new_groups,
            removed_groups=old[3:6] if len(old) > 30 else [],
            request=f"{i}.add",
            answer={"position": i},
            state={"generator": generator.bit_generator.state, f"name {i % 5}": i},
        )

    def follow(self, commit: Commit) -> None:
        """Apply a commit, as the journal must."""
        self.position += 1
        for slot in commit.removed_slots:
            self.items.pop(slot, None)
            self.vectors.pop(slot, None)
        for slot, row in commit.items.items():
            prompt = commit.prompts[slot] if slot in commit.prompts else self.items[slot][1]
            self.items[slot] = (bytes(row), prompt)
        self.vectors.update((slot, vector.tobytes()) for slot, vector in commit.vectors.items())
        for seq in commit.removed_groups:
            self.groups.pop(seq, None)
        for seq, row in commit.groups.items():
            payload = commit.payloads[seq] if seq in commit.payloads else self.groups[seq][1]
            self.groups[seq] = (bytes(row), payload)
        self.state.update(commit.state)
        self.answers[str(commit.request)] = commit.answer

    def differences(self, journal: Journal) -> list[str]:
        """Return a message for each difference between the journal and this twin."""
        stored: Stored = journal.load()
        items = dict(
            zip(stored.slots.tolist(), zip(map(bytes, stored.items), stored.prompts, strict=True), strict=True)
        )
        seqs = stored.seqs.tolist()
        payloads = [journal.read_group(seq) for seq in seqs]
        groups = dict(zip(seqs, zip(map(bytes, stored.groups), payloads, strict=True), strict=True))
        pairs = {
            "position": (stored.position, self.position),
            "items": (items, self.items),
            "vectors": ({slot: vector.tobytes() for slot, vector in journal.vectors()}, self.vectors),
            "groups": (groups, self.groups),
            "state": (stored.state, self.state),
            "answers": ({name: journal.answer(name) for name in self.answers}, self.answers),
        }
        return [
            f"{name} differ at position {self.position}" for name, (theirs, ours) in pairs.items() if theirs != ours
        ]


def write_until_killed(path: Path, twin: Twin, pipe: int) -> None:
    """Commit and acknowledge without end; tidy up and copy now and then."""
    with Journal(path, ITEM, GROUP) as journal:
        os.write(pipe, journal.position.to_bytes(_ACKNOWLEDGED, "little"))
        while True:
            commit = twin.next()
            twin.follow(commit)
            position = journal.commit(commit)
            os.write(pipe, position.to_bytes(_ACKNOWLEDGED, "little"))
            if position % 5 == 0:
                journal.tidy()
            if position % 7 == 0:
                journal.snapshot(path.with_name("copy"))


def live_and_die(path: Path, twin: Twin, life_s: float, from_the_start: bool) -> int:
    """Let a process write for a while, kill it, and return the last acknowledged position, 0 if there is none.

    Args:
        path: of the journal.
        twin: state from which the writer continues.
        life_s: seconds until the kill.
        from_the_start: whether they count from the start of the process, or from the moment the journal is open.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            write_until_killed(path, twin, writing)
        except Exception:  # any exception: printed here, because none leaves this process
            traceback.print_exc()
        finally:
            os._exit(1)  # reached only after a failure; the parent's exit handlers must not run twice
    os.close(writing)
    told = b"" if from_the_start else os.read(reading, _ACKNOWLEDGED)
    time.sleep(life_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as stream:
        told += stream.read()
    if os.WIFEXITED(status):
        raise RuntimeError(f"the writer failed after {len(told) // _ACKNOWLEDGED} commits")
    whole = len(told) - len(told) % _ACKNOWLEDGED
    return int.from_bytes(told[whole - _ACKNOWLEDGED : whole], "little") if whole else 0


def faults_after(path: Path, twin: Twin, acknowledged: int) -> list[str]:
    """Open the journal, bring the twin to its position, and return a message for everything lost, partial or wrong."""
    with Journal(path, ITEM, GROUP) as journal:
        if not acknowledged <= journal.position <= max(acknowledged, twin.position) + 1:
            return [f"position {journal.position} after {acknowledged} was acknowledged, {twin.position} before"]
        while twin.position < journal.position:
            twin.follow(twin.next())
        faults = twin.differences(journal)
    copy = path.with_name("copy")
    if copy.exists():
        os.replace(copy, path.with_name("looked at"))
        with Journal(path.with_name("looked at"), ITEM, GROUP) as journal:
            past = Twin(twin.seed)
            while past.position < journal.position:
                past.follow(past.next())
            faults += [f"copy: {fault}" for fault in past.differences(journal)]
    return faults


def kill_loop(directory: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Kill a writer again and again; a journal is used for several kills before a new one begins.

    Returns:
        The number of kills, of commits acknowledged, of writers that committed anything, and the faults of the
        first kill that had any.
    """
    generator = np.random.default_rng(seed)
    result: dict[str, Any] = {"num_kills": 0, "num_commits": 0, "num_lives": 0, "faults": []}
    for kill in range(num_kills):
        if kill % 10 == 0:
            place = directory / str(kill)
            place.mkdir()
            twin = Twin(seed + kill)
        before = twin.position
        from_the_start = bool(generator.random() < SHARE_OF_OPENINGS)
        acknowledged = live_and_die(place / "journal", twin, LONGEST_LIFE_S * generator.random(), from_the_start)
        faults = faults_after(place / "journal", twin, max(acknowledged, before))
        result["faults"] += [f"kill {kill}: {fault}" for fault in faults]
        result["num_kills"] += 1
        result["num_commits"] += twin.position - before
        result["num_lives"] += twin.position > before
        if faults:  # the twin cannot follow a journal that lost something
            break
    return result


def main() -> int:
    """Run the loop, print its result as JSON; return 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=None, help="directory to test (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kill_loop_") as directory:
        result = kill_loop(Path(directory), arguments.kills, arguments.seed)
    print(json.dumps(result))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
