"""Write snapshots of a journal for checkpoints and restore them; the old file stays until the new one replaces it.

    live      root ──1──2──3──4──5            snapshot S taken at 3; the run crashed at 5
    restore   root ──1──2──3─┐                S replaces the live file
                             └─b2── 4 ...     a new branch; the groups of the old 4 and 5 become its orphans

A journal lists its branches: the id of each and the position where it began. Positions alone do not show whether a file
continues a snapshot: a Tune clone restored from S has its own 4 and 5. So `restore` imports groups only from a live
file that *descends* from the snapshot according to these lists. Any other live file (another lineage, another branch,
or too damaged to read) gives no orphans and is kept as `<live>.replaced`, which overwrites an earlier one.

Steps of `restore`; after a crash at any step, a second call completes it:
    1  <live>.new = the snapshot + a new branch + orphans, flushed      2  the old WAL is moved into the old file
    3  <live>.replaced is linked to the old file, if that is kept       4  <live>.new is renamed <live>
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rllib_srl.replay.journal.codec import prompt_of, read_header
from rllib_srl.replay.journal.file import (
    JournalLock,
    connect,
    explained,
    fault_of,
    flush,
    read_meta,
    stored_dtypes,
    transaction,
)
from rllib_srl.replay.journal.log import read_log
from rllib_srl.replay.journal.schema import (
    FIRST_ORPHAN,
    JournalError,
    JournalInUse,
    checked,
    checksum,
    dtype_difference,
    prompt_text,
)

if TYPE_CHECKING:
    from sqlite3 import Connection

PAGES_A_STEP = 1024
Branches = list[tuple[str, int]]  # id and start position of each branch, from the root to the last


@dataclass(frozen=True)
class Restored:
    """The result of `restore`.

    Invariant: if `replaced` is None, each group of the old file after the snapshot was imported, known already or
    damaged.
    """

    position: int
    num_orphans: int
    num_damaged: int = 0  # groups of the old file with a wrong checksum
    replaced: Path | None = None  # path of the old file, if it was kept
    reason: str = ""  # why it was kept


def branches_of(meta: dict[str, str]) -> Branches:
    """Return the branches listed in a journal's meta."""
    return [(branch, start) for branch, start in json.loads(meta["branches"])]


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
    """Copy an open database to `path`, `PAGES_A_STEP` pages at a time; flush the copy and rename it into place."""
    import sqlite3

    scratch = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)
        with explained(path, "a copy"):
            copy = sqlite3.connect(scratch, isolation_level=None)
            try:
                # Durability is off because the copy is flushed once at the end, and deleted if that is not reached.
                for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -4096"):
                    copy.execute(f"PRAGMA {pragma}").fetchall()
                db.backup(copy, pages=PAGES_A_STEP)
                copy.execute("PRAGMA journal_mode = DELETE").fetchall()  # one file, not marked as having a WAL
            finally:
                copy.close()
        flush(scratch)
        os.replace(scratch, path)
        flush(path.parent)
    except OSError as error:
        raise fault_of(path, error, f"snapshot {path} cannot be written") from error
    finally:
        scratch.unlink(missing_ok=True)


def restore(snapshot: str | Path, live: str | Path) -> Restored:
    """Replace a live journal by a snapshot and import the groups committed after it as orphans.

    Raises:
        JournalError: the snapshot cannot be read, or the live journal is in use; then nothing has changed.
    """
    snapshot, live = Path(snapshot), Path(live)
    lock = JournalLock(live)
    scratch = live.with_name(live.name + ".new")
    try:
        _copy(snapshot, scratch)
        with explained(snapshot, "restoring it", written=live):
            restored = _prepare(snapshot, scratch, live)
        if restored.replaced:
            _link(live, restored.replaced)
        Path(f"{live}-wal").unlink(missing_ok=True)  # it belongs to the old file; SQLite would apply it to the new one
        os.replace(scratch, live)
        flush(live.parent)
        return restored
    except OSError as error:
        raise fault_of(live, error, f"journal {live}: restoring {snapshot} failed") from error
    finally:
        for leftover in (scratch, Path(f"{scratch}-wal")):
            leftover.unlink(missing_ok=True)
        lock.release()


def _copy(snapshot: Path, scratch: Path) -> None:
    wal = Path(f"{snapshot}-wal")
    if wal.exists() and wal.stat().st_size:
        raise JournalError(f"{snapshot} is a live journal, {wal.name} beside it; expected a snapshot")
    if not snapshot.is_file():
        raise JournalError(f"snapshot {snapshot} does not exist; expected a file that Journal.snapshot wrote")
    Path(f"{scratch}-wal").unlink(missing_ok=True)
    shutil.copyfile(snapshot, scratch)


