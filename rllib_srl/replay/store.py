"""Keep a memory in one SQLite file that always holds the state of the last commit.

    commit(Commit) ──> one transaction, durable on return; if it fails, nothing is stored
    read() ──> Contents: rows, prompts, state            answer(request) makes a repeated call harmless
    snapshot(path) ──> a copy for a checkpoint           restore(path) replaces the file by one

    items    slot -> row, prompt            groups  seq -> row, id           payloads  seq -> bytes of the group
    vectors  slot -> float32                targets seq, episode -> bytes    state     name -> JSON, or bytes
    answers  position -> name, answer: the latest `NUM_ANSWERS`

Groups and targets are bytes in the format of safetensors, without pickle: arrays, and all other fields as JSON in the
metadata. Decoded arrays are read-only views; the same group gives the same bytes in every process.

Commits survive a crash of the process, and a power loss unless the directory is temporary. A file belongs to one run;
another run's file is renamed memory.earlier.db, from which `restore` counts the groups stored after a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

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
    store_error,
    to_one_file,
)
from rllib_srl.replay.items import GROUP, ITEM
from rllib_srl.types import Group, Prompt, StopReason, Target

logger = logging.getLogger(__name__)
DATABASE, EARLIER, SNAPSHOT = "memory.db", "memory.earlier.db", "snapshot.db"
NUM_ANSWERS = 4096
_ARRAYS = ("token_ids_N", "loss_mask_N", "behaviour_logp_N", "offsets", "rewards_G", "versions_G2")
_OF_TARGET = ("ids_Tk", "logp_Tk", "sampled_logp_T")
_DTYPES = {f"{kind}{8 * size}": np.dtype(f"<{code}{size}") for kind, code in zip("IUF", "iuf") for size in (1, 2, 4, 8)
           if (kind, size) != ("F", 1)} | {"BOOL": np.dtype(bool)}  # fmt: skip
_COMPACT = json.JSONEncoder(separators=(",", ":"))  # created once: construction costs more than a small value
_JSON_SCALARS = {type(None), bool, int, float, str}
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

    items: list[tuple[int, bytes, Prompt]] = field(default_factory=list)  # slot, row, prompt
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
        """Open the database of a run in `directory`, or create it; set that of another run aside, but with `run` = "".

        Without a directory it is a temporary one, which `close` deletes.

        Raises:
            StoreError: it is in use by another process, damaged, not a memory, or of another version.
        """
        self._scratch = tempfile.TemporaryDirectory(prefix="rllib_srl_replay_") if directory is None else None
        self.path = Path(self._scratch.name if self._scratch else directory or "") / DATABASE
        self._lock = Lock(self.path)
        self._db: sqlite3.Connection | None = None
        self._run = run
        self._written: dict[str, str | bytes] = {}  # state as last committed, encoded
        self.pending = Commit()  # what the call under way has changed so far; `payload` and `target` see it
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

    def _open(self) -> None:
        with explained(self.path, "opening it"):
            self._db = connect(self.path, is_durable=self._scratch is None)
            if not self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                meta = {"version": VERSION, "lineage": uuid.uuid4().hex, "position": "0"}
                with self._transaction("creating it"):
                    for statement in TABLES.split(";")[:-1]:
                        self.db.execute(statement)
                    self.db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            self.lineage, self.position = read_meta(self.db, self.path)
        self._written = {}

    @property
    def db(self) -> sqlite3.Connection:
        """Return the open database; raise a `StoreError` if it is closed."""
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
        with self._transaction(f"commit {position}"):
            self._write(changes, position)
            self.db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", state.items())
            self.db.execute("UPDATE meta SET value = ? WHERE name = 'position'", (str(position),))
        self.position = position
        self._written |= state

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[None]:
        try:
            self.db.execute("BEGIN IMMEDIATE")
            yield
            self.db.execute("COMMIT")
        except BaseException as error:
            if self._db is not None and self._db.in_transaction:  # after some errors SQLite has rolled back already
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error | OSError) and not isinstance(error, StoreError):
                raise store_error(error, self.path, doing) from error
            raise

    def _write(self, changes: Commit, position: int) -> None:
        many = self.db.executemany
        slots, seqs = ([(number,) for number in gone] for gone in (changes.removed_slots, changes.removed_groups))
        for table in ("items", "vectors"):
            many(f"DELETE FROM {table} WHERE slot = ?", slots)
        for table in ("groups", "payloads", "targets"):
            many(f"DELETE FROM {table} WHERE seq = ?", seqs)
        many("DELETE FROM targets WHERE seq = ? AND episode = ?", changes.removed_targets)
        items = [(slot, row, compact_json(prompt_fields(prompt))) for slot, row, prompt in changes.items]
        many("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", items)
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

        The file is rewritten: a full disk is a `StoreError`.
        """
        with explained(self.path, "erasing what was removed"):
            with self._transaction("erasing what was removed"):
                self.db.executemany("DELETE FROM answers WHERE instr(answer, ?)", [(word,) for word in words])
            self.db.execute("VACUUM")
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        remove(self.path.with_name(EARLIER))

    # --- reading ---------------------------------------------------------------------------------

    def answer(self, request: str) -> Any | None:
        """Return the answer that was committed with a request, or None if there is none or it is no longer kept."""
        found = self._all(f"reading answer {request}", "SELECT answer FROM answers WHERE name = ?", request)
        return json.loads(found[0][0]) if found else None

    def payload(self, seq: int) -> bytes:
        """Return the bytes of a group; raise a `StoreError` if it is not stored."""
        query = "SELECT CAST(payload AS BLOB) FROM payloads WHERE seq = ?"
        return self.pending.payloads.get(seq) or self._blob(f"group {seq}", query, int(seq))

    def target(self, seq: int, episode: int) -> bytes:
        """Return the bytes of a target; raise a `StoreError` if it is not stored."""
        query, what = "SELECT payload FROM targets WHERE seq = ? AND episode = ?", f"the target of group {seq}"
        found = self.pending.targets.get((seq, episode))
        return found or self._blob(f"{what}, episode {episode}", query, int(seq), int(episode))

    def _blob(self, what: str, query: str, *numbers: int) -> bytes:
        found = self._all(f"reading {what}", query, *numbers)
        if not found:
            raise StoreError(f"memory {self.path} does not hold {what}")
        blob: bytes = found[0][0]
        return blob

    def _all(self, doing: str, query: str, *parameters: Any) -> list[Any]:
        try:
            return self.db.execute(query, parameters).fetchall()
        except sqlite3.Error as error:
            raise store_error(error, self.path, doing) from error

    def has_payloads(self, seqs: Collection[int]) -> bool:
        """Return whether the payloads are exactly those of some groups."""
        return {seq for (seq,) in self._all("looking for payloads", "SELECT seq FROM payloads")} == set(seqs)

    def vectors(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield slot and vector, float32, in slot order; do not commit during the iteration."""
        with explained(self.path, "reading vectors"):
            for slot, data in self.db.execute("SELECT slot, vector FROM vectors ORDER BY slot"):
                yield slot, np.frombuffer(data, "<f4")

    def state(self, name: str, default: Any = None) -> Any:
        found = self._all(f"reading {name}", "SELECT value FROM state WHERE name = ?", name)
        return _decoded(found[0][0]) if found else default

    def read(self) -> Contents:
        """Return what the last commit left; raise a `StoreError` if the file is damaged."""
        items, groups, targets, state = (
            self._all("loading it", f"SELECT {query}")
            for query in (
                "slot, row, prompt FROM items ORDER BY slot",
                "seq, row, id FROM groups ORDER BY seq",
                "seq, episode, length(payload) FROM targets",
                "name, value FROM state",
            )
        )
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
        """Write a copy of the last commit to `path` atomically, in bounded memory."""
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
        is_resumed = self.position == 0 and earlier.exists()
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


def read_meta(db: sqlite3.Connection, path: Path) -> tuple[str, int]:
    """Return the lineage of a database, which its snapshots share, and the number of its commits."""
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


# --- groups and targets as bytes -------------------------------------------------------------------


def encode(group: Group) -> bytes:
    """Return a group as bytes.

    Raises:
        ValueError: an array is not numeric, the mask is not boolean, or `extra` does not survive a round trip through
            JSON; the message lists all errors.
    """
    faults, arrays = json_faults(group.extra, "extra"), {}
    for name in _ARRAYS:
        array = arrays[name] = np.ascontiguousarray(getattr(group, name))
        is_mask = name == "loss_mask_N"
        if array.dtype.kind not in ("b" if is_mask else "iuf"):
            faults.append(f"{name} is of {array.dtype}; expected {'bool' if is_mask else 'integers or floats'}")
    if faults:
        raise ValueError(f"group {group.group_id} cannot be stored: " + "; ".join(faults))
    header = {
        "group_id": group.group_id,
        "prompt": prompt_fields(group.prompt),
        "stop_reasons": [reason.value for reason in group.stop_reasons],
        "num_dropped": int(group.num_dropped),
        "origin": group.origin,
        "extra": group.extra,
    }
    return _saved(arrays, header)


def decode(payload: Any, name: str = "", origin: str | None = None) -> Group:
    """Return the group of a payload.

    Args:
        payload: what `encode` returned, in any buffer.
        name: the group's name in error messages.
        origin: of the group; None: as stored.

    Raises:
        ValueError: the payload cannot be read; the message names the group.
    """
    header, arrays = _opened(payload, f"group {name}")
    return Group(
        group_id=header["group_id"],
        prompt=prompt_of(header["prompt"]),
        stop_reasons=tuple(StopReason(value) for value in header["stop_reasons"]),
        num_dropped=header["num_dropped"],
        origin=origin or header["origin"],
        extra=header["extra"],
        **arrays,
    )


def encode_target(target: Target) -> bytes:
    """Return a target as bytes."""
    arrays = {name: np.ascontiguousarray(getattr(target, name)) for name in _OF_TARGET}
    return _saved(arrays, {"group_id": target.group_id, "episode": target.episode})


def decode_target(payload: bytes) -> Target:
    """Return the target of `encode_target`.

    Raises:
        ValueError: the payload cannot be read.
    """
    header, arrays = _opened(payload, "a target")
    return Target(header["group_id"], header["episode"], **arrays)


def _saved(arrays: dict[str, np.ndarray], header: Mapping[str, Any]) -> bytes:
    payload: bytes = save(arrays, {"fields": compact_json(header)})
    return payload


def _opened(payload: Any, what: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        view = memoryview(payload).cast("B")
        start = 8 + int.from_bytes(view[:8], "little")
        described = json.loads(bytes(view[8:start]))
        header: dict[str, Any] = json.loads(described.pop("__metadata__")["fields"])
        end = start + max(one["data_offsets"][1] for one in described.values())
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{what} is damaged: its header cannot be read: {error}") from error
    if end != len(view):
        raise ValueError(f"{what} is damaged: {len(view)} bytes; expected {end}")
    return header, {
        name: np.ndarray(tuple(one["shape"]), _DTYPES[one["dtype"]], payload, start + one["data_offsets"][0])
        for name, one in described.items()
    }


def compact_json(value: Any) -> str:
    """Return a value as JSON in ASCII without spaces."""
    return _COMPACT.encode(value)


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the fields of a prompt by name, as JSON types."""
    return {**vars(prompt), "history": list(prompt.history)}


def prompt_of(fields: dict[str, Any]) -> Prompt:
    """Return the prompt of `prompt_fields`."""
    return Prompt(**{**fields, "history": tuple(fields["history"])})


def json_faults(value: Any, name: str) -> list[str]:
    """Return one message for each part of `value` that a round trip through JSON would change.

    JSON turns tuples into lists and numeric keys into strings, so both are errors.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return []
    if isinstance(value, list):
        if set(map(type, value)) <= _JSON_SCALARS:  # fast path: long lists are mostly ids or numbers
            return []
        return [fault for i, part in enumerate(value) for fault in json_faults(part, f"{name}[{i}]")]
    if isinstance(value, dict):
        keys = [f"{name} has the key {key!r}; expected text" for key in value if not isinstance(key, str)]
        return keys + [fault for key, part in value.items() for fault in json_faults(part, f"{name}[{key!r}]")]
    return [f"{name} is a {type(value).__name__}; expected None, bool, int, float, str, list or dict"]
