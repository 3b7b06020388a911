"""Keep orphans for reuse: groups committed after the checkpoint that the run was restored from.

Orphans do not change the run's other draws: they only fill reuse draws for which the run has too few groups of its own,
and they have a separate generator. An orphan is removed when the run generates a group with exactly the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rllib_srl.replay.journal.journal import Stored
from rllib_srl.replay.journal.payloads import Payloads
from rllib_srl.replay.journal.schema import FIRST_ORPHAN
from rllib_srl.replay.journal.transaction import Change
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.visits import GroupFacts
from rllib_srl.types import Group, Prompt


class Orphans:
    """The orphans of a buffer. Invariant: `rows` are exactly the journal's group rows without an item."""

    def __init__(self, settings: ReplaySettings, stored: Stored) -> None:
        """Select the orphans from the stored state of a journal."""
        self._settings, self._prompts = settings, stored.orphans
        is_orphan_N = np.array([int(seq) in stored.orphans for seq in stored.seqs], bool)
        at_N = np.flatnonzero(is_orphan_N)
        self.rows = {int(stored.seqs[at]): stored.groups[at].copy() for at in at_N}
        self._before: dict[int, np.void] = dict(self.rows)
        self._alike: dict[tuple[int, float], list[int]] = {}
        for seq, row in self.rows.items():
            self._alike.setdefault((int(row["num_tokens"]), float(row["nll"])), []).append(seq)

    def __len__(self) -> int:
        """Return the number of orphans."""
        return len(self.rows)

    def draw(
        self,
        num: int,
        now: int,
        generator: np.random.Generator,
        change: Change,
        is_wanted: Callable[[Prompt, np.void], bool],
        has_signal: Callable[[Prompt, np.void], bool] | None = None,
    ) -> list[int]:
        """Draw up to `num` orphans uniformly and return their seqs.

        Candidates have a signal, uses < max_uses and |now - born| <= max_age.

        Args:
            num: number of groups to draw.
            now: the training iteration.
            generator: random generator of this draw.
            change: of the transaction; receives the updated rows.
            is_wanted: whether a group, given its prompt and record, may be drawn.
            has_signal: whether a group, given its prompt and record, has a learning signal; None: variance > 0.
        """
        settings = self._settings
        fit = [
            seq
            for seq, row in self.rows.items()
            if (row["variance"] > 0 if has_signal is None else has_signal(self._prompts[seq], row))
            and row["uses"] < settings.max_uses
            and abs(now - row["born"]) <= settings.max_age
            and is_wanted(self._prompts[seq], row)
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
        """Remove an orphan; return whether it existed."""
        if self.rows.pop(seq, None) is None:
            return False
        change.removed_groups.append(seq)
        return True

    def forget_twins(self, group: Group, facts: GroupFacts, payloads: Payloads, change: Change) -> int:
        """Remove the orphans with exactly the tokens of a group that the run has generated; return their number.

        A deterministic run generates all of them again; without this, a draw could find the same tokens twice.
        """
        alike = self._alike.get((facts.num_tokens, float(np.float32(facts.nll))), [])
        left = [seq for seq in alike if seq in self.rows]
        twins = [seq for seq in left if np.array_equal(payloads.get(seq).token_ids_N, group.token_ids_N)]
        return sum(self.forget(seq, change) for seq in twins)

    def commit(self) -> None:
        """Make draws and removals since the last commit final."""
        self._before = dict(self.rows)

    def rollback(self) -> None:
        """Undo draws and removals since the last commit."""
        self.rows = dict(self._before)


def orphan_id(group_id: str, seq: int) -> str:
    """Return the group id of an orphan, distinct from that of the run's own group with the same original id.

    Like every id it begins with the iteration and ends with the position in it: "12.3" becomes "12.orphan0.3".
    """
    born, _, place = group_id.partition(".")
    return f"{born}.orphan{seq - FIRST_ORPHAN}.{place}"
