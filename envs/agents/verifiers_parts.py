"""What the two kinds of `verifiers` environments have in common: the outcome of a rollout, and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rllib_srl.envs.agents.tasks import Tasks


@dataclass(frozen=True)
class Played:
    """A scored rollout. Invariant: `metrics` has each function of the rubric by name."""

    reward: Any
    metrics: Mapping[str, float]


class RolloutError(RuntimeError):
    """A rollout failed for another reason than what the policy wrote."""


class Loaded(Protocol):
    """A loaded environment."""

    tasks: Tasks

    async def play(self, task: dict[str, Any], url: str, token: str) -> Played:
        """Roll out one task, and score it."""
