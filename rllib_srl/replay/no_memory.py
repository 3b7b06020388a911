"""Null object in place of the memory client, for runs without replay."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_srl.replay.history import Policy
from rllib_srl.replay.rated import RatedGroup, RatedUntil
from rllib_srl.replay.visits import Visit
from rllib_srl.types import GroupMeta, Prompt


class NoMemory:
    """Null replacement of `client.ReplayClient`. Invariant: it draws nothing and stores nothing."""

    is_on = False

    def draw_prompts(self, num_prompts: int, now: int, in_play: Collection[str] = ()) -> list[Prompt]:
        """Return nothing."""
        return []

    def add(self, groups: Sequence[GroupMeta], now: int, policy_kl: float = 0.0) -> dict[str, Visit]:
        """Store nothing."""
        return {}

    def draw_groups(self, num_played: int, now: int, policy: Policy | None = None) -> list[GroupMeta]:
        """Return nothing."""
        return []

    def set_fractions(self, revisit: float | None, reuse: float | None) -> None:
        """Do nothing; `validate` refuses adaptive fractions without a memory."""

    def embed(self, vectors: Sequence[Any], groups: Sequence[GroupMeta], now: int) -> None:
        """Do nothing."""

    def look_back(self, reused: Sequence[GroupMeta], told: Mapping[str, Mapping[str, float]], now: int) -> None:
        """Do nothing."""

    def rate(self, ratings: Mapping[str, float], now: int) -> int:
        """Raise: there is nothing to grade.

        Raises:
            ValueError: always.
        """
        raise ValueError("this run has no memory to rate items of; expected replay_capacity above 0")

    def rate_answers(self, groups: Sequence[RatedGroup], source: str, position: int, now: int) -> dict[str, int]:
        """Apply nothing: no answer is stored."""
        return {}

    def rated_until(self, source: str) -> RatedUntil:
        """Return the beginning."""
        return RatedUntil(source)

    def stats(self, now: int) -> dict[str, float]:
        """Return nothing."""
        return {}

    def snapshot(self, directory: Path) -> None:
        """Write nothing."""

    def restore(self, directory: Path) -> int:
        """Restore nothing."""
        return 0

    def check_fits(self, has_memory: bool) -> None:
        """Check that a checkpoint has no memory.

        Raises:
            ValueError: it has one.
        """
        if has_memory:
            raise ValueError("the checkpoint has a memory, this run has none; expected replay_capacity above 0")

    def get_state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""
