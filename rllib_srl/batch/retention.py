"""Split the answers that an update holds over the learners. Handles no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rllib_srl.batch.layout import balanced_shards
from rllib_srl.types import GroupMeta


@dataclass(frozen=True)
class RetentionPart:
    """One learner's part. Invariant: `scales`, `num_held_tokens` and `compared` are those of the whole batch."""

    held: tuple[Any, ...]  # `GroupMeta.ref` of each held answer, a group of one episode
    scales: tuple[float, ...]  # factor of the loss at each of its tokens
    num_held_tokens: int
    compared: tuple[str, ...]  # domains whose gradients are compared (`learner.retention.Conflict`)


def split(
    held: Sequence[GroupMeta], scales: Sequence[float], compared: tuple[str, ...], num_shards: int
) -> list[RetentionPart]:
    """Return the part of each learner.

    Args:
        held: drawn answers.
        scales: factor of each; see `losses.retention.scales`.
        compared: see `RetentionPart`.
        num_shards: number of parts.
    """
    num_tokens = int(sum(group.num_loss_tokens_G.sum() for group in held))
    return [
        RetentionPart(tuple(held[i].ref for i in part), tuple(scales[i] for i in part), num_tokens, compared)
        for part in balanced_shards([int(group.lengths_G.sum()) for group in held], num_shards)
    ]
