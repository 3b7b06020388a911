"""Write a snapshot of a journal for a checkpoint, and replace a journal by one.

    live      1──2──3──4──5        snapshot S taken at 3; the run crashed at 5
    restore   1──2──3──4'          S replaces the live file; what 4 and 5 had stored is dropped

A crash during `restore` leaves the old journal or the new one, each whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rllib_srl.replay.journal.file import (
    ENDINGS,
    JournalError,
    JournalLock,
    back_up,
    connect,
    explained,
    fault_of,
    flush,
    remove,
    to_one_file,
)
from rllib_srl.replay.journal.schema import read_meta

if TYPE_CHECKING:
    from sqlite3 import Connection


def write_snapshot(db: Connection, path: Path) -> None:
    """Copy an open journal to `path`: flush the copy, then rename it into place."""
    scratch = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)
        with explained(path, "a copy"):
            back_up(db, scratch)
        flush(scratch)
        os.replace(scratch, path)
        flush(path.parent)
    except OSError as error:
        raise fault_of(path, error, f"snapshot {path} cannot be written") from error
    finally:
        scratch.unlink(missing_ok=True)


def restore(snapshot: str | Path, live: str | Path, close: Callable[[], None] | None = None) -> None:
    """Replace a live journal by a snapshot.

    Args:
        snapshot: a file that `Journal.snapshot` wrote; it is not changed.
        live: path of the journal; it need not exist.
        close: closes the live journal if it is open here; called when nothing but the replacement is left to do.

    Raises:
        JournalError: the snapshot cannot be read, there is no room, or the live journal is in use elsewhere; then
            nothing has changed.
    """
    snapshot, live = Path(snapshot), Path(live)
    scratch = live.with_name(live.name + ".new")
    if (wal := Path(f"{snapshot}-wal")).exists() and wal.stat().st_size:
        raise JournalError(f"{snapshot} is a live journal, {wal.name} beside it; expected a snapshot")
    if not snapshot.is_file():
        raise JournalError(f"snapshot {snapshot} does not exist; expected a file that Journal.snapshot wrote")
    try:
        live.parent.mkdir(parents=True, exist_ok=True)
        remove(scratch)
        shutil.copyfile(snapshot, scratch)
        with explained(snapshot, "restoring it", written=live), closing(connect(scratch, is_durable=False)) as new:
            read_meta(new, snapshot)
            to_one_file(new)
        flush(scratch)
        if close is not None:
            close()
        with closing(JournalLock(live)):
            for ending in ENDINGS[1:]:  # SQLite would apply the old WAL to the new file
                Path(f"{live}{ending}").unlink(missing_ok=True)
            os.replace(scratch, live)
            flush(live.parent)
    except OSError as error:
        raise fault_of(live, error, f"journal {live}: restoring {snapshot} failed") from error
    finally:
        remove(scratch)
