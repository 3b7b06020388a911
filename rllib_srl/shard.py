"""The part of a batch that one learner trains on: references to whole groups, and their advantages.

    driver: GroupMeta (rewards, lengths, references) -> TrainingShard, one a learner      no token passes here
    learner: shard.groups() fetches the token arrays from the runners' object store
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rllib_srl.batch import balanced_shards
from rllib_srl.types import Group, GroupMeta


class TrainingShard(MultiAgentBatch):
    """A `MultiAgentBatch` whose token columns still lie with the runners.

    Invariant: `num_tokens` and `num_episodes` count the whole batch over all learners, never this shard, so
    that a sum over learners is the mean over the batch. A shard may hold no group at all.
    """

    def __init__(
        self,
        group_refs: Sequence[Any],
        advantages: Sequence[np.ndarray],
        num_tokens: int,
        num_episodes: int,
        fetch_timeout_s: float,
    ) -> None:
        """Describe one learner's groups.

        Args:
            group_refs: an ObjectRef of each Group, or the Group itself in one process.
            advantages: the advantages of each group's episodes.
            num_tokens: policy-written tokens of all shards together.
            num_episodes: episodes of all shards together.
            fetch_timeout_s: how long `groups` may wait for the object store.
        """
        columns = SampleBatch({"advantage": np.concatenate([np.zeros(0), *advantages]).astype(np.float32)})
        super().__init__({DEFAULT_MODULE_ID: columns}, env_steps=len(columns["advantage"]))
        self.group_refs = list(group_refs)
        self.advantages = list(advantages)
        self.num_tokens = num_tokens
        self.num_episodes = num_episodes
        self.fetch_timeout_s = fetch_timeout_s

    def groups(self) -> list[Group]:
        """Fetch the groups.

        Raises:
            ray.exceptions.GetTimeoutError: the object store did not deliver in time.
        """
        remote = [ref for ref in self.group_refs if isinstance(ref, ray.ObjectRef)]
        fetched = iter(ray.get(remote, timeout=self.fetch_timeout_s) if remote else [])
        return [next(fetched) if isinstance(ref, ray.ObjectRef) else ref for ref in self.group_refs]


def build_shards(
    groups: Sequence[GroupMeta], advantages: Sequence[np.ndarray], num_shards: int, fetch_timeout_s: float
) -> list[TrainingShard]:
    """Split groups into one shard a learner, whole groups only, balanced by tokens.

    Args:
        groups: those with signal.
        advantages: one array a group, computed before any sharding.
        num_shards: learners; 1 for a local one.
        fetch_timeout_s: see `TrainingShard`.
    """
    num_tokens = int(sum(group.num_loss_tokens_G.sum() for group in groups))
    num_episodes = sum(len(group.rewards_G) for group in groups)
    parts = balanced_shards([int(group.lengths_G.sum()) for group in groups], num_shards)
    return [
        TrainingShard(
            [groups[p].ref for p in part], [advantages[p] for p in part], num_tokens, num_episodes, fetch_timeout_s
        )
        for part in parts
    ]
