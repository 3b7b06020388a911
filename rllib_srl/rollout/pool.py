"""Idle environment instances, between one episode and the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rllib_srl.rollout.replies import Constructed


class EnvPool:
    """Instances that healthy episodes gave back, kept because constructing one may be expensive.

    Invariant: an instance is either in here or held by exactly one episode; the idle ones of an id
    have one creator.
    """

    def __init__(self, discard: Callable[[Constructed], None]) -> None:
        self._discard = discard
        self._idle: dict[str, list[Constructed]] = {}

    def take(self, env_id: str, creator: Callable[[], Any]) -> Constructed | None:
        """Return an idle instance that `creator` made, which the caller then owns, or None."""
        self._drop_others(env_id, creator)
        idle = self._idle.get(env_id)
        return idle.pop() if idle else None

    def put(self, env_id: str, instance: Constructed) -> None:
        """Give an instance back that no thread is inside of and that has not failed."""
        self._drop_others(env_id, instance.creator)
        self._idle.setdefault(env_id, []).append(instance)

    def _drop_others(self, env_id: str, creator: Callable[[], Any]) -> None:
        """Discard what another creator made under this id: the environment is configured differently now."""
        idle = self._idle.get(env_id)
        if idle and idle[0].creator != creator:
            for instance in self._idle.pop(env_id):
                self._discard(instance)

    def drain(self) -> list[Constructed]:
        """Take all idle instances out."""
        instances = [instance for idle in self._idle.values() for instance in idle]
        self._idle.clear()
        return instances

    @property
    def num_idle(self) -> int:
        """Return how many instances wait for an episode."""
        return sum(len(idle) for idle in self._idle.values())
