"""The part of a batch that one learner trains on: references to whole groups, their advantages and their weight.

    driver: GroupMeta (rewards, lengths, references) -> TrainingShard, one a learner      no token passes here
    learner: shard.groups() fetches the token arrays from the object store

What the loss of each token is multiplied by is fixed here, for the whole batch over all shards (`aggregation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rllib_srl.aggregation import Scale, token_scales
from rllib_srl.batch import balanced_shards
from rllib_srl.compose import PartRef, part_of
from rllib_srl.types import Group, GroupMeta, ListedRef

REUSE = "reuse"  # the origin of a group that is trained on again
RESCUE = "rescue"  # of stored episodes that joined a played group; any other origin was played this iteration


class TrainingShard(MultiAgentBatch):
    """A `MultiAgentBatch` whose token columns still lie where they were written.

    Invariant: `num_tokens`, `num_reused_tokens`, `num_episodes` and `scales` are about the whole batch over all
    learners, never this shard, so that a sum over learners is that over the batch. A shard may hold no group.
    """

    def __init__(
        self,
        group_refs: Sequence[Any],
        advantages: Sequence[np.ndarray],
        num_tokens: int,
        num_episodes: int,
        fetch_timeout_s: float,
        *,
        origins: Sequence[str],
        scales: Sequence[Scale],
        num_reused_tokens: int,
    ) -> None:
        """Describe one learner's groups.

        Args:
            group_refs: `GroupMeta.ref` of each group.
            advantages: the advantages of each group's episodes.
            num_tokens: policy-written tokens of the played groups of all shards together.
            num_episodes: episodes of all shards together, reused ones too.
            fetch_timeout_s: how long `groups` may wait for the object store.
            origins: "fresh", "revisit", "reuse" or "rescue" of each group; a stored one itself names its first.
            scales: what the loss of each group's tokens is multiplied by, or of each of its episodes'.
            num_reused_tokens: policy-written tokens of the stored groups of all shards together.
        """
        columns = SampleBatch({"advantage": np.concatenate([np.zeros(0), *advantages]).astype(np.float32)})
        super().__init__({DEFAULT_MODULE_ID: columns}, env_steps=len(columns["advantage"]))
        self.group_refs = list(group_refs)
        self.advantages = list(advantages)
        self.num_tokens = num_tokens
        self.num_episodes = num_episodes
        self.fetch_timeout_s = fetch_timeout_s
        self.origins = list(origins)
        self.scales = list(scales)
        self.num_reused_tokens = num_reused_tokens

    @property
    def is_reused_P(self) -> np.ndarray:
        """Return which groups are stored ones."""
        return np.array([origin in (REUSE, RESCUE) for origin in self.origins], bool)

    def groups(self) -> list[Group]:
        """Fetch the groups.

        Raises:
            ray.exceptions.GetTimeoutError: the object store did not deliver in time.
        """
        return fetched(self.group_refs, self.fetch_timeout_s)


def fetched(refs: Sequence[Any], timeout_s: float) -> list[Group]:
    """Return the groups behind `GroupMeta.ref`s, fetching each object once.

    Raises:
        ray.exceptions.GetTimeoutError: the object store did not deliver within `timeout_s`.
    """
    whole = [ref.ref if isinstance(ref, PartRef) else ref for ref in refs]
    objects = [ref.ref if isinstance(ref, ListedRef) else ref for ref in whole]
    remote = list(dict.fromkeys(ref for ref in objects if isinstance(ref, ray.ObjectRef)))
    found = dict(zip(remote, ray.get(remote, timeout=timeout_s) if remote else [], strict=True))
    groups = [found[ref] if isinstance(ref, ray.ObjectRef) else ref for ref in objects]
    groups = [group[ref.index] if isinstance(ref, ListedRef) else group for ref, group in zip(whole, groups)]
    return [part_of(group, ref.episodes) if isinstance(ref, PartRef) else group for ref, group in zip(refs, groups)]


def build_shards(
    groups: Sequence[GroupMeta],
    advantages: Sequence[np.ndarray],
    num_shards: int,
    fetch_timeout_s: float,
    reuse_coeff: float = 1.0,
    aggregation: str = "token_mean",
    longest: int = 1,
    normalisation: str = "split",
) -> list[TrainingShard]:
    """Split groups into one shard a learner, whole groups only, balanced by tokens.

    Played and reused groups are balanced each on their own, since learners wait for each other between the two;
    so reused ones never move a played group to another learner.

    Args:
        groups: those with signal, played and reused in any order.
        advantages: one array a group, computed before any sharding.
        num_shards: learners; 1 for a local one.
        fetch_timeout_s: see `TrainingShard`.
        reuse_coeff: weight of the reused groups' mean loss beside the played ones', at least 0.
        aggregation: of `aggregation.token_scales`, as are the two that follow.
        longest: tokens an episode may write.
        normalisation: "split" or "joint".
    """
    sides: dict[bool, list[int]] = {False: [], True: []}  # by whether a group was stored
    for p, group in enumerate(groups):
        sides[group.origin in (REUSE, RESCUE)].append(p)
    num_tokens, num_reused_tokens = (_num_loss_tokens([groups[p] for p in sides[is_reused]]) for is_reused in sides)
    scales = token_scales(
        [group.num_loss_tokens_G for group in groups],
        [group.origin == REUSE for group in groups],
        aggregation,
        longest,
        reuse_coeff,
        normalisation,
    )
    parts: list[list[int]] = [[] for _ in range(num_shards)]
    for side in sides.values():
        for part, own in zip(parts, balanced_shards([int(groups[p].lengths_G.sum()) for p in side], num_shards)):
            part.extend(side[i] for i in own)
    return [
        TrainingShard(
            [groups[p].ref for p in part],
            [advantages[p] for p in part],
            num_tokens,
            sum(len(group.rewards_G) for group in groups),
            fetch_timeout_s,
            origins=[groups[p].origin for p in part],
            scales=[scales[p] for p in part],
            num_reused_tokens=num_reused_tokens,
        )
        for part in parts
    ]


def _num_loss_tokens(groups: Sequence[GroupMeta]) -> int:
    return int(sum(group.num_loss_tokens_G.sum() for group in groups))
