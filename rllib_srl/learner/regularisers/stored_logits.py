"""Self-replay with stored logits (ESR): the likeliest tokens of a group when it was first trained on.

    begin     groups of the batch            group and place of each episode
    keep      first pass of played groups    top-k tokens and log-probs at each written token, in host memory
    prepare   reused groups                  what was stored for them
    loss      each pass of reused groups     KL to what was stored

The newest groups are kept, whole ones. A reused group without stored logits (older, or never trained on before) is left
out; the metric `esr_tokens` counts those that are not. Needs a single learner: a group may be reused on another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.losses.regularisers import top_kl
from rllib_srl.types import Group

Stored = tuple[np.ndarray, np.ndarray]  # at an episode's T loss tokens: token ids int32 [T, K], log-probs fp32 [T, K]


class StoredLogits:
    """Logits of the newest groups. Invariant: at most `num_episodes` episodes, unless one group alone has more."""

    def __init__(self, coeff: float, num_top: int, num_episodes: int) -> None:
        """Set the coefficient, K, and how many episodes are kept."""
        self._coeff, self._num_top, self._num_episodes = coeff, num_top, num_episodes
        self._groups: dict[str, dict[int, Stored]] = {}  # by group id and place in the group, oldest group first
        self._place_B: list[tuple[str, int]] = []

    def begin(self, groups: Sequence[Group]) -> None:
        """Note the groups of the next update; episodes are numbered as `episodes_of` does."""
        self._place_B = [(group.group_id, g) for group in groups for g in range(group.size)]

    def prepare(self, batch: MicroBatch[torch.Tensor], is_reused: bool) -> None:
        """Ask for the likeliest tokens of a played micro-batch; give a reused one what was stored for it."""
        if not is_reused:
            batch["num_top"] = self._num_top
            return
        episode_N = batch["episode"].cpu().numpy()
        tokens_NK = np.zeros((len(episode_N), self._num_top), np.int64)
        top_NK = np.zeros((len(episode_N), self._num_top), np.float32)
        is_stored_N = np.zeros(len(episode_N), bool)
        for group_id, place, at in self._episodes(episode_N):
            stored = self._groups.get(group_id, {}).get(place)
            if stored is not None and len(stored[0]) == len(at):
                tokens_NK[at], top_NK[at] = stored
                is_stored_N[at] = True
        if is_stored_N.any():
            device = batch["episode"].device
            batch["stored_tokens"], batch["stored_top"], batch["is_stored"] = (
                torch.from_numpy(one).to(device) for one in (tokens_NK, top_NK, is_stored_N)
            )

    def keep(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> None:
        """Store the likeliest tokens of a played micro-batch, from its first pass."""
        del batch["num_top"]
        episode_N = batch["episode"].cpu().numpy()
        tokens_NK = fwd_out["top_tokens"].to(torch.int32).cpu().numpy()
        top_NK = fwd_out["top_logp"].float().cpu().numpy()
        for group_id, place, at in self._episodes(episode_N):
            self._groups.setdefault(group_id, {})[place] = tokens_NK[at], top_NK[at]
        num = sum(map(len, self._groups.values()))
        while num > self._num_episodes and len(self._groups) > 1:
            oldest = next(iter(self._groups))
            num -= len(self._groups.pop(oldest))

    def _episodes(self, episode_N: np.ndarray) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yield group id, place in the group and loss tokens of each episode of a micro-batch."""
        for episode in np.unique(episode_N):
            yield *self._place_B[episode], np.flatnonzero(episode_N == episode)

    def loss(
        self, batch: MicroBatch[torch.Tensor], logp_NK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the scaled loss of a reused micro-batch, the sum of the KL over its tokens (detached), their number.

        Args:
            batch: after `prepare`; `scale`, `stored_top`, `is_stored`.
            logp_NK: log-probs of `stored_tokens` under the policy in training, with gradient.
        """
        kl_N = torch.where(batch["is_stored"], top_kl(batch["stored_top"], logp_NK), 0.0)
        return self._coeff * (batch["scale"] * kl_N).sum(), kl_N.detach().sum(), batch["is_stored"].sum()

    def get_state(self) -> dict[str, Any]:
        """Return what is stored, by group id and place."""
        return {"groups": {group_id: dict(places) for group_id, places in self._groups.items()}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load what `get_state` returned."""
        self._groups = {group_id: dict(places) for group_id, places in state["groups"].items()}
