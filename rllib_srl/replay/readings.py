"""Journals read by somebody else than their owner: copied first, so that a run is not disturbed and nothing is written.

    DIR --journals_in--> one path a shard --copied--> a file of our own --reading--> Reading: rows, state, reviews

A live journal is locked by the process that writes it. Its two files, the database and its WAL, are copied as they are;
the copy is good if meanwhile no page was moved from one to the other, else it is made again. What was committed before
the copy began is in it; a commit that was only half copied is not (the WAL's own checksums say so).

Source: SQLite, "Write-Ahead Logging" and "WAL-mode File Format" (sqlite.org/wal.html, sqlite.org/walformat.html).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.codec import decode
from rllib_srl.replay.journal import Journal, JournalError, Stored
from rllib_srl.replay.ledger import JOURNAL
from rllib_srl.replay.records import GROUP, ITEM, Header
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.spacing import SpacingRule, SpacingState, make_spacing
from rllib_srl.types import Group

# In a run, in a checkpoint, in the directories inside these, and in that of a buffer alone.
PLACES = (f"replay/shard_*/{JOURNAL}", "memory/shard_*.sqlite", f"shard_*/{JOURNAL}", "shard_*.sqlite", JOURNAL)
WAL_HEADER = 32  # bytes; its salts change whenever the WAL begins anew
NUM_TRIES, PAUSE_S = 40, 0.05
SETTLED_NS = 20_000_000  # within a tick of the file system's clock a second write shows no new time


def journals_in(path: Path) -> list[Path]:
    """Return the journals of a run, of a checkpoint or of a buffer, shard by shard; a file stands for itself.

    Raises:
        JournalError: there are none.
    """
    if path.is_file():
        return [path]
    for place in PLACES:
        if found := sorted(path.glob(place), key=lambda file: (len(str(file)), str(file))):
            return found
    reason = "holds no memory" if path.is_dir() else "does not exist"
    raise JournalError(f"{path} {reason}; expected a run's directory, a checkpoint or a journal file")


@contextmanager
def copied(path: Path) -> Iterator[Path]:
    """Yield a temporary directory with a copy of a journal, named as a buffer names its own.

    The copy takes as much room as the journal, in the place that TMPDIR names.

    Raises:
        JournalError: the journal cannot be read, or was rewritten all the while.
    """
    with tempfile.TemporaryDirectory(prefix="rllib_srl_reading_") as scratch:
        try:
            for _ in range(NUM_TRIES):
                before = _stamp(path)
                if not 0 <= time.time_ns() - path.stat().st_mtime_ns < SETTLED_NS:
                    _copy(path, Path(scratch) / JOURNAL)
                    if _stamp(path) == before:
                        break
                time.sleep(PAUSE_S)
            else:
                raise JournalError(f"journal {path} was rewritten during each of {NUM_TRIES} copies; try again later")
        except OSError as error:
            raise JournalError(f"journal {path} cannot be copied: {error}") from error
        yield Path(scratch)


def _copy(path: Path, target: Path) -> None:
    shutil.copyfile(path, target)
    wal, wal_target = Path(f"{path}-wal"), Path(f"{target}-wal")
    wal_target.unlink(missing_ok=True)
    try:
        shutil.copyfile(wal, wal_target)
    except FileNotFoundError:  # its owner is gone, or it was a snapshot all along
        wal_target.unlink(missing_ok=True)


def _stamp(path: Path) -> tuple[Any, ...]:
    """Return what changes whenever the database file is written or replaced, or its WAL begins anew."""
    status = path.stat()
    try:
        with Path(f"{path}-wal").open("rb") as stream:
            header: bytes | None = stream.read(WAL_HEADER)
    except FileNotFoundError:
        header = None
    return status.st_ino, status.st_size, status.st_mtime_ns, header


@dataclass(frozen=True)
class Reading:
    """One journal as it was at one commit.

    Invariant: arrays are as `Stored` has them; `journal` is an open copy, and closed when the reading ends.
    """

    path: Path  # of the journal that was copied
    journal: Journal
    stored: Stored
    settings: ReplaySettings
    rule: SpacingRule
    now: int  # the newest iteration that the journal knows of, or another shard's; 0 if they are empty

    @cached_property
    def reviews(self) -> np.ndarray:
        """Return all reviews, oldest first, as rows of `REVIEW`."""
        return self.journal.reviews()

    @cached_property
    def answers(self) -> list[tuple[str, Any]]:
        """Return the name and the answer of the last requests, oldest first."""
        return self.journal.answers()

    @cached_property
    def header(self) -> Header:
        """Return the names of the domains, and the numbers given out."""
        return Header.from_json(self.stored.state["store"]) if "store" in self.stored.state else Header()

    @cached_property
    def recall(self) -> np.ndarray:
        """Return the recall that the rule expects of each item now, in [0, 1]; nan for those never reviewed."""
        rows_N = self.stored.items
        elapsed_N = (self.now - rows_N["last_review"]) / self.settings.iterations_per_day
        recall_N = self.rule.retrievability(SpacingState.of(rows_N), elapsed_N)
        return np.where(rows_N["reps"] > 0, recall_N, np.nan)

    def groups_at(self, slot: int) -> np.ndarray:
        """Return the positions, in the arrays of groups, of an item's groups, oldest first."""
        groups = self.stored.groups
        return np.flatnonzero((groups["slot"] == slot) & ~groups["is_orphan"])

    def group(self, seq: int) -> Group:
        """Return a stored group.

        Raises:
            ValueError: its bytes are damaged.
            JournalError: it has lost them.
        """
        return decode(self.journal.read_group(seq), str(seq))