def _prepare(snapshot: Path, scratch: Path, live: Path) -> Restored:
    """Import orphans into the scratch file, start a branch in it and flush it.

    The old file's WAL is merged into it on the way, unless the file is too damaged.
    """
    new = connect(scratch, is_durable=False)
    try:
        meta = read_meta(new, snapshot)
        branches = branches_of(meta)
        position = _position(new)
        num_orphans = num_damaged = 0
        reason = ""
        if live.exists() and live.stat().st_size:
            try:
                num_orphans, num_damaged = _take_over(new, meta, live, position)
            except JournalInUse:
                raise
            except JournalError as error:
                reason = str(error)
        with transaction(new):
            branches.append((uuid.uuid4().hex, position))
            new.execute("UPDATE meta SET value = ? WHERE name = 'branches'", (json.dumps(branches),))
            text = str(position + 1)
            new.execute("UPDATE state SET value = ?, checksum = ? WHERE name = 'position'", (text, checksum(text)))
        _to_one_file(new)
    finally:
        new.close()
    flush(scratch)
    replaced = live.with_name(live.name + ".replaced") if reason else None
    return Restored(position + 1, num_orphans, num_damaged, replaced, reason)


def _take_over(new: Connection, meta: dict[str, str], live: Path, position: int) -> tuple[int, int]:
    """Import the live journal's groups after a position, all or none; return the numbers of orphans and damaged groups.

    Raises:
        JournalError: the live journal does not descend from the snapshot, or cannot be read.
    """
    with explained(live, "reading the journal that is replaced"):
        old = connect(live, is_durable=True)
    try:
        with explained(live, "reading the journal that is replaced"):
            group = _check_descends(old, live, meta, position)
        with closing(_groups_after(old, live, position)) as rows, transaction(new):
            return _insert_orphans(new, rows, group, position)
    finally:
        old.close()


def _check_descends(old: Connection, live: Path, meta: dict[str, str], position: int) -> np.dtype:
    """Fold the old file's log and WAL into it, whether or not it descends, and return the dtype of its groups.

    Raises:
        JournalError: it does not descend from the snapshot, or its groups are of another dtype.
    """
    old_meta = read_meta(old, live)
    effects, num_unfolded = read_log(old, f"journal {live}")
    if num_unfolded:
        with transaction(old):
            effects.apply(old, keep_requests=effects.position)
    was_here = descends(branches_of(old_meta), _position(old), branches_of(meta), position)
    _to_one_file(old)
    if not was_here:
        raise JournalError(f"journal {live} does not descend from the snapshot")
    _, group = stored_dtypes(meta, live, None, None)
    if difference := dtype_difference(stored_dtypes(old_meta, live, None, None)[1], group):
        raise JournalError(f"journal {live} has other group rows than the snapshot: {difference}")
    return group


def _insert_orphans(
    new: Connection, rows: Iterable[tuple[int, bytes, int, bytes]], group: np.dtype, position: int
) -> tuple[int, int]:
    # A run that was restored twice from one snapshot may have generated the same group twice.
    known = {tail for (tail,) in new.execute("SELECT substr(payload, -8) FROM payloads")}
    last = new.execute("SELECT max(seq) FROM groups WHERE seq >= ?", (FIRST_ORPHAN,)).fetchone()[0] or FIRST_ORPHAN - 1
    seq, num_damaged = last, 0
    for old_seq, row, stored, payload in rows:
        try:
            header = read_header(payload, str(old_seq))
            checked(row, stored, f"group {old_seq}")
        except (ValueError, JournalError):
            num_damaged += 1
            continue
        if payload[-8:] in known:
            continue
        known.add(payload[-8:])
        seq += 1
        data, text = _as_orphan(row, group, seq), prompt_text(prompt_of(header["prompt"]))
        new.execute("INSERT INTO groups VALUES (?, -1, ?, ?, ?)", (seq, data, position + 1, checksum(data)))
        new.execute("INSERT INTO payloads VALUES (?, ?)", (seq, payload))
        new.execute("INSERT INTO orphans VALUES (?, ?, ?)", (seq, text, checksum(text)))
    return seq - last, num_damaged


def _groups_after(old: Connection, live: Path, position: int) -> Generator[tuple[int, bytes, int, bytes], None, None]:
    """Yield seq, row, its checksum and payload; only errors of the old file are attributed to it."""
    query = (
        "SELECT seq, row, checksum, payload FROM groups JOIN payloads USING (seq) WHERE position > ?"
        " ORDER BY position, seq"
    )
    with explained(live, "reading groups of the journal that is replaced"):
        yield from old.execute(query, (position,))


def _as_orphan(row: bytes, group: np.dtype, seq: int) -> bytes:
    """Return a group's row changed to that of an orphan: a new seq, no slot, is_orphan True."""
    rows = np.frombuffer(row, group).copy()
    for name, value in (("seq", seq), ("slot", -1), ("is_orphan", True)):
        if name in (group.names or ()):
            rows[name] = value
    return rows.tobytes()


def _position(db: Connection) -> int:
    return int(db.execute("SELECT value FROM state WHERE name = 'position'").fetchone()[0])


def _to_one_file(db: Connection) -> None:
    db.execute("PRAGMA journal_mode = DELETE").fetchall()


def _link(live: Path, replaced: Path) -> None:
    """Link the old file to a second name, and its WAL too if damage prevented emptying it."""
    for end in ("", "-wal"):
        target = Path(f"{replaced}{end}")
        target.unlink(missing_ok=True)
        if Path(f"{live}{end}").exists():
            os.link(f"{live}{end}", target)
    flush(live.parent)
