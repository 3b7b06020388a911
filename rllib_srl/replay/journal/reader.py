"""Read journals from outside the process that owns them, on a copy, without disturbing the run or writing to its files.

    DIR --journal_in--> its path --copied--> a temporary copy --reading--> Reading: rows, state

The copy is made by SQLite in one read transaction: it contains every commit that finished before the copy began, and
the run's commits do not wait for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.journal.codec import decode
from rllib_srl.replay.journal.file import back_up_live
from rllib_srl.replay.journal.journal import Journal, JournalError, Stored
from rllib_srl.replay.journal.transaction import JOURNAL, SNAPSHOT
from rllib_srl.replay.schedule.spacing import SpacingRule, SpacingState, make_spacing
from rllib_srl.replay.settings import ReplaySettings, check_trusted
from rllib_srl.replay.store.records import GROUP, ITEM, Header
from rllib_srl.types import Group

# In a run, in a checkpoint, and in the directory of a buffer or of a snapshot.
PLACES = (f"replay/{JOURNAL}", f"memory/{SNAPSHOT}", JOURNAL, SNAPSHOT)
RUN_BY_READERS = ("spacing", "embedding")  # rules that reading a journal calls


def journal_in(path: Path) -> Path:
    """Return the journal of a run, a checkpoint or a buffer; a file is returned as it is.

    Raises:
        JournalError: there is none.
    """
    for place in (path, *(path / name for name in PLACES)):
        if place.is_file():
            return place
    reason = "holds no memory" if path.is_dir() else "does not exist"
    raise JournalError(f"{path} {reason}; expected a run's directory, a checkpoint or a journal file")


@contextmanager
def copied(path: Path) -> Iterator[Path]:
    """Yield a temporary directory with a copy of a journal, under the file name that a buffer uses.

    The copy is as large as the journal and lies in TMPDIR.

    Raises:
        JournalError: the journal cannot be read, or there is no room for the copy.
    """
    with tempfile.TemporaryDirectory(prefix="rllib_srl_reading_") as scratch:
        back_up_live(path, Path(scratch) / JOURNAL)
        yield Path(scratch)


@dataclass(frozen=True)
class Reading:
    """The content of one journal as of one commit.

    Invariant: arrays are as in `Stored`; `journal` is an open copy that is closed when the context manager exits.
    """

    path: Path  # of the journal that was copied
    journal: Journal
    stored: Stored
    settings: ReplaySettings
    rule: SpacingRule
    now: int  # the newest iteration recorded in the journal; 0 if it is empty

    @cached_property
    def answers(self) -> list[tuple[str, Any]]:
        """Return the names, without the run's incarnation, and answers of the latest requests, oldest first."""
        return [(name.rpartition("/")[2], answer) for name, answer in self.journal.answers()]

    @cached_property
    def header(self) -> Header:
        """Return the store's header: domain names and next sequence numbers."""
        return Header.from_json(self.stored.state["store"]) if "store" in self.stored.state else Header()

    @cached_property
    def recall(self) -> np.ndarray:
        """Return the predicted recall of each item now, in [0, 1]; nan for items without a review."""
        rows_N = self.stored.items
        elapsed_N = (self.now - rows_N["last_review"]) / self.settings.iterations_per_day
        recall_N = self.rule.retrievability(SpacingState.of(rows_N), elapsed_N)
        return np.where(rows_N["reps"] > 0, recall_N, np.nan)

    def groups_at(self, slot: int) -> np.ndarray:
        """Return the positions of an item's groups in the arrays of groups, oldest first."""
        groups = self.stored.groups
        return np.flatnonzero(groups["slot"] == slot)

    def group(self, seq: int) -> Group:
        """Return a stored group.

        Raises:
            ValueError: its bytes are damaged.
            JournalError: its bytes are missing.
        """
        return decode(self.journal.read_group(seq), str(seq))


@contextmanager
def reading(path: Path, trusts_rules: bool = False) -> Iterator[Reading]:
    """Yield the content of the journal of a run, a checkpoint or a buffer, live or closed.

    Args:
        path: as in `journal_in`.
        trusts_rules: whether to import and call rules that its settings name by an import path.

    Raises:
        JournalError: it cannot be read, is damaged, or of another version.
        ValueError: its settings are not usable here, for example a user's own rule that is not trusted.
    """
    path = journal_in(path)
    with copied(path) as directory, _renamed(path, directory), opened(directory / JOURNAL) as journal:
        stored = journal.load()
        if "settings" not in stored.state and stored.position:
            raise JournalError(f"journal {path} does not say under which settings it was written; expected a newer one")
        settings = ReplaySettings.from_dict(stored.state.get("settings", {}))  # an empty journal fits any
        if not trusts_rules:
            check_trusted(settings, RUN_BY_READERS)
        rule = make_spacing(settings.spacing, settings.desired_retention, **settings.spacing_config)
        one = Reading(path, journal, stored, settings, rule, now=0)
        yield replace(one, now=_newest(one))


def _newest(one: Reading) -> int:
    items, groups = one.stored.items, one.stored.groups
    times = [items["last_review"], items["created"], groups["born"]]
    asked = [int(first) for name, _ in one.answers if (first := name.split(".")[0]).isdigit()]
    return max([0, *asked, *(int(column.max()) for column in times if len(column))])


def opened(copy: Path) -> Journal:
    """Open a copy of a journal without durability."""
    return Journal(copy, ITEM, GROUP, is_durable=False)


@contextmanager
def _renamed(path: Path, directory: Path) -> Iterator[None]:
    """Replace the path of the copy by that of the journal in error messages."""
    try:
        yield
    except JournalError as error:
        raise JournalError(str(error).replace(str(directory / JOURNAL), str(path))) from error
