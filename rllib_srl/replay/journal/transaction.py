"""Run atomic transactions over a buffer's store and its journal.

    with ledger.transaction(store, state, undo, request) as change:   ...change the store, add payloads, vectors, ...
    on exit: one durable commit, then store.commit() and the payload cache; on an error: everything is undone

A journal belongs to one run. Another run's journal is renamed `journal.earlier.db`; restoring a checkpoint of that run
counts the groups that it had stored after the checkpoint, and removes it.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.journal.codec import encode
from rllib_srl.replay.journal.file import move, remove
from rllib_srl.replay.journal.journal import Commit, Journal, JournalError, Stored
from rllib_srl.replay.journal.payloads import Payloads
from rllib_srl.replay.journal.snapshots import restore
from rllib_srl.replay.store.items import ItemStore
from rllib_srl.replay.store.records import GROUP, ITEM, Header, bytes_at
from rllib_srl.storage.disk import writing
from rllib_srl.types import Group

logger = logging.getLogger(__name__)
JOURNAL, EARLIER, SNAPSHOT = "journal.db", "journal.earlier.db", "snapshot.db"


@dataclass
class Change:
    """The changes of one transaction beside the store's own rows."""

    new_slots: set[int] = field(default_factory=set)
    removed_slots: set[int] = field(default_factory=set)  # including slots that a new item has taken since
    payloads: dict[int, bytes] = field(default_factory=dict)  # group seq -> bytes
    removed_groups: list[int] = field(default_factory=list)
    vectors: dict[int, np.ndarray] = field(default_factory=dict)  # slot -> vector
    answer: Any = None

    def keep(self, seq: int, group: Group) -> int:
        """Encode a group and add its bytes to the transaction; return their number."""
        self.payloads[seq] = encode(group)
        return len(self.payloads[seq])


class Ledger:
    """The journal of a buffer and the cache of its groups.

    Invariant: outside a transaction, the rows and the state of the store and of the journal agree.
    """

    def __init__(self, directory: Path | None, run: str, max_bytes: int) -> None:
        """Open the journal of `run`; rename another run's journal, or delete it if it is empty.

        Args:
            directory: of the journal; None uses a temporary one that `close` deletes.
            run: name of the run; "" continues any existing journal.
            max_bytes: limit of encoded groups in memory, in bytes.

        Raises:
            JournalError: the journal is in use by another process, damaged, or of another version.
        """
        self._directory, self._run, self._max_bytes = directory, run, max_bytes
        self._written: dict[str, Any] = {}  # state as last committed
        self.agreed: dict[str, Any] | None = None  # all of the state after the last transaction; None before the first
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if directory is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="rllib_srl_replay_")
            self._use(self._journal(Path(self._scratch.name) / JOURNAL))
            return
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        journal = self._journal(directory / JOURNAL)
        if run and journal.load().state.get("run", run) != run:
            journal.close()
            if journal.position > 0:
                move(directory / JOURNAL, directory / EARLIER)
            remove(directory / JOURNAL)
            journal = self._journal(directory / JOURNAL)
        self._use(journal)

    def _journal(self, path: Path) -> Journal:
        return Journal(path, ITEM, GROUP, is_durable=self._scratch is None)

    def _use(self, journal: Journal) -> None:
        self.journal = journal
        self.payloads = Payloads(journal, self._max_bytes)
        self._start = journal.position

    def stored(self) -> Stored:
        """Load the journal's state and return it."""
        stored = self.journal.load()
        self._written, self.agreed = dict(stored.state), None
        self._run = self._run or stored.state.get("run", "")  # without a name, the journal keeps its run
        return stored

    @contextmanager
    def transaction(
        self, store: ItemStore, state: Callable[[], Mapping[str, Any]], undo: Callable[[], None], request: str
    ) -> Iterator[Change]:
        """Commit the changes made inside, or undo all of them on an error.

        Args:
            store: the store; its changed rows are written.
            state: called at the end; returns a copy of name -> JSON types. Only changed entries are written.
            undo: restores all state outside the store and this object.
            request: name of the call, "" for none.

        Raises:
            JournalError: the commit failed; nothing has changed.
        """
        change = Change()
        try:
            yield change
            written = {**state(), "run": self._run}
            self.journal.commit(self._commit_of(store, change, written, request))
        except BaseException:
            store.rollback()
            undo()
            raise
        store.commit()
        self._written |= written
        self.agreed = written
        for seq, payload in change.payloads.items():
            self.payloads.put(seq, payload)
        self.payloads.forget(change.removed_groups)

    def _commit_of(self, store: ItemStore, change: Change, written: dict[str, Any], request: str) -> Commit:
        changed = store.changed()
        item_N, group_N = np.array(changed.items, np.int64), np.array(changed.groups, np.int64)
        item_N = item_N[store.holds(item_N)]
        group_N = group_N[store.groups["size"][group_N] > 0]  # a free row is zero
        items = dict(zip(item_N.tolist(), bytes_at(store.items, item_N), strict=True))
        groups = dict(zip(store.groups["seq"][group_N].tolist(), bytes_at(store.groups, group_N), strict=True))
        gone = set(change.removed_groups) - set(groups)
        return Commit(
            items=items,
            prompts={slot: store.prompt_of(slot) for slot in items if slot in change.new_slots},
            vectors={slot: vector for slot, vector in change.vectors.items() if slot in items},
            removed_slots=sorted(change.removed_slots),
            groups=groups,
            payloads={seq: payload for seq, payload in change.payloads.items() if seq not in gone},
            removed_groups=sorted(gone),
            request=request or None,
            answer=change.answer if request else None,
            state={name: value for name, value in written.items() if self._written.get(name) != value},
        )

    def restore(self, snapshot: Path) -> int:
        """Replace the journal by a snapshot; return the number of groups stored after it, which are dropped.

        If nothing was committed yet, they are those of the earlier run's journal, which is removed if it continued the
        snapshot's run.

        Raises:
            JournalError: the snapshot cannot be read; nothing has changed.
        """
        path = self.journal.path
        earlier = path.parent / EARLIER
        is_resumed = self.journal.position == self._start == 0 and earlier.exists()
        try:
            lineage, seqs_N = _groups_in(earlier) if is_resumed else (self.journal.lineage, self.journal.load().seqs)
            restore(snapshot, path, self.journal.close)
        finally:
            if not self.journal.is_open:
                self._use(self._journal(path))
        if lineage != self.journal.lineage:
            return 0
        if is_resumed:
            remove(earlier)
        header = self.journal.load().state.get("store")
        return int(np.count_nonzero(seqs_N >= (Header.from_json(header) if header else Header()).next_group_seq))

    def close(self) -> None:
        """Close the journal."""
        self.journal.close()
        if self._scratch is not None:
            self._scratch.cleanup()


def _groups_in(path: Path) -> tuple[str, np.ndarray]:
    """Return lineage and group numbers of a journal; "" and none if it cannot be read."""
    try:
        with Journal(path, ITEM, GROUP) as journal:
            return journal.lineage, journal.load().seqs
    except JournalError as error:
        logger.warning("groups stored after the checkpoint are not counted: %s", error)
        return "", np.empty(0, np.int64)
