"""Mix stored successes into played groups ("rescue"), and filter the episodes of reused groups.

    played group ─┬─ its own episodes                advantage over the whole composed group, ratio to prox_logp
                  └─ stored successes (a PartRef)    the same baseline, ratio to the stored behaviour_logp

    arpo    in a group whose rewards are all low, one success replaces the first episode
    rlep    every group gets up to `rescue_episodes` additional successes

Stored groups are not changed: a part is a reference to some episodes of a stored group, and the learner extracts them.

Difference from the papers: both recompute the stored log-probs with the current policy, which makes every ratio 1; here
the ratio is taken to the log-probs stored with the tokens.

Sources: Lu et al. 2025 (ARPO), arXiv 2505.16282 section 3.3; Zhang et al. 2025 (RLEP), arXiv 2507.07451.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rllib_srl.types import Group, GroupMeta, with_marks

DEAD_STD, DEAD_MEAN = 0.05, 0.2  # ARPO: a group has failed if std and mean of its rewards are below these


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
        extra=with_marks(
            group.extra, [group.starts(g) for g in episodes], [group.wrong_turns(g) for g in episodes]
        ),
    )


def part_meta(meta: GroupMeta, episodes: Sequence[int], origin: str | None = None) -> GroupMeta:
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
        origin=origin or meta.origin,
        ref=PartRef(whole.ref, tuple(whole.episodes[g] for g in episodes)),
    )


def rewarded_part(meta: GroupMeta) -> GroupMeta | None:
    """Return the episodes of a group that have a reward (`Group.has_reward_G`); None if there are none."""
    if meta.has_reward_G is None or meta.has_reward_G.all():
        return meta
    episodes = np.flatnonzero(meta.has_reward_G)
    return part_meta(meta, episodes.tolist()) if len(episodes) else None


@dataclass(frozen=True)
class Rescue:
    """A composed group: the played episodes that stay and the stored ones that join; both share one baseline.

    Invariant: `meta` describes the stored episodes that join, and its origin is "rescue".
    """

    stays: tuple[int, ...]
    meta: GroupMeta


def is_dead(rewards_G: np.ndarray) -> bool:
    """Return whether the group has failed by ARPO's criterion: std and mean of its rewards are low."""
    return bool(rewards_G.std() < DEAD_STD and rewards_G.mean() < DEAD_MEAN)


def rescues(
    groups: Sequence[GroupMeta],
    stored: Mapping[str, GroupMeta],
    rule: str,
    num_episodes: int,
    pass_reward: float,
    generator: np.random.Generator,
) -> dict[int, Rescue]:
    """Choose the stored successes that join played groups; groups without a stored success are left out.

    Args:
        groups: played groups.
        stored: stored groups by prompt key.
        rule: "none", "arpo" or "rlep".
        num_episodes: maximum number of successes per group, for "rlep".
        pass_reward: reward from which a stored episode is a success, if its environment names none.
        generator: random generator that draws among the successes of a stored group.

    Returns:
        Composed groups by position in `groups`.
    """
    found: dict[int, Rescue] = {}
    for p, group in enumerate(groups):
        meta = stored.get(group.prompt.key)
        if rule == "none" or meta is None or (rule == "arpo" and not is_dead(group.rewards_G)):
            continue
        successes = np.flatnonzero(meta.is_success_G(pass_reward))
        num = min(len(successes), 1 if rule == "arpo" else num_episodes)
        if num:
            chosen = np.sort(generator.choice(successes, num, replace=False))
            first = 1 if rule == "arpo" else 0
            stays = tuple(range(first, len(group.rewards_G)))
            found[p] = Rescue(stays, part_meta(meta, chosen.tolist(), origin="rescue"))
    return found


def composed_rewards(rewards_PG: Sequence[np.ndarray], found: Mapping[int, Rescue]) -> list[np.ndarray]:
    """Return the rewards of each composed group: of the episodes that stay, then of those that join."""
    return [
        np.concatenate([rewards_G[list(found[p].stays)], found[p].meta.rewards_G]) if p in found else rewards_G
        for p, rewards_G in enumerate(rewards_PG)
    ]


def composed_advantages(
    rewards_PG: Sequence[np.ndarray], found: Mapping[int, Rescue], rule: Callable[[list[np.ndarray]], list[np.ndarray]]
) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
    """Return the advantages of the played episodes that stay, and of the rescued ones by position.

    Advantages are computed over each composed group.

    Args:
        rewards_PG: rewards of the played groups, all episodes.
        found: output of `rescues`.
        rule: function from rewards of groups to their advantages.
    """
    advantages = rule(composed_rewards(rewards_PG, found))
    joined = {p: advantages[p][len(found[p].stays) :] for p in found}
    return [a[: len(found[p].stays)] if p in found else a for p, a in enumerate(advantages)], joined


def positive_part(meta: GroupMeta, advantage_G: np.ndarray) -> tuple[GroupMeta, np.ndarray] | None:
    """Return the episodes of a stored group with positive advantage, and these advantages; None if there are none.

    Source: SPEAR, arXiv 2509.22601 (positivity filter, after recalibration).
    """
    episodes = np.flatnonzero(advantage_G > 0)
    if not len(episodes):
        return None
    if len(episodes) == len(advantage_G):
        return meta, advantage_G
    return part_meta(meta, episodes.tolist()), advantage_G[episodes]
