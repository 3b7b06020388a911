"""Read a memory from outside the process that owns it, on a copy, and remove items of a stopped run permanently.

    DIR --database_in--> its path --reading--> Reading: tables and state of a temporary copy
    drop(DIR, names)     from the database, and from the snapshots in the checkpoints, which a resume would restore

The copy is made by SQLite in one read transaction: it contains every commit that finished before the copy began, and
the run's commits do not wait for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.common.loading import CONTRIB
from rllib_srl.replay.items import Tables
from rllib_srl.replay.metrics import stats_of
from rllib_srl.replay.ratings import RatedGroups
from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.schedule.spacing import SPACINGS
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store import DATABASE, SNAPSHOT, Store, StoreError
from rllib_srl.storage.checkpoints import MANIFEST, SET_ASIDE, checkpoints_in, seal, verify_own
from rllib_srl.storage.paths import STATE
from rllib_srl.storage.seal_key import make_key

# In a run, in a checkpoint, and in the directory of a buffer or of a snapshot.
PLACES = (f"replay/{DATABASE}", f"memory/{SNAPSHOT}", DATABASE, SNAPSHOT)
MOST_NAMED = 5  # maximum number of candidates in an error message


def database_in(path: Path) -> Path:
    """Return the database of a run, a checkpoint or a buffer, a file as it is, or raise a `StoreError`."""
    for place in (path, *(path / name for name in PLACES)):
        if place.is_file():
            return place
    reason = "holds no memory" if path.is_dir() else "does not exist"
    raise StoreError(f"{path} {reason}; expected a run's directory, a checkpoint or a memory's database")


@dataclass(frozen=True)
class Reading:
    """What a memory held at one commit. Invariant: `store` is an open copy; the context manager closes it."""

    path: Path  # path of the database that was copied
    store: Store
    tables: Tables
    state: dict[str, Any]

    @cached_property
    def settings(self) -> ReplaySettings:
        """Return the settings it was last used with; the defaults for an empty memory."""
        return ReplaySettings.model_construct(**self.state.get("settings", {}))

    @cached_property
    def now(self) -> int:
        """Return the newest iteration recorded; 0 in an empty memory."""
        items, groups = self.tables.items, self.tables.groups
        times = (items["last_review"], items["created"], groups["born"])
        return max(int(column.max(initial=0)) for column in times)

    @cached_property
    def recall(self) -> dict[int, float]:
        """Return the predicted recall of each item now, by slot, in [0, 1].

        It is nan without a review, and if the spacing rule is a user's: reading never runs code that a memory names.
        """
        name, slots_N = self.settings.spacing, self.tables.slots()
        rows_N, recall_N = self.tables.items.at(slots_N), np.full(len(slots_N), np.nan)
        if name in SPACINGS.own or name.startswith(CONTRIB):
            found_N = Recall(self.settings, self.tables).recall_of(rows_N, self.now)
            recall_N = np.where(rows_N["reps"] > 0, found_N, np.nan)
        return dict(zip(slots_N.tolist(), recall_N.tolist(), strict=True))

    def stats(self) -> dict[str, float]:
        state = self.state
        return stats_of(self.tables, state.get("counts", {}), RatedGroups(**state.get("rated", {})), self.now)

    def find(self, name: str) -> int:
        """Return the slot of the one item with the prompt id `name`, or else a key that begins with it, or raise."""
        prompts = {slot: self.tables.prompt_of(slot) for slot in self.tables.slots().tolist()}
        slots = [slot for slot, prompt in prompts.items() if prompt.prompt_id == name]
        slots = slots or [slot for slot, prompt in prompts.items() if prompt.key.startswith(name.lower())]
        if not slots:
            raise ValueError(f"none of {len(prompts)} items has the prompt id or key {name!r}; see srl memory list")
        if len(slots) > 1:
            some = [prompts[slot] for slot in slots[:MOST_NAMED]]
            listed = ", ".join(f"{prompt.key} ({prompt.env_id} [{prompt.prompt_id}])" for prompt in some)
            listed += ", ..." * (len(slots) > MOST_NAMED)
            raise ValueError(f"{name!r} is {len(slots)} items: {listed}; expected more digits of a key")
        slot: int = slots[0]
        return slot


@contextmanager
def reading(path: Path) -> Iterator[Reading]:
    """Yield the content of the memory of a run, a checkpoint or a buffer, live or closed; `path` as in `database_in`.

    Raises:
        StoreError: it cannot be read, is damaged or of another version, or TMPDIR has no room for a copy.
    """
    path = database_in(path)
    with closing(Store(None)) as store:
        store.restore(path)
        store.path = path  # the path that errors name
        yield Reading(path, store, *store.read())


def drop(directory: Path, names: Collection[str], **which: Any) -> dict[Path, int]:
    """Remove items with their groups and answers; return their number in each database.

    The directory is that of a run, with its checkpoints, set aside or not, and copies by `SRL.get_state`; or of one
    checkpoint, or of a buffer. Items are named by prompt ids or prefixes of keys; `which` names further ones, as in
    `SRLReplayBuffer.remove`.

    Raises:
        ValueError: a name matches no item, or several.
        StoreError: a run is using the memory, or there is none.
        CheckpointError: a checkpoint is damaged, or another user sealed it.
    """
    is_run = not (directory / MANIFEST).is_file()
    places = (directory, *directory.glob(f"{SET_ASIDE}/*"))
    checkpoints = [path for place in places for path in checkpoints_in(place)] if is_run else [directory]
    sealed = {path / "memory" / SNAPSHOT: (path, verify_own(path)) for path in checkpoints}
    paths = [path for path in sealed if path.is_file()]
    if is_run:
        database = database_in(directory)
        if database.name != DATABASE:
            raise ValueError(f"{database} is part of a checkpoint; expected the directory of the checkpoint or its run")
        paths = [database, *paths, *database.parent.glob(f"{STATE}*/{SNAPSHOT}")]
    which["keys"] = {_key_of(name, paths) for name in names}
    removed = {}
    for path in paths:
        is_snapshot = path.name == SNAPSHOT
        with closing(Store(None if is_snapshot else path.parent)) as store:
            if is_snapshot:
                store.restore(path)
            tables, _ = store.read()
            with store.transaction():
                removed[path] = tables.remove(**which)
                store.write(tables)
            store.erase()
            if is_snapshot:
                store.snapshot(path)
            if path in sealed:
                seal(*sealed[path], make_key())
    return removed


def _key_of(name: str, paths: Sequence[Path]) -> str:
    for path in paths:
        with reading(path) as memory:
            try:
                return memory.tables.prompt_of(memory.find(name)).key
            except ValueError:
                if path == paths[-1]:
                    raise
    raise ValueError(f"{name!r}; expected a memory that holds it")
