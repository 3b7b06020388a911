"""Read a memory from outside the process that owns it, on a copy, without disturbing the run or writing to its files.

    DIR --database_in--> its path --copied--> a temporary copy --reading--> Reading: rows, state

The copy is made by SQLite in one read transaction: it contains every commit that finished before the copy began, and
the run's commits do not wait for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from rllib_srl.replay.payloads import decode
from rllib_srl.replay.schedule.spacing import SpacingRule, SpacingState, make_spacing
from rllib_srl.replay.settings import ReplaySettings, check_trusted
from rllib_srl.replay.store import DATABASE, SNAPSHOT, Contents, Store, StoreError, copy
from rllib_srl.types import Group

# In a run, in a checkpoint, and in the directory of a buffer or of a snapshot.
PLACES = (f"replay/{DATABASE}", f"memory/{SNAPSHOT}", DATABASE, SNAPSHOT)
RUN_BY_READERS = ("spacing", "embedding")  # rules that reading calls


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
    settings: ReplaySettings
    rule: SpacingRule
    now: int  # the newest iteration recorded; 0 in an empty memory

    @cached_property
    def recall(self) -> np.ndarray:
        """Return the predicted recall of each item now, in [0, 1]; nan for items without a review."""
        rows_N = self.stored.items
        elapsed_N = (self.now - rows_N["last_review"]) / self.settings.iterations_per_day
        recall_N = self.rule.retrievability(SpacingState.of(rows_N), elapsed_N)
        return np.where(rows_N["reps"] > 0, recall_N, np.nan)

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
def reading(path: Path, trusts_rules: bool = False) -> Iterator[Reading]:
    """Yield the content of the memory of a run, a checkpoint or a buffer, live or closed.

    Args:
        path: as in `database_in`.
        trusts_rules: whether to import and call rules that its settings name by an import path.

    Raises:
        StoreError: it cannot be read, is damaged, or of another version.
        ValueError: its settings are not usable here, for example a user's own rule that is not trusted.
    """
    path = database_in(path)
    with copied(path) as directory, _renamed(path, directory), closing(Store(directory)) as store:
        stored = store.read()
        settings = ReplaySettings.from_dict(stored.state.get("settings", {}))  # an empty memory fits any
        if not trusts_rules:
            check_trusted(settings, RUN_BY_READERS)
        rule = make_spacing(settings.spacing, settings.desired_retention, **settings.spacing_config)
        one = Reading(path, store, stored, settings, rule, now=0)
        yield replace(one, now=_newest(one))


def _newest(one: Reading) -> int:
    items, groups = one.stored.items, one.stored.groups
    times = [items["last_review"], items["created"], groups["born"]]
    return max([0, *(int(column.max()) for column in times if len(column))])


@contextmanager
def _renamed(path: Path, directory: Path) -> Iterator[None]:
    """Replace the path of the copy by that of the database in error messages."""
    try:
        yield
    except StoreError as error:
        raise StoreError(str(error).replace(str(directory / DATABASE), str(path))) from error
