"""Self-replay with stored logits (ESR): the likeliest tokens of a group when it was first trained on.

    begin     groups of the batch            key of each episode
    keep      first pass of played groups    top-k tokens and log-probs at each written token, in host memory
    prepare   reused groups                  what was stored for them
    loss      each pass of reused groups     KL to what was stored

An episode is found by its group's id and a digest of its tokens, never by its place: parts of groups (positive ones,
rescues, rated ones) number their episodes anew. The newest groups are kept, whole ones. A reused episode without stored
logits (older, or never trained on before) gets no term; the metric `esr_tokens` counts the tokens of the others. A
single learner is needed: a group may be reused on another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.losses.regularisers import top_kl
from rllib_srl.types import Group

Stored = tuple[np.ndarray, np.ndarray]  # at an episode's T loss tokens: token ids int32 [T, K], log-probs fp32 [T, K]
Key = tuple[str, str]  # id of an episode's group, digest of the episode


def key_of(group: Group, g: int) -> Key:
    """Return the key of episode `g`: the same in each part of its group, whatever its place there.

    Episodes of one group with equal tokens share a key, and have equal logits.
    """
    start, end = group.offsets[g], group.offsets[g + 1]
    parts = (group.token_ids_N[start:end], group.loss_mask_N[start:end], np.array(group.starts(g)))
    digest = hashlib.blake2b(digest_size=16)
    for part, dtype in zip(parts, (np.int32, np.uint8, np.int64), strict=True):
        digest.update(part.astype(dtype).tobytes())
    return group.group_id, digest.hexdigest()


class StoredLogits:
    """Logits of the newest groups. Invariant: at most `num_episodes` episodes, unless one group alone has more."""

    def __init__(self, coeff: float, num_top: int, num_episodes: int) -> None:
        """Set the coefficient, K, and how many episodes are kept."""
        self._coeff, self._num_top, self._num_episodes = coeff, num_top, num_episodes
        self._groups: dict[str, dict[str, Stored]] = {}  # by group id and digest, oldest group first
        self._key_B: list[Key] = []

    def begin(self, groups: Sequence[Group]) -> None:
        """Note the groups of the next update; episodes are numbered as `episodes_of` does."""
        self._key_B = [key_of(group, g) for group in groups for g in range(group.size)]

    def prepare(self, batch: MicroBatch[torch.Tensor], is_reused: bool) -> None:
        """Ask for the likeliest tokens of a played micro-batch; give a reused one what was stored for it."""
        if not is_reused:
            batch["num_top"] = self._num_top
            return
        episode_N = batch["episode"].cpu().numpy()
        tokens_NK = np.zeros((len(episode_N), self._num_top), np.int64)
        top_NK = np.zeros((len(episode_N), self._num_top), np.float32)
        is_stored_N = np.zeros(len(episode_N), bool)
        for group_id, digest, at in self._episodes(episode_N):
            stored = self._groups.get(group_id, {}).get(digest)
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
        for group_id, digest, at in self._episodes(episode_N):
            self._groups.setdefault(group_id, {})[digest] = tokens_NK[at], top_NK[at]
        num = sum(map(len, self._groups.values()))
        while num > self._num_episodes and len(self._groups) > 1:
            oldest = next(iter(self._groups))
            num -= len(self._groups.pop(oldest))

    def _episodes(self, episode_N: np.ndarray) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yield group id, digest and loss tokens of each episode of a micro-batch."""
        for episode in np.unique(episode_N):
            yield *self._key_B[episode], np.flatnonzero(episode_N == episode)

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
        """Return what is stored, by group id and digest."""
        return {"groups": {group_id: dict(episodes) for group_id, episodes in self._groups.items()}}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load what `get_state` returned; what older versions stored by place in a group is left out."""
        self._groups = {}
        for group_id, stored in state["groups"].items():
            if episodes := {digest: one for digest, one in stored.items() if isinstance(digest, str)}:
                self._groups[group_id] = episodes
