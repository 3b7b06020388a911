"""Processes that tests start: one holds a journal, one runs out of disk, one dies in the middle of a restore.

python -m tests.replay.journal_writer hold PATH             opens it, says so, waits to be killed
python -m tests.replay.journal_writer fill PATH BYTES       commits while no file may grow beyond BYTES
python -m tests.replay.journal_writer restore SNAPSHOT LIVE STEP
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

from rllib_srl.replay.journal import snapshots
from rllib_srl.replay.journal.journal import Journal, JournalError
from tests.replay.stored import GROUP, ITEM, a_visit

STEPS = ("os.replace", "os.fsync", "shutil.copyfile", "to_one_file")


def hold(path: Path) -> None:
    """Open a journal and keep it."""
    with Journal(path, ITEM, GROUP):
        print("open", flush=True)
        time.sleep(600)


def fill(path: Path, num_bytes: int) -> None:
    """Commit until the disk is full, make room, and commit again; print what was told and what was stored."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    with Journal(path, ITEM, GROUP) as journal:
        for index in range(10_000):
            try:
                journal.commit(a_visit(index, payloads={index: bytes(5000)}))
            except JournalError as error:
                print(journal.position, error, flush=True)
                break
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        print(journal.commit(a_visit(index)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def restore(snapshot: Path, live: Path, step: int) -> None:
    """Restore, and die just before the given step on the disk, the first being 0."""
    count = 0

    def dying(function):
        def wrapped(*arguments, **named):
            nonlocal count
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return function(*arguments, **named)

        return wrapped

    for name in STEPS:
        owner, _, attribute = name.rpartition(".")
        place = getattr(snapshots, owner) if owner else snapshots
        setattr(place, attribute, dying(getattr(place, attribute)))
    snapshots.restore(snapshot, live)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "hold":
        hold(Path(arguments[0]))
    elif command == "fill":
        fill(Path(arguments[0]), int(arguments[1]))
    else:
        restore(Path(arguments[0]), Path(arguments[1]), int(arguments[2]))
