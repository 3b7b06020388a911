"""Groups that were committed after the checkpoint a run went back to: kept for reuse only.

They change nothing that the run would have drawn: they fill a reuse draw where the run's own groups do not suffice.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from rllib_srl.replay.journal import Stored
from rllib_srl.replay.ledger import Change
from rllib_srl.replay.settings import ReplaySettings


class Orphans:
    """The orphans of a buffer. Invariant: `rows` are exactly the journal's rows without an item."""

    def __init__(self, settings: ReplaySettings, stored: Stored) -> None:
        """Take them from what the journal holds."""
        self._settings = settings
        is_orphan_N = np.array([int(seq) in stored.orphans for seq in stored.seqs], bool)
        at_N = np.flatnonzero(is_orphan_N)
        self.rows = {int(stored.seqs[at]): stored.groups[at].copy() for at in at_N}
        self._before: dict[int, np.void] = dict(self.rows)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.rows)

    def draw(
        self, num: int, now: int, generator: np.random.Generator, change: Change, without: Collection[int] = ()
    ) -> list[int]:
        """Return up to `num` of them, drawn uniformly among those with signal that are young and unused enough."""
        settings = self._settings
        fit = [
            seq
            for seq, row in self.rows.items()
            if seq not in without and row["variance"] > 0 and row["uses"] < settings.max_uses and abs(now - row["born"]) <= settings.max_age
        ]
        if num < 1 or not fit:
            return []
        drawn = [fit[at] for at in generator.permutation(len(fit))[:num]]
        for seq in drawn:
            row = self.rows[seq].copy()
            row["uses"] += 1
            self.rows[seq] = change.groups[seq] = row
        return drawn

    def forget(self, seq: int, change: Change) -> bool:
        """Remove one; say whether it was there."""
        if self.rows.pop(seq, None) is None:
            return False
        change.removed_groups.append(seq)
        return True

    def commit(self) -> None:
        """Make what was drawn and forgotten final."""
        self._before = dict(self.rows)

    def rollback(self) -> None:
        """Undo what was drawn and forgotten since the last commit."""
        self.rows = dict(self._before)
