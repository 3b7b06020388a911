"""Processes that tests start: one holds a store, one dies in the middle of a restore.

python -m tests.replay.store_user hold DIR               opens it, says so, waits to be killed
python -m tests.replay.store_user restore SNAPSHOT DIR STEP
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from rllib_srl.replay.store import Store


def hold(directory: Path) -> None:
    """Open a store and keep it."""
    Store(directory)
    print("open", flush=True)
    time.sleep(600)


def restore(snapshot: Path, directory: Path, step: int) -> None:
    """Restore page by page, and die after so many pages, or before what follows them."""
    count = 0

    def may_die(*_: int) -> None:
        nonlocal count
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    class Dying(sqlite3.Connection):
        def backup(self, target: sqlite3.Connection, **_: Any) -> None:
            super().backup(target, pages=1, progress=may_die)

        def executemany(self, *arguments: Any) -> sqlite3.Cursor:
            may_die()
            return super().executemany(*arguments)

    sqlite3.connect = partial(sqlite3.connect, factory=Dying)
    Store(directory).restore(snapshot)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "hold":
        hold(Path(arguments[0]))
    else:
        restore(Path(arguments[0]), Path(arguments[1]), int(arguments[2]))
