"""Read a memory from outside the process that owns it, on a copy, without disturbing the run or writing to its files.

    DIR --database_in--> its path --copied--> a temporary copy --reading--> Reading: rows, state

The copy is made by SQLite in one read transaction: it contains every commit that finished before the copy began, and
the run's commits do not wait for it.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from rllib_srl.common.rules import CONTRIB
from rllib_srl.replay.items import Contents, Tables, key_of
from rllib_srl.replay.metrics import stats_of
from rllib_srl.replay.payloads import decode
from rllib_srl.replay.ratings import RatedGroups
from rllib_srl.replay.schedule.spacing import SPACINGS, SpacingState, make_spacing
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store import DATABASE, SNAPSHOT, Store, StoreError, copy
from rllib_srl.types import Group

# In a run, in a checkpoint, and in the directory of a buffer or of a snapshot.
PLACES = (f"replay/{DATABASE}", f"memory/{SNAPSHOT}", DATABASE, SNAPSHOT)


def database_in(path: Path) -> Path:
    """Return the database of a run, a checkpoint or a buffer; a file is returned as it is.

    Raises:
        StoreError: there is none.
    """
    for place in (path, *(path / name for name in PLACES)):
        if place.is_file():
            return place
    reason = "holds no memory" if path.is_dir() else "does not exist"
    raise StoreError(f"{path} {reason}; expected a run's directory, a checkpoint or a memory's database")


@contextmanager
def copied(path: Path) -> Iterator[Path]:
    """Yield a temporary directory with a copy of a database, under the file name that a buffer uses.

    Raises:
        StoreError: it cannot be read, or there is no room for the copy, which is as large and lies in TMPDIR.
    """
    with tempfile.TemporaryDirectory(prefix="rllib_srl_reading_") as scratch:
        copy(path, Path(scratch) / DATABASE)
        yield Path(scratch)


@dataclass(frozen=True)
class Reading:
    """What a memory held at one commit. Invariant: `store` is an open copy; the context manager closes it."""

    path: Path  # of the database that was copied
    store: Store
    stored: Contents

    @cached_property
    def settings(self) -> ReplaySettings:
        """Return the settings it was last used with; the defaults for an empty memory."""
        return ReplaySettings.from_dict(self.stored.state.get("settings", {}))

    @cached_property
    def now(self) -> int:
        """Return the newest iteration recorded; 0 in an empty memory."""
        items, groups = self.stored.items, self.stored.groups
        times = (items["last_review"], items["created"], groups["born"])
        return max(int(column.max(initial=0)) for column in times)

    @cached_property
    def recall(self) -> np.ndarray:
        """Return the predicted recall of each item now, in [0, 1].

        It is nan for items without a review, and for all if the spacing rule is a user's own: reading runs no code that
        a memory names.
        """
        rows_N, settings = self.stored.items, self.settings
        if settings.spacing not in SPACINGS.own and not settings.spacing.startswith(CONTRIB):
            return np.full(len(rows_N), np.nan)
        rule = make_spacing(settings.spacing, settings.desired_retention, **settings.spacing_config)
        elapsed_N = (self.now - rows_N["last_review"]) / settings.iterations_per_day
        return np.where(rows_N["reps"] > 0, rule.retrievability(SpacingState.of(rows_N), elapsed_N), np.nan)

    @cached_property
    def tables(self) -> Tables:
        """Return its rows as a buffer holds them."""
        return Tables(self.stored)

    def stats(self) -> dict[str, float]:
        """Return what `SRLReplayBuffer.stats` does."""
        state = self.stored.state
        return stats_of(self.tables, state.get("counts", {}), RatedGroups(**state.get("rated", {})), self.now)

    def groups_at(self, slot: int) -> np.ndarray:
        """Return the positions of an item's groups in the arrays of groups, oldest first."""
        return np.flatnonzero(self.stored.groups["slot"] == slot)

    def group(self, seq: int) -> Group:
        """Return a stored group.

        Raises:
            ValueError: its bytes are damaged.
            StoreError: its bytes are missing.
        """
        return decode(self.store.payload(seq), str(seq))


@contextmanager
def reading(path: Path) -> Iterator[Reading]:
    """Yield the content of the memory of a run, a checkpoint or a buffer, live or closed; `path` as in `database_in`.

    Raises:
        StoreError: it cannot be read, is damaged, or of another version.
    """
    path = database_in(path)
    with copied(path) as directory, _renamed(path, directory), closing(Store(directory)) as store:
        yield Reading(path, store, store.read())


def faults_of(path: Path) -> list[str]:
    """Return one message for each error of a memory, live or closed: in its pages, groups and tables.

    Errors of pages or groups end the verification, because later steps would repeat them.
    """
    try:
        with copied(path) as directory, closing(sqlite3.connect(directory / DATABASE)) as db:
            found = [" ".join(text.split()) for (text,) in db.execute("PRAGMA integrity_check(20)") if text != "ok"]
        if found:
            return [f"page: {text}" for text in found]
        with reading(path) as one:
            with_vector = [slot for slot, _ in one.store.vectors()]
            faults = [*_faults_of_groups(one)] or one.tables.faults()
            if not faults and with_vector != one.tables.slots_with_vector():
                faults = ["the vectors are not those of the items"]
            return faults
    except (StoreError, ValueError, sqlite3.DatabaseError) as error:
        return [str(error)]


def _faults_of_groups(one: Reading) -> Iterator[str]:
    """Yield one message for each group that cannot be read, or does not match its item or its row."""
    keys = {int(slot): key_of(prompt) for slot, prompt in zip(one.stored.slots, one.stored.prompts, strict=True)}
    for seq, row in zip(one.stored.seqs.tolist(), one.stored.groups, strict=True):
        try:
            group = one.group(seq)
            group.check_valid()
        except (StoreError, ValueError) as error:
            yield str(error)
            continue
        if key_of(group.prompt) != keys.get(int(row["slot"])):
            yield f"group {seq} is of {group.prompt.env_id} [{group.prompt.prompt_id}], which is not its item"
        if (len(group.token_ids_N), group.size) != (row["num_tokens"], row["size"]):
            yield f"group {seq} has {len(group.token_ids_N)} tokens in {group.size} episodes; its row says otherwise"


@contextmanager
def _renamed(path: Path, directory: Path) -> Iterator[None]:
    """Replace the path of the copy by that of the database in error messages."""
    try:
        yield
    except StoreError as error:
        raise StoreError(str(error).replace(str(directory / DATABASE), str(path))) from error
