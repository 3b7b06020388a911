"""Plan retention in an update: the answers to hold, and the answers whose targets are taken. Handles no tokens.

    held      stored right answers, drawn from the memory: their KL joins the loss
    taken     right answers that this update trains on: their first pass gives targets
    scored    right answers of groups without spread, which are not trained on: a pass without gradient

Targets are taken from groups played by the present weights or, with `max_lag`, by weights of at most that many updates
ago. The held policy is then (almost) the one that gave the answer. Each group gives at most `PER_GROUP` answers:
many prompts represent a skill better than many answers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from rllib_srl.batch.layout import balanced_shards
from rllib_srl.batch.parts import PartRef, part_meta
from rllib_srl.types import GroupMeta

PER_GROUP = 2  # maximum answers of a group whose targets are taken
MOST_SCORED = 16  # maximum answers of an update that are scored without gradient


@dataclass(frozen=True)
class RetentionPart:
    """One learner's part. Invariant: `scales`, `num_held_tokens` and `compared` are those of the whole batch."""

    held: tuple[Any, ...]  # `GroupMeta.ref` of each held answer, a group of one episode with its target
    scales: tuple[float, ...]  # factor of the KL at each of its tokens
    scored: tuple[PartRef, ...]
    taken: frozenset[tuple[str, int]]  # group id and episode, of the stored group
    num_held_tokens: int
    compared: tuple[str, ...] = ()  # domains whose gradients are compared (`learner.retention.Conflict`)


def episodes_in(ref: Any, size: int) -> Sequence[int]:
    """Return the numbers that the `size` episodes behind a reference have in the stored group."""
    return ref.episodes if isinstance(ref, PartRef) else range(size)


def right_answers(group: GroupMeta, pass_reward: float, oldest: int, without: Collection[int] = ()) -> list[int]:
    """Return the episodes of a group, or a part of one, whose targets are taken, at most `PER_GROUP`.

    Args:
        group: a played group.
        pass_reward: lowest reward of a right answer, unless the environment defines one.
        oldest: version of weights whose answers are taken; those of earlier versions are left out.
        without: numbers of episodes in the stored group that are not stored.
    """
    is_taken_G = group.is_success_G(pass_reward) & (group.versions_G2 >= oldest).all(1) & (group.num_loss_tokens_G > 0)
    if group.has_reward_G is not None:
        is_taken_G &= group.has_reward_G
    numbers = episodes_in(group.ref, len(is_taken_G))
    return [int(g) for g in np.flatnonzero(is_taken_G) if numbers[g] not in without][:PER_GROUP]


def plan(
    held: Sequence[GroupMeta],
    scales: Sequence[float],
    played: Sequence[tuple[GroupMeta, Collection[int]]],
    trained: Sequence[GroupMeta],
    num_shards: int,
    pass_reward: float,
    oldest: int,
) -> list[RetentionPart]:
    """Return the part of each learner.

    Args:
        held: drawn answers.
        scales: factor of each held answer; see `losses.retention.scales`.
        played: groups of this iteration that are stored, each with the episodes of it that are not.
        trained: groups, or parts of them, with a gradient in this update.
        num_shards: number of parts.
        pass_reward: as in `right_answers`.
        oldest: as in `right_answers`.
    """
    left_out = {group.group_id: without for group, without in played}
    taken = {
        (group.group_id, episodes_in(group.ref, len(group.rewards_G))[g])
        for group in trained
        if group.group_id in left_out and group.origin != "reuse"
        for g in right_answers(group, pass_reward, oldest, left_out[group.group_id])
    }
    are_trained = {group.group_id for group in trained}
    rows = [
        [part_meta(group, [g]) for g in right_answers(group, pass_reward, oldest, without)]
        for group, without in played
        if group.group_id not in are_trained
    ]
    # Take one answer of each group before a second one of any.
    scored = [answer for turn in zip_longest(*rows) for answer in turn if answer is not None][:MOST_SCORED]
    held_parts, scored_parts = (
        balanced_shards([int(meta.lengths_G.sum()) for meta in metas], num_shards) for metas in (held, scored)
    )
    num_tokens = int(sum(group.num_loss_tokens_G.sum() for group in held))
    return [
        RetentionPart(
            tuple(held[i].ref for i in held_part),
            tuple(scales[i] for i in held_part),
            tuple(scored[i].ref for i in scored_part),
            frozenset(taken),
            num_tokens,
        )
        for held_part, scored_part in zip(held_parts, scored_parts, strict=True)
    ]
