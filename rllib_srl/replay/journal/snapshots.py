"""Write snapshots of a journal for checkpoints and restore them; the old file stays until the new one replaces it.

    live      root ──1──2──3──4──5            snapshot S taken at 3; the run crashed at 5
    restore   root ──1──2──3─┐                S replaces the live file
                             └─b2── 4 ...     a new branch; the groups of the old 4 and 5 become its orphans

A journal lists its branches: the id of each and the position where it began. Positions alone do not show whether a file
continues a snapshot: a Tune clone restored from S has its own 4 and 5. So `restore` imports groups only from a file
that *descends* from the snapshot according to these lists. Any other file (another lineage, another branch, or too
damaged to read) gives no orphans and is kept as `<live>.replaced`, which overwrites an earlier one.

Steps of `restore`; after a crash at any step, a second call completes it:
    1  <live>.new = the snapshot + a new branch + orphans, flushed      2  the old WAL is moved into the old file
    3  <live>.replaced is linked to the old file, if that is kept       4  <live>.new is renamed <live>
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rllib_srl.replay.journal.codec import prompt_of, read_header
from rllib_srl.replay.journal.file import (
    ENDINGS,
    JournalError,
    JournalFull,
    JournalInUse,
    JournalLock,
    back_up,
    connect,
    empty_wal,
    explained,
    fault_of,
    flush,
    remove,
    to_one_file,
    transaction,
)
from rllib_srl.replay.journal.schema import FIRST_ORPHAN, Branches, Meta, prompt_text, read_meta, set_meta

if TYPE_CHECKING:
    from sqlite3 import Connection


@dataclass(frozen=True)
class Restored:
    """The result of `restore`.

    Invariant: if `replaced` is None, each group of the old file after the snapshot was imported, known already or
    damaged.
    """

    position: int
    num_orphans: int
    num_damaged: int = 0  # groups of the old file with damaged payloads
    replaced: Path | None = None  # path of the old file, if it was kept
    reason: str = ""  # why it was kept


def descends(live: Branches, live_position: int, snapshot: Branches, position: int) -> bool:
    """Return whether a live journal continues the state of a snapshot.

    True if its branches begin with the snapshot's and it did not leave the last of these before `position`.
    """
    at = len(snapshot) - 1
    if live[: at + 1] != snapshot:
        return False
    left_at = live[at + 1][1] if len(live) > at + 1 else live_position
    return position <= left_at


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


def restore(
    snapshot: str | Path, live: str | Path, source: Path | None = None, close: Callable[[], None] | None = None
) -> Restored:
    """Replace a live journal by a snapshot and import the groups committed after it as orphans.

    Args:
        snapshot: a file that `Journal.snapshot` wrote; it is not changed.
        live: path of the journal; it need not exist.
        source: the journal to import from, if not the live one; it is removed, or kept as `<live>.replaced`.
        close: closes the live journal if it is open here; called when nothing but the replacement is left to do.

    Raises:
        JournalError: the snapshot cannot be read, there is no room, or the live journal is in use elsewhere; then
            nothing has changed.
    """
    snapshot, live = Path(snapshot), Path(live)
    source = source or live
    scratch = live.with_name(live.name + ".new")
    if (wal := Path(f"{snapshot}-wal")).exists() and wal.stat().st_size:
        raise JournalError(f"{snapshot} is a live journal, {wal.name} beside it; expected a snapshot")
    if not snapshot.is_file():
        raise JournalError(f"snapshot {snapshot} does not exist; expected a file that Journal.snapshot wrote")
    try:
        live.parent.mkdir(parents=True, exist_ok=True)
        remove(scratch)
        shutil.copyfile(snapshot, scratch)
        with explained(snapshot, "restoring it", written=live):
            restored = _prepare(snapshot, scratch, live, source)
        if close is not None:
            close()
        with closing(JournalLock(live)):
            _replace(scratch, live, source, restored.replaced)
        return restored
    except OSError as error:
        raise fault_of(live, error, f"journal {live}: restoring {snapshot} failed") from error
    finally:
        remove(scratch)


def _replace(scratch: Path, live: Path, source: Path, replaced: Path | None) -> None:
    """Rename the scratch file to the live one; keep the source as `replaced` or remove it."""
    if replaced:
        _link(source, replaced)
    elif Path(f"{source}-wal").exists():  # else its last commits were lost if this process died before the renaming
        with explained(source, "moving its WAL into it"), closing(connect(source, is_durable=True)) as old:
            empty_wal(old)
    for ending in ENDINGS[1:]:  # SQLite would apply the old WAL to the new file
        Path(f"{live}{ending}").unlink(missing_ok=True)
    os.replace(scratch, live)
    flush(live.parent)
    if source != live:
        remove(source)


def _prepare(snapshot: Path, scratch: Path, live: Path, source: Path) -> Restored:
    """Import orphans into the scratch file, start a branch in it and flush it."""
    num_orphans, num_damaged, reason = 0, 0, ""
    with closing(connect(scratch, is_durable=False)) as new:
        meta = read_meta(new, snapshot)
        if source.exists() and source.stat().st_size:
            try:
                with closing(_groups_after(meta, source)) as rows, transaction(new):
                    num_orphans, num_damaged = _insert_orphans(new, rows, meta)
            except (JournalInUse, JournalFull):  # not the old file's fault
                raise
            except JournalError as error:
                reason = str(error)
        with transaction(new):
            set_meta(new, "branches", json.dumps([*meta.branches, (uuid.uuid4().hex, meta.position)]))
            set_meta(new, "position", str(meta.position + 1))
        to_one_file(new)
    flush(scratch)
    replaced = live.with_name(live.name + ".replaced") if reason else None
    return Restored(meta.position + 1, num_orphans, num_damaged, replaced, reason)


def _groups_after(meta: Meta, source: Path) -> Generator[tuple[int, bytes, bytes], None, None]:
    """Yield seq, row and payload of each group that the source committed after the snapshot with this `meta`.

    Raises:
        JournalError: the source does not descend from the snapshot, or cannot be read.
    """
    query = "SELECT seq, row, payload FROM groups JOIN payloads USING (seq) WHERE position > ? ORDER BY position, seq"
    # As a generator, because only errors of the old file are attributed to it.
    with explained(source, "reading the journal that is replaced"), closing(connect(source, is_durable=True)) as old:
        found = read_meta(old, source, group=meta.group)
        if not descends(found.branches, found.position, meta.branches, meta.position):
            raise JournalError(f"journal {source} does not descend from the snapshot")
        yield from old.execute(query, (meta.position,))


def _insert_orphans(new: Connection, rows: Iterable[tuple[int, bytes, bytes]], meta: Meta) -> tuple[int, int]:
    """Insert groups as orphans; return the numbers of those inserted and of damaged ones, which are left out."""
    # A run that was restored twice from one snapshot may have generated the same group twice.
    known = {tail for (tail,) in new.execute("SELECT substr(payload, -8) FROM payloads")}
    last = new.execute("SELECT max(seq) FROM groups WHERE seq >= ?", (FIRST_ORPHAN,)).fetchone()[0] or FIRST_ORPHAN - 1
    seq, num_damaged = last, 0
    for old_seq, row, payload in rows:
        try:
            prompt = prompt_text(prompt_of(read_header(payload, str(old_seq))["prompt"]))
        except ValueError:
            num_damaged += 1
            continue
        if payload[-8:] in known:
            continue
        known.add(payload[-8:])
        seq += 1
        values = (seq, _as_orphan(row, meta.group, seq), meta.position + 1, prompt)
        new.execute("INSERT INTO groups VALUES (?, ?, ?, ?)", values)
        new.execute("INSERT INTO payloads VALUES (?, ?)", (seq, payload))
    return seq - last, num_damaged


def _as_orphan(row: bytes, group: np.dtype, seq: int) -> bytes:
    """Return a group's row changed to that of an orphan: a new seq, no slot, is_orphan True."""
    rows = np.frombuffer(row, group).copy()
    for name, value in (("seq", seq), ("slot", -1), ("is_orphan", True)):
        if name in (group.names or ()):
            rows[name] = value
    return rows.tobytes()


def _link(source: Path, replaced: Path) -> None:
    """Link the old file to a second name, and its WAL too if damage prevented emptying it."""
    remove(replaced)
    for ending in ("", "-wal"):
        if Path(f"{source}{ending}").exists():
            os.link(f"{source}{ending}", f"{replaced}{ending}")
    flush(replaced.parent)
