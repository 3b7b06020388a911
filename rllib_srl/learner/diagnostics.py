"""Collect diagnostics per group during an update: the drift of reused groups.

    micro-batches --add--> sums by group --take--> plain data by group id for the replay memory, then cleared

A micro-batch holds loss tokens of whole episodes, but may split groups. They come from the update's own first pass, so
they cost no extra forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rllib_srl.types import Group


class GroupDiagnostics:
    """Accumulates drift of episodes by group. Invariant: an episode is added at most once."""

    def __init__(self, groups: Sequence[Group]) -> None:
        """Number the episodes as `batch.layout.episodes_of` does."""
        self._ids = [group.group_id for group in groups]
        self._group_of_B = np.repeat(np.arange(len(groups)), [group.size for group in groups])
        # By group: sum |prox - behaviour|, sum -prox, tokens, episodes left out.
        self._drift: dict[int, np.ndarray] = {}

    def add_drift(
        self, episode_N: np.ndarray, prox_logp_N: np.ndarray, behaviour_logp_N: np.ndarray, is_kept_N: np.ndarray
    ) -> None:
        """Add the log-probs of reused tokens.

        Args:
            episode_N: `Episode.index` of each token.
            prox_logp_N: log-probs under the learner at the start of the update, nats.
            behaviour_logp_N: stored log-probs, nats.
            is_kept_N: whether the token's episode is trained on.
        """
        for b in np.unique(episode_N):
            at_N = episode_N == b
            prox, behaviour = prox_logp_N[at_N].astype(np.float64), behaviour_logp_N[at_N].astype(np.float64)
            sums = [np.abs(prox - behaviour).sum(), -prox.sum(), at_N.sum(), not is_kept_N[at_N].any()]
            p = int(self._group_of_B[b])
            self._drift[p] = self._drift.get(p, np.zeros(4)) + np.array(sums, np.float64)

    def take_drift(self) -> dict[str, dict[str, float]]:
        """Return and clear `drift`, `nll` and `num_over_gap`, by group id.

        `drift` and `nll` are token means in nats, of |prox - behaviour| and -prox; `num_over_gap` counts episodes.
        """
        taken, self._drift = self._drift, {}
        return {
            self._ids[p]: {"drift": gap / num, "nll": nll / num, "num_over_gap": int(left_out)}
            for p, (gap, nll, num, left_out) in ((p, row.tolist()) for p, row in taken.items())
        }
