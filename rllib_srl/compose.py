"""Training groups composed of played and stored episodes: rescue of dead groups, and filters of what is reused.

    played group ─┬─ its own episodes                advantage over the whole composed group, ratio to prox_logp
                  └─ stored successes (a PartRef)    the same baseline, ratio to the stored behaviour_logp

    arpo    a group whose rewards are all low takes one success in place of its first episode
    rlep    every group takes up to `rescue_episodes` successes on top

Nothing stored is torn: a part is a reference to some episodes of a stored group, cut out where it is trained on.
Where this differs from the papers: both recompute the stored log-probs with today's policy, which makes every ratio 1;
here the ratio is that to the log-probs stored with the tokens.

Sources: Lu et al. 2025 (ARPO), arXiv 2505.16282 section 3.3; Zhang et al. 2025 (RLEP), arXiv 2507.07451.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rllib_srl.types import Group, GroupMeta

DEAD_STD, DEAD_MEAN = 0.05, 0.2  # ARPO's group that failed: spread and mean of its rewards below these


@dataclass(frozen=True)
class PartRef:
    """Some episodes of the group behind `ref`. Invariant: `episodes` ascend and are not empty."""

    ref: Any  # as `GroupMeta.ref`
    episodes: tuple[int, ...]


def part_of(group: Group, episodes: Sequence[int]) -> Group:
    """Return a group of some episodes alone, under the same id."""
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
    )


def part_meta(meta: GroupMeta, episodes: Sequence[int], origin: str | None = None) -> GroupMeta:
    """Describe some episodes of a group, as `part_of` will cut them out."""
    at_G = np.array(episodes)
    return replace(
        meta,
        rewards_G=meta.rewards_G[at_G],
        lengths_G=meta.lengths_G[at_G],
        num_loss_tokens_G=meta.num_loss_tokens_G[at_G],
        versions_G2=meta.versions_G2[at_G],
        stop_reasons=tuple(meta.stop_reasons[g] for g in episodes),
        num_turns_G=meta.num_turns_G[at_G] if len(meta.num_turns_G) else meta.num_turns_G,
        origin=origin or meta.origin,
        ref=PartRef(meta.ref, tuple(int(g) for g in episodes)),
    )


@dataclass(frozen=True)
class Rescue:
    """One composed group: which played episodes stay, and the stored ones that join. Advantages are of both together.

    Invariant: `meta` has `len(joined)` episodes, and its origin is "rescue".
    """

    stays: tuple[int, ...]
    meta: GroupMeta


def is_dead(rewards_G: np.ndarray) -> bool:
    """Say whether all episodes failed, as ARPO measures it."""
    return bool(rewards_G.std() < DEAD_STD and rewards_G.mean() < DEAD_MEAN)


def rescues(
    groups: Sequence[GroupMeta],
    stored: Mapping[str, GroupMeta],
    rule: str,
    num_episodes: int,
    pass_reward: float,
    generator: np.random.Generator,
) -> dict[int, Rescue]:
    """Choose the stored successes that join played groups; a group of which none is stored stays as it is.

    Args:
        groups: that were played.
        stored: a stored group of some prompts, by prompt key.
        rule: "none", "arpo" or "rlep".
        num_episodes: rlep: successes of a group, at most.
        pass_reward: reward from which a stored episode is a success.
        generator: draws among the successes of a stored group.

    Returns:
        By position in `groups`.
    """
    found: dict[int, Rescue] = {}
    for p, group in enumerate(groups):
        meta = stored.get(group.prompt.key)
        if rule == "none" or meta is None or (rule == "arpo" and not is_dead(group.rewards_G)):
            continue
        successes = np.flatnonzero(meta.rewards_G >= pass_reward)
        num = min(len(successes), 1 if rule == "arpo" else num_episodes)
        if num:
            chosen = np.sort(generator.choice(successes, num, replace=False))
            first = 1 if rule == "arpo" else 0
            stays = tuple(range(first, len(group.rewards_G)))
            found[p] = Rescue(stays, part_meta(meta, chosen.tolist(), origin="rescue"))
    return found


def composed_advantages(
    rewards_PG: Sequence[np.ndarray], found: Mapping[int, Rescue], rule: Callable[[list[np.ndarray]], list[np.ndarray]]
) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
    """Return the advantages of played episodes that stay, and those of rescued ones, over each composed group.

    Args:
        rewards_PG: of the played groups, whole.
        found: as of `rescues`.
        rule: rewards of groups -> their advantages.
    """
    composed = [
        np.concatenate([rewards_G[list(found[p].stays)], found[p].meta.rewards_G]) if p in found else rewards_G
        for p, rewards_G in enumerate(rewards_PG)
    ]
    advantages = rule(composed)
    joined = {p: advantages[p][len(found[p].stays) :] for p in found}
    return [a[: len(found[p].stays)] if p in found else a for p, a in enumerate(advantages)], joined


def positive_part(meta: GroupMeta, advantage_G: np.ndarray) -> tuple[GroupMeta, np.ndarray] | None:
    """Return the episodes of a stored group whose advantage is above 0, and these; None if there is none.

    Source: SPEAR, arXiv 2509.22601 (positivity filter, after recalibration).
    """
    episodes = np.flatnonzero(advantage_G > 0)
    if not len(episodes):
        return None
    if len(episodes) == len(advantage_G):
        return meta, advantage_G
    return part_meta(meta, episodes.tolist()), advantage_G[episodes]
