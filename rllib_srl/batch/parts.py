"""Parts of groups: references to some episodes of a stored group, which the learner extracts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rllib_srl.types import Group, GroupMeta, with_starts


@dataclass(frozen=True)
class PartRef:
    """Reference to some episodes of the group behind `ref`. Invariant: `episodes` ascend and are not empty."""

    ref: Any  # a `GroupMeta.ref`
    episodes: tuple[int, ...]


def part_of(group: Group, episodes: Sequence[int]) -> Group:
    """Return a group with only some of the episodes, under the same id."""
    spans = [np.arange(group.offsets[g], group.offsets[g + 1]) for g in episodes]
    at_N, at_G = np.concatenate(spans), np.array(episodes)
    return replace(
        group,
        token_ids_N=group.token_ids_N[at_N],
        loss_mask_N=group.loss_mask_N[at_N],
        behaviour_logp_N=group.behaviour_logp_N[at_N],
        offsets=np.cumsum([0, *(len(span) for span in spans)]),
        rewards_G=group.rewards_G[at_G],
        versions_G2=group.versions_G2[at_G],
        stop_reasons=tuple(group.stop_reasons[g] for g in episodes),
        extra=with_starts(group.extra, [group.starts(g) for g in episodes]),
    )


def part_meta(meta: GroupMeta, episodes: Sequence[int]) -> GroupMeta:
    """Return the metadata of some episodes of a group, with a `PartRef` from which `part_of` extracts them."""
    at_G = np.array(episodes)
    whole = meta.ref if isinstance(meta.ref, PartRef) else PartRef(meta.ref, tuple(range(len(meta.rewards_G))))
    return replace(
        meta,
        rewards_G=meta.rewards_G[at_G],
        lengths_G=meta.lengths_G[at_G],
        num_loss_tokens_G=meta.num_loss_tokens_G[at_G],
        versions_G2=meta.versions_G2[at_G],
        stop_reasons=tuple(meta.stop_reasons[g] for g in episodes),
        num_turns_G=meta.num_turns_G[at_G] if len(meta.num_turns_G) else meta.num_turns_G,
        has_reward_G=None if meta.has_reward_G is None else meta.has_reward_G[at_G],
        ref=PartRef(whole.ref, tuple(whole.episodes[g] for g in episodes)),
    )


def rewarded_part(meta: GroupMeta) -> GroupMeta | None:
    """Return the episodes of a group that have a reward (`Group.has_reward_G`); None if there are none."""
    if meta.has_reward_G is None or meta.has_reward_G.all():
        return meta
    episodes = np.flatnonzero(meta.has_reward_G)
    return part_meta(meta, episodes.tolist()) if len(episodes) else None
