"""Keep a memory in one SQLite file that always holds the state of the last commit.

    commit(Commit) ──> one transaction, durable on return; if it fails, nothing is stored
    read() ──> Contents: rows, prompts, state            answer(request) makes a repeated call harmless
    snapshot(path) ──> a copy for a checkpoint           restore(path) replaces the file by one

    items    slot -> row, prompt            groups  seq -> row, id           payloads  seq -> bytes of the group
    vectors  slot -> float32                targets seq, episode -> bytes    state     name -> JSON, or bytes
    answers  position -> name, answer: the latest `NUM_ANSWERS`

Commits survive a crash of the process, and a power loss unless the directory is temporary. A file belongs to one run;
another run's file is renamed memory.earlier.db, from which `restore` counts the groups stored after a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_srl.replay.database import (
    ENDINGS,
    Lock,
    StoreError,
    back_up,
    connect,
    explained,
    flush,
    reader,
    remove,
    to_one_file,
    transaction,
)
from rllib_srl.replay.items import GROUP, ITEM
from rllib_srl.replay.payloads import compact_json, prompt_of
from rllib_srl.types import Prompt

if TYPE_CHECKING:
    from sqlite3 import Connection

logger = logging.getLogger(__name__)
DATABASE, EARLIER, SNAPSHOT = "memory.db", "memory.earlier.db", "snapshot.db"
NUM_ANSWERS = 4096
VERSION = json.dumps([4, np.lib.format.dtype_to_descr(ITEM), np.lib.format.dtype_to_descr(GROUP)])
TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE items (slot INTEGER PRIMARY KEY, row BLOB NOT NULL, prompt TEXT NOT NULL);
CREATE TABLE vectors (slot INTEGER PRIMARY KEY, vector BLOB NOT NULL);
CREATE TABLE groups (seq INTEGER PRIMARY KEY, row BLOB NOT NULL, id TEXT NOT NULL);
CREATE TABLE payloads (seq INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE targets (seq INTEGER, episode INTEGER, payload BLOB NOT NULL, PRIMARY KEY (seq, episode)) WITHOUT ROWID;
CREATE TABLE answers (position INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, answer TEXT NOT NULL);
CREATE TABLE state (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
"""

@dataclass
class Commit:
    """The changes of one call, stored together. Removals come first; what is written replaces what is there."""

    items: list[tuple[int, bytes, str]] = field(default_factory=list)  # slot, row, prompt as JSON
    removed_slots: list[int] = field(default_factory=list)
    vectors: dict[int, np.ndarray] = field(default_factory=dict)  # slot -> float32
    groups: list[tuple[int, bytes, str]] = field(default_factory=list)  # seq, row, id
    removed_groups: list[int] = field(default_factory=list)  # with their payloads and targets
    payloads: dict[int, bytes] = field(default_factory=dict)  # seq -> bytes
    targets: dict[tuple[int, int], bytes] = field(default_factory=dict)  # seq, episode -> bytes
    removed_targets: list[tuple[int, int]] = field(default_factory=list)
    state: Mapping[str, Any] = field(default_factory=dict)  # name -> bytes, or JSON types
    request: str = ""  # name of the call, "" for none
    answer: Any = None  # JSON types


@dataclass(frozen=True)
class Contents:
    """What a database holds: items in slot order, groups in seq order; vectors, payloads and targets are left there."""

    position: int  # number of commits
    slots: np.ndarray  # int64
    items: np.ndarray  # rows
    prompts: list[Prompt]
    seqs: np.ndarray  # int64
    groups: np.ndarray  # rows
    group_ids: list[str]
    targets: list[tuple[int, int, int]]  # seq, episode, bytes
    state: dict[str, Any]


