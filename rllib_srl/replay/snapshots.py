"""Copies of a journal for checkpoints, and the way back: restore takes nothing away before the new file is in place.

    live      root ──1──2──3──4──5            S taken at 3, the run went on to 5 and died
    restore   root ──1──2──3─┐                the file of S, in the live file's place
                             └─b2── 4 ...     its own branch; groups of the old 4 and 5 are its orphans

A journal lists its branches: id and the position where it began. Positions alone cannot tell whether a file came
after a snapshot: a Tune clone restored from S goes on to its own 4 and 5. So groups are taken over only from a live
file that *descends* from the snapshot, which the lists tell. Any other file in the live place (another lineage, another
branch, or one too damaged to read) gives no orphans and is set aside as `<live>.replaced`; the one before it goes.

Steps of `restore`; a process may die after any of them, and a second call repeats the rest:
    1  <live>.new = the snapshot + a new branch + orphans, flushed      2  the old file's WAL goes into it
    3  <live>.replaced links to the old file, where it is set aside     4  <live>.new is renamed <live>
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

from rllib_srl.replay.codec import prompt_of, read_header
from rllib_srl.replay.journal_file import (
    JournalLock,
    connect,
    explained,
    flush,
    read_meta,
    stored_dtypes,
    transaction,
)
from rllib_srl.replay.journal_log import read_log
from rllib_srl.replay.journal_schema import (
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
Branches = list[tuple[str, int]]  # id and the position where it began, from the root to the last


@dataclass(frozen=True)
class Restored:
    """What `restore` did. Invariant: without `replaced`, the old file's groups were all taken over or damaged."""

    position: int
    num_orphans: int
    num_damaged: int = 0  # groups of the old file whose bytes are not what was written
    replaced: Path | None = None  # where the old file is, if it was set aside
    reason: str = ""  # why it was set aside


def branches_of(meta: dict[str, str]) -> Branches:
    """Return the branches that a journal's meta lists."""
    return [(branch, start) for branch, start in json.loads(meta["branches"])]


def descends(live: Branches, live_position: int, snapshot: Branches, position: int) -> bool:
    """Say whether a live journal went through the state of a snapshot.

    It did if it has the snapshot's last branch and did not leave it before the snapshot's position.
    """
    at = len(snapshot) - 1
    if live[: at + 1] != snapshot:
        return False
    left_at = live[at + 1][1] if len(live) > at + 1 else live_position
    return position <= left_at


def write_snapshot(db: Connection, path: Path) -> None:
    """Copy an open database to `path`, a few pages at a time, flushed and then renamed into place."""
    import sqlite3

    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    scratch.unlink(missing_ok=True)
    try:
        copy = sqlite3.connect(scratch, isolation_level=None)
        try:
            # It is flushed once, at the end; a copy that does not get there is deleted.
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
        raise JournalError(f"snapshot {path} cannot be written: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def restore(snapshot: str | Path, live: str | Path) -> Restored:
    """Put a snapshot in a live journal's place and take over the groups that were committed after it.

    Raises:
        JournalError: the snapshot cannot be read, or the live journal is in use; then nothing has changed.
    """
    snapshot, live = Path(snapshot), Path(live)
    lock = JournalLock(live)
    scratch = live.with_name(live.name + ".new")
    try:
        _copy(snapshot, scratch)
        with explained(snapshot, "restoring it"):
            restored = _prepare(snapshot, scratch, live)
        if restored.replaced:
            _link(live, restored.replaced)
        Path(f"{live}-wal").unlink(missing_ok=True)  # of no file any more, and poison to the next
        os.replace(scratch, live)
        flush(live.parent)
        return restored
    except OSError as error:
        raise JournalError(f"journal {live}: restoring {snapshot} failed: {error}") from error
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
    """Start a branch in the scratch file and fill in orphans; then it and the old file are one flushed file each."""
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
    """Copy the live journal's groups after a position, all or none; return how many, and how many are damaged.

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
    """Bring the old file up to date, whatever becomes of it, and return the dtype of its groups.

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
    # A run that was restored twice from one snapshot may have played the same group twice.
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
    """Yield seq, row, its checksum and payload; a fault raised here is the old file's, none of the new one's is."""
    query = (
        "SELECT seq, row, checksum, payload FROM groups JOIN payloads USING (seq) WHERE position > ?"
        " ORDER BY position, seq"
    )
    with explained(live, "reading groups of the journal that is replaced"):
        yield from old.execute(query, (position,))


def _as_orphan(row: bytes, group: np.dtype, seq: int) -> bytes:
    """Return a group's row as that of an orphan, which belongs to no slot yet."""
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
    """Give the old file a second name, and its WAL if it was too damaged to be emptied."""
    for end in ("", "-wal"):
        target = Path(f"{replaced}{end}")
        target.unlink(missing_ok=True)
        if Path(f"{live}{end}").exists():
            os.link(f"{live}{end}", target)
    flush(live.parent)