@contextmanager
def reading(path: Path) -> Iterator[Reading]:
    """Yield what a journal holds, live or not.

    Raises:
        JournalError: it cannot be read, is damaged, or of another version.
        ValueError: it was written under settings that mean nothing here, such as a rule of somebody's own.
    """
    with copied(path) as directory, _renamed(path, directory), opened(directory / JOURNAL) as journal:
        stored = journal.load()
        if "settings" not in stored.state and stored.position:
            raise JournalError(f"journal {path} does not say under which settings it was written; expected a newer one")
        settings = ReplaySettings.from_dict(stored.state.get("settings", {}))  # an empty one means the same under any
        rule = make_spacing(settings.spacing, settings.desired_retention, **settings.spacing_config)
        one = Reading(path, journal, stored, settings, rule, now=0)
        yield replace(one, now=_newest(one))


def _newest(one: Reading) -> int:
    items, groups = one.stored.items, one.stored.groups
    times = [items["last_review"], items["created"], groups["born"][~groups["is_orphan"]], one.reviews["now"]]
    asked = [int(first) for name, _ in one.answers if (first := name.split(".")[0]).isdigit()]
    return max([0, *asked, *(int(column.max()) for column in times if len(column))])


def opened(copy: Path) -> Journal:
    """Open a copy, which need not survive the machine."""
    return Journal(copy, ITEM, GROUP, is_durable=False)


@contextmanager
def readings(path: Path) -> Iterator[Sequence[Reading]]:
    """Yield what all journals of a run, a checkpoint or a buffer hold, shard by shard.

    Raises:
        JournalError, ValueError: as of `journals_in` and `reading`.
    """
    with ExitStack() as stack:
        found = [stack.enter_context(reading(journal)) for journal in journals_in(path)]
        now = max(one.now for one in found)
        yield [replace(one, now=now) for one in found]


@contextmanager
def _renamed(path: Path, directory: Path) -> Iterator[None]:
    """Let errors name the journal and not its copy."""
    try:
        yield
    except JournalError as error:
        raise JournalError(str(error).replace(str(directory / JOURNAL), str(path))) from error
