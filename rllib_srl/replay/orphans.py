"""Groups that were committed after the checkpoint a run went back to: kept for reuse only.

They change nothing that the run would have drawn: they fill a reuse draw where the run's own groups do not suffice,
from a generator of their own. One that the run plays again, token for token, is its own from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from rllib_srl.replay.journal import Stored
from rllib_srl.replay.journal_schema import FIRST_ORPHAN
from rllib_srl.replay.ledger import Change
from rllib_srl.replay.payloads import Payloads
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.visits import GroupFacts
from rllib_srl.types import Group


class Orphans:
    """The orphans of a buffer. Invariant: `rows` are exactly the journal's rows without an item."""

    def __init__(self, settings: ReplaySettings, stored: Stored) -> None:
        """Take them from what the journal holds."""
        self._settings, self._prompts = settings, stored.orphans
        is_orphan_N = np.array([int(seq) in stored.orphans for seq in stored.seqs], bool)
        at_N = np.flatnonzero(is_orphan_N)
        self.rows = {int(stored.seqs[at]): stored.groups[at].copy() for at in at_N}
        self._before: dict[int, np.void] = dict(self.rows)
        self._alike: dict[tuple[int, float], list[int]] = {}
        for seq, row in self.rows.items():
            self._alike.setdefault((int(row["num_tokens"]), float(row["nll"])), []).append(seq)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.rows)

    def draw(
        self,
        num: int,
        now: int,
        generator: np.random.Generator,
        change: Change,
        is_wanted: Callable[[str], bool],
        without: Collection[int] = (),
    ) -> list[int]:
        """Return up to `num` of them, drawn uniformly among those with signal that are young and unused enough.

        Args:
            num: groups wanted.
            now: the training iteration.
            generator: of this draw.
            change: of the transaction.
            is_wanted: whether a domain, by name, may be drawn.
            without: numbers (`seq`) of groups that the batch has already.
        """
        settings = self._settings
        fit = [
            seq
            for seq, row in self.rows.items()
            if row["variance"] > 0
            and row["uses"] < settings.max_uses
            and abs(now - row["born"]) <= settings.max_age
            and seq not in without
            and is_wanted(self._prompts[seq].domain)
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

    def forget_twins(self, group: Group, facts: GroupFacts, payloads: Payloads, change: Change) -> int:
        """Remove those with exactly the tokens of a group that the run has played; return how many.

        A run that goes on as it did before plays them all again, and no draw should find the same tokens twice.
        """
        alike = self._alike.get((facts.num_tokens, float(np.float32(facts.nll))), [])
        left = [seq for seq in alike if seq in self.rows]
        twins = [seq for seq in left if np.array_equal(payloads.get(seq).token_ids_N, group.token_ids_N)]
        return sum(self.forget(seq, change) for seq in twins)

    def commit(self) -> None:
        """Make what was drawn and forgotten final."""
        self._before = dict(self.rows)

    def rollback(self) -> None:
        """Undo what was drawn and forgotten since the last commit."""
        self.rows = dict(self._before)


def orphan_id(group_id: str, seq: int) -> str:
    """Return the id an orphan goes by, for the run may play a group of its own under the same one.

    Like every id it begins with the iteration and ends with the place in it: "12.3" becomes "12.orphan0.3".
    """
    born, _, place = group_id.partition(".")
    return f"{born}.orphan{seq - FIRST_ORPHAN}.{place}"
