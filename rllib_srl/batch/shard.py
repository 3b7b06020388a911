"""Split a batch into one shard per learner: references to whole groups, their advantages and loss weights.

    driver: GroupMeta (rewards, lengths, references) -> one TrainingShard per learner, without tokens
    learner: shard.groups() fetches the token arrays from the object store

The scale of each token's loss is fixed here for the whole batch, before any sharding:

    rule             scale of a token in an episode with n loss tokens   symbols, for one side (played or reused)
    token_mean       1 / N                                               N: loss tokens of all its episodes
    sequence_mean    1 / (B n)                                           B: its episodes with a loss token
    constant         1 / (B longest)                                     Dr.GRPO: no length bias

    loss = L_played + L_reused      each side by its own N or B, so that more reused groups do not lower the weight of
                                    played groups (RePO)

Sources: Yu et al. 2025 (DAPO), arXiv 2503.14476 section 3.3; Shao et al. 2024 (GRPO), arXiv 2402.03300 eq. 3;
Liu et al. 2025 (Dr.GRPO), arXiv 2503.20783 section 3.2; Li et al. 2025 (RePO), arXiv 2506.09340.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rllib_srl.batch.layout import balanced_shards
from rllib_srl.batch.parts import PartRef, part_of
from rllib_srl.types import Group, GroupMeta, ListedRef

if TYPE_CHECKING:
    from rllib_srl.batch.retention import RetentionPart

Scale = float | np.ndarray  # factor of the loss of a group's tokens: one number, or [G], one per episode
REUSE = "reuse"  # origin of a stored group that is trained on again; all other origins: played this iteration


class TrainingShard(MultiAgentBatch):
    """A `MultiAgentBatch` for one learner that holds references to groups instead of token columns.

    Invariant: `num_tokens`, `num_reused_tokens` and the normalisation of `scales` cover the whole batch over all
    learners, not this shard, so that sums over learners are sums over the batch. A shard may be empty.
    """

    def __init__(
        self,
        group_refs: Sequence[Any],
        advantages: Sequence[np.ndarray],
        fetch_timeout_s: float,
        *,
        origins: Sequence[str],
        scales: Sequence[Scale],
        num_tokens: int,
        num_reused_tokens: int,
    ) -> None:
        """Set one learner's groups: the `GroupMeta.ref`, advantages [G], origin and loss factor of each.

        Origins are passed separately because that inside a stored group is the one it had when it was played.
        """
        columns = SampleBatch({"advantage": np.concatenate([np.zeros(0), *advantages]).astype(np.float32)})
        super().__init__({DEFAULT_MODULE_ID: columns}, env_steps=len(columns["advantage"]))
        self.group_refs = list(group_refs)
        self.advantages = list(advantages)
        self.fetch_timeout_s = fetch_timeout_s
        self.origins = list(origins)
        self.scales = list(scales)
        self.num_tokens = num_tokens
        self.num_reused_tokens = num_reused_tokens
        self.retention: RetentionPart | None = None  # None: nothing is held

    @property
    def is_reused_P(self) -> np.ndarray:
        """Return which groups come from the replay memory, bool [P]."""
        return np.array([origin == REUSE for origin in self.origins], bool)

    def groups(self) -> list[Group]:
        """Fetch the groups.

        Raises:
            ray.exceptions.GetTimeoutError: the object store did not answer within `fetch_timeout_s`.
        """
        return fetched(self.group_refs, self.fetch_timeout_s)


def fetched(refs: Sequence[Any], timeout_s: float) -> list[Group]:
    """Return the groups behind `GroupMeta.ref`s, fetching each object once.

    Raises:
        ray.exceptions.GetTimeoutError: the object store did not answer within `timeout_s`.
    """
    whole = [ref.ref if isinstance(ref, PartRef) else ref for ref in refs]
    objects = [ref.ref if isinstance(ref, ListedRef) else ref for ref in whole]
    remote = list(dict.fromkeys(ref for ref in objects if isinstance(ref, ray.ObjectRef)))
    by_ref = dict(zip(remote, ray.get(remote, timeout=timeout_s) if remote else [], strict=True))
    groups = [by_ref[ref] if isinstance(ref, ray.ObjectRef) else ref for ref in objects]
    groups = [group[ref.index] if isinstance(ref, ListedRef) else group for ref, group in zip(whole, groups)]
    return [part_of(group, ref.episodes) if isinstance(ref, PartRef) else group for ref, group in zip(refs, groups)]


def build_shards(
    groups: Sequence[GroupMeta],
    advantages: Sequence[np.ndarray],
    num_shards: int,
    fetch_timeout_s: float,
    aggregation: str = "token_mean",
    longest: int = 1,
) -> list[TrainingShard]:
    """Split whole groups into one shard per learner, balanced by tokens.

    Played and reused groups are balanced separately, because learners synchronise between the two. Reused groups
    therefore never move a played group to another learner.

    The scale of a group is multiplied by its `weight`. Token and episode counts are not, so a weight scales only the
    gradient of its own group.

    Args:
        groups: groups to train on, played and reused in any order.
        advantages: one array [G] per group, computed before any sharding.
        num_shards: number of learners; 1 for a local learner.
        fetch_timeout_s: see `TrainingShard`.
        aggregation: rule of `token_scales`.
        longest: see `token_scales`.
    """
    sides: dict[bool, list[int]] = {False: [], True: []}  # key: whether the group comes from the replay memory
    for p, group in enumerate(groups):
        sides[group.origin == REUSE].append(p)
    num_tokens = {
        is_reused: int(sum(groups[p].num_loss_tokens_G.sum() for p in side)) for is_reused, side in sides.items()
    }
    scales = token_scales(
        [group.num_loss_tokens_G for group in groups],
        [group.origin == REUSE for group in groups],
        aggregation,
        longest,
    )
    parts: list[list[int]] = [[] for _ in range(num_shards)]
    for side in sides.values():
        for part, chosen in zip(parts, balanced_shards([int(groups[p].lengths_G.sum()) for p in side], num_shards)):
            part.extend(side[i] for i in chosen)
    return [
        TrainingShard(
            [groups[p].ref for p in part],
            [advantages[p] for p in part],
            fetch_timeout_s,
            origins=[groups[p].origin for p in part],
            scales=[scales[p] for p in part],
            num_tokens=num_tokens[False],
            num_reused_tokens=num_tokens[True],
        )
        for part in parts
    ]


def token_scales(
    num_tokens_PG: Sequence[np.ndarray],
    is_reused_P: Sequence[bool],
    rule: str = "token_mean",
    longest: int = 1,
) -> list[Scale]:
    """Return the scale of each group.

    Args:
        num_tokens_PG: number of policy-written tokens of each episode, [G] per group.
        is_reused_P: whether a group belongs to the reused side.
        rule: "token_mean", "sequence_mean" or "constant".
        longest: maximum tokens an episode may write, for "constant".
    """
    sides = {
        side: [n for n, is_reused in zip(num_tokens_PG, is_reused_P, strict=True) if is_reused == side]
        for side in (False, True)
    }
    num_tokens, num_episodes = (
        {side: max(1, int(sum(of(n) for n in groups))) for side, groups in sides.items()}
        for of in (np.sum, np.count_nonzero)
    )
    scales: list[Scale] = []
    for num_tokens_G, is_reused in zip(num_tokens_PG, is_reused_P, strict=True):
        if rule == "token_mean":
            scales.append(1 / num_tokens[is_reused])
        elif rule == "constant":
            scales.append(1 / (num_episodes[is_reused] * longest))
        else:
            scales.append(1 / (num_episodes[is_reused] * np.maximum(1, np.asarray(num_tokens_G, np.float64))))
    return scales