class Store:
    """An open database, held by one process. Invariant: `position` grows by one with each successful commit."""

    def __init__(self, directory: Path | None, run: str = "") -> None:
        """Open the database of `run` in a directory, or create it; set another run's aside.

        Args:
            directory: None uses a temporary one that `close` deletes.
            run: "" opens that of any run.

        Raises:
            StoreError: it is in use by another process, damaged, no memory, or of another version.
        """
        self._scratch = tempfile.TemporaryDirectory(prefix="rllib_srl_replay_") if directory is None else None
        self.path = Path(self._scratch.name if self._scratch else directory or "") / DATABASE
        self._lock = Lock(self.path)
        self._db: Connection | None = None
        self._run = run
        self._written: dict[str, str | bytes] = {}  # state as last committed, encoded
        try:
            self._open()
            if run and self.state("run", run) != run:
                is_used = self.position > 0
                self._shut()
                remove(self.path.with_name(EARLIER))
                if is_used:
                    self.path.rename(self.path.with_name(EARLIER))
                remove(self.path)
                self._open()
        except BaseException:
            self.close()
            raise
        self._start = self.position

    def _open(self) -> None:
        with explained(self.path, "opening it"):
            self._db = connect(self.path, is_durable=self._scratch is None)
            if not self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                meta = {"version": VERSION, "lineage": uuid.uuid4().hex, "position": "0"}
                with transaction(self.db):
                    for statement in TABLES.split(";")[:-1]:
                        self.db.execute(statement)
                    self.db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            self.lineage, self.position = read_meta(self.db, self.path)
        self._written = {}

    @property
    def db(self) -> Connection:
        """Return the open database.

        Raises:
            StoreError: it is closed.
        """
        if self._db is None:
            raise StoreError(f"memory {self.path} is closed")
        return self._db

    # --- writing ---------------------------------------------------------------------------------

    def commit(self, changes: Commit) -> None:
        """Store changes in one transaction; return when they are durable.

        Raises:
            StoreError: the disk is full or damaged; nothing was stored, and the store remains usable.
        """
        encoded = {name: _encoded(value) for name, value in {**changes.state, "run": self._run}.items()}
        state = {name: value for name, value in encoded.items() if self._written.get(name) != value}
        position = self.position + 1
        with explained(self.path, f"commit {position}"), transaction(self.db):
            self._write(changes, position)
            self.db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", state.items())
            self.db.execute("UPDATE meta SET value = ? WHERE name = 'position'", (str(position),))
        self.position = position
        self._written |= state

    def _write(self, changes: Commit, position: int) -> None:
        many = self.db.executemany
        slots, seqs = ([(number,) for number in gone] for gone in (changes.removed_slots, changes.removed_groups))
        for table in ("items", "vectors"):
            many(f"DELETE FROM {table} WHERE slot = ?", slots)
        for table in ("groups", "payloads", "targets"):
            many(f"DELETE FROM {table} WHERE seq = ?", seqs)
        many("DELETE FROM targets WHERE seq = ? AND episode = ?", changes.removed_targets)
        many("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", changes.items)
        vectors = [(slot, np.ascontiguousarray(vector, "<f4").tobytes()) for slot, vector in changes.vectors.items()]
        many("INSERT OR REPLACE INTO vectors VALUES (?, ?)", vectors)
        many("INSERT OR REPLACE INTO groups VALUES (?, ?, ?)", changes.groups)
        many("INSERT OR REPLACE INTO payloads VALUES (?, ?)", changes.payloads.items())
        targets = [(*place, payload) for place, payload in changes.targets.items()]
        many("INSERT OR REPLACE INTO targets VALUES (?, ?, ?)", targets)
        if changes.request:
            answer = (position, changes.request, compact_json(changes.answer))
            self.db.execute("INSERT INTO answers VALUES (?, ?, ?)", answer)
            self.db.execute("DELETE FROM answers WHERE position <= ?", (position - NUM_ANSWERS,))

    def erase(self, words: Collection[str]) -> None:
        """Forget the answers that contain one of the words, and leave no byte of anything removed in the files.

        Raises:
            StoreError: the disk is full: the file is rewritten.
        """
        with explained(self.path, "erasing what was removed"):
            with transaction(self.db):
                self.db.executemany("DELETE FROM answers WHERE instr(answer, ?)", [(word,) for word in words])
            self.db.execute("VACUUM")
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        remove(self.path.with_name(EARLIER))

    # --- reading ---------------------------------------------------------------------------------

    def answer(self, request: str) -> Any | None:
        """Return the answer that was committed with a request, or None if there is none or it is no longer kept."""
        with explained(self.path, f"reading answer {request}"):
            found = self.db.execute("SELECT answer FROM answers WHERE name = ?", (request,)).fetchone()
        return None if found is None else json.loads(found[0])

    def answers(self) -> list[tuple[str, Any]]:
        """Return the names and answers of the latest requests, oldest first."""
        with explained(self.path, "reading answers"):
            found = self.db.execute("SELECT name, answer FROM answers ORDER BY position").fetchall()
        return [(name, json.loads(answer)) for name, answer in found]

    def payload(self, seq: int) -> bytes:
        """Return the bytes of a group.

        Raises:
            StoreError: it is not stored.
        """
        return self._blob(f"group {seq}", "SELECT CAST(payload AS BLOB) FROM payloads WHERE seq = ?", int(seq))

    def target(self, seq: int, episode: int) -> bytes:
        """Return the bytes of a target.

        Raises:
            StoreError: it is not stored.
        """
        query = "SELECT payload FROM targets WHERE seq = ? AND episode = ?"
        return self._blob(f"the target of group {seq}, episode {episode}", query, int(seq), int(episode))

    def _blob(self, what: str, query: str, *numbers: int) -> bytes:
        with explained(self.path, f"reading {what}"):
            found = self.db.execute(query, numbers).fetchone()
        if found is None:
            raise StoreError(f"memory {self.path} does not hold {what}")
        blob: bytes = found[0]
        return blob

    def has_payloads(self, seqs: Collection[int]) -> bool:
        """Return whether the payloads are exactly those of some groups."""
        with explained(self.path, "looking for payloads"):
            return {seq for (seq,) in self.db.execute("SELECT seq FROM payloads")} == set(seqs)

    def vectors(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield slot and vector, float32, in slot order; do not commit during the iteration."""
        with explained(self.path, "reading vectors"):
            for slot, data in self.db.execute("SELECT slot, vector FROM vectors ORDER BY slot"):
                yield slot, np.frombuffer(data, "<f4")

    def state(self, name: str, default: Any = None) -> Any:
        """Return one value of the state."""
        with explained(self.path, f"reading {name}"):
            found = self.db.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        return default if found is None else _decoded(found[0])

    def read(self) -> Contents:
        """Return the state of the last commit.

        Raises:
            StoreError: the file is damaged.
        """
        with explained(self.path, "loading it"):
            items = self.db.execute("SELECT slot, row, prompt FROM items ORDER BY slot").fetchall()
            groups = self.db.execute("SELECT seq, row, id FROM groups ORDER BY seq").fetchall()
            targets = self.db.execute("SELECT seq, episode, length(payload) FROM targets").fetchall()
            state = self.db.execute("SELECT name, value FROM state").fetchall()
        try:
            found = Contents(
                position=self.position,
                slots=np.array([slot for slot, _, _ in items], np.int64),
                items=np.frombuffer(b"".join(row for _, row, _ in items), ITEM),
                prompts=[prompt_of(fields) for fields in json.loads(f"[{','.join(text for _, _, text in items)}]")],
                seqs=np.array([seq for seq, _, _ in groups], np.int64),
                groups=np.frombuffer(b"".join(row for _, row, _ in groups), GROUP),
                group_ids=[name for _, _, name in groups],
                targets=targets,
                state={name: _decoded(value) for name, value in state},
            )
            if len(found.items) != len(items) or len(found.groups) != len(groups):
                raise ValueError("rows are cut off")
        except (ValueError, TypeError) as error:
            reason = f"loading it failed: {error}: the file is damaged; restore a checkpoint"
            raise StoreError(f"memory {self.path}: {reason}") from error
        self._written = dict(state)
        self._run = self._run or found.state.get("run", "")  # without a name, the file keeps its run
        return found

    # --- copies ----------------------------------------------------------------------------------

    def snapshot(self, path: Path) -> None:
        """Write a copy of the last commit to `path` atomically; memory use does not depend on the size.

        Raises:
            StoreError: there is no room, or `path` cannot be written.
        """
        scratch = path.with_name(path.name + ".new")
        with explained(self.path, f"snapshot {path}", written=path):
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch.unlink(missing_ok=True)
            try:
                back_up(self.db, scratch)
                flush(scratch)
                os.replace(scratch, path)
                flush(path.parent)
            finally:
                scratch.unlink(missing_ok=True)

    def restore(self, snapshot: Path) -> int:
        """Replace the database by a snapshot; return the number of groups stored after it, which are dropped.

        If nothing was committed here yet, they are those of the earlier run's file, which is removed if it continued
        the snapshot's run. A crash leaves the old file or the new one, each whole.

        Raises:
            StoreError: the snapshot cannot be read or there is no room; nothing has changed.
        """
        scratch, earlier = self.path.with_name(self.path.name + ".new"), self.path.with_name(EARLIER)
        is_resumed = self.position == self._start == 0 and earlier.exists()
        if not snapshot.is_file():
            raise StoreError(f"snapshot {snapshot} does not exist; expected a file that a checkpoint holds")
        if (log := Path(f"{snapshot}-wal")).exists() and log.stat().st_size:
            raise StoreError(f"{snapshot} is a live memory, {log.name} beside it; expected a snapshot")
        try:
            with explained(snapshot, "restoring it", written=self.path):
                remove(scratch)
                shutil.copyfile(snapshot, scratch)
                with closing(connect(scratch, is_durable=False)) as new:
                    lineage, _ = read_meta(new, snapshot)
                    found = new.execute("SELECT value FROM state WHERE name = 'items'").fetchone()
                    next_seq = json.loads(found[0])["next_group_seq"] if found else 0
                    to_one_file(new)
                flush(scratch)
                num_dropped = _groups_from(earlier if is_resumed else self.path, lineage, next_seq)
                self._shut()
                for ending in ENDINGS[1:]:  # of a reader: SQLite would apply the old log to the new file
                    Path(f"{self.path}{ending}").unlink(missing_ok=True)
                os.replace(scratch, self.path)
                flush(self.path.parent)
        finally:
            remove(scratch)
            if self._db is None:
                self._open()
        if is_resumed and num_dropped is not None:
            remove(earlier)
        return num_dropped or 0

    # --- ending ----------------------------------------------------------------------------------

    def _shut(self) -> None:
        if self._db is not None:
            with suppress(StoreError), explained(self.path, "closing it"):  # else the log stays for the next opening
                to_one_file(self._db)
            self._db.close()
            self._db = None

    def close(self) -> None:
        """Close the file, in one piece, and release its lock; a second call does nothing."""
        self._shut()
        self._lock.close()
        if self._scratch is not None:
            self._scratch.cleanup()


def _encoded(value: Any) -> str | bytes:
    return value if isinstance(value, bytes) else compact_json(value)


def _decoded(value: str | bytes) -> Any:
    return value if isinstance(value, bytes) else json.loads(value)


def read_meta(db: Connection, path: Path) -> tuple[str, int]:
    """Return the lineage of a database, which its snapshots share, and the number of its commits.

    Raises:
        StoreError: it is not a memory, or was written by another version.
    """
    if not db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()[0]:
        raise StoreError(f"{path} is an SQLite database but not a memory; expected one that a run has written")
    meta = dict(db.execute("SELECT name, value FROM meta").fetchall())
    if meta.get("version") != VERSION:
        raise StoreError(
            f"memory {path} was written by another version of this program, which is not supported: remove it and "
            "begin a new run"
        )
    return meta["lineage"], int(meta["position"])


def _groups_from(path: Path, lineage: str, next_seq: int) -> int | None:
    """Return how many groups a database holds that are not older than `next_seq`; None if it is of another lineage."""
    try:
        with reader(path) as db:
            if read_meta(db, path)[0] != lineage:
                return None
            num: int = db.execute("SELECT count(*) FROM groups WHERE seq >= ?", (next_seq,)).fetchone()[0]
            return num
    except StoreError as error:
        logger.warning("groups stored after the checkpoint are not counted: %s", error)
        return None
