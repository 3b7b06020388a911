"""Store the steps of episodes in segments of bounded length, and read n-step windows that may cross their borders.

    episode   o0 a0 r0  o1 a1 r1  o2 a2 r2  o3 a3 r3  o4 ...        length 2
    segment         slot 0               slot 1          ...        each with the observation after its last step
    window(slot 0, offset 1, n = 2)  ->  o1, a1, r1 + gamma r2, o3

A segment is the unit that is stored, drawn and evicted. A window that needs steps of an evicted segment cannot be
drawn; `reach` says how many steps are stored without a gap from a segment's first step on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


@dataclass
class Segment:
    """Consecutive steps of one episode. Invariant: one observation (and info) more than steps."""

    episode_id: str
    start: int  # its first step in the episode
    observations: list[Any]
    infos: list[Any]
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    extras: dict[str, list[Any]] = field(default_factory=dict)  # model outputs by name, one a step
    is_terminated: bool = False  # after the last step
    is_truncated: bool = False

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.actions)

    @property
    def is_done(self) -> bool:
        """Return whether the episode ends with the last step."""
        return self.is_terminated or self.is_truncated


class Step(NamedTuple):
    """One step and what followed it."""

    action: Any
    reward: float
    observation: Any  # after the step
    info: Any
    extras: Mapping[str, Any]
    is_terminated: bool
    is_truncated: bool


class Window(NamedTuple):
    """An n-step transition."""

    step: int  # of the episode
    observations: tuple[Any, Any]  # before the first step, after the last
    infos: tuple[Any, Any]
    action: Any  # of the first step
    rewards: list[float]
    extras: dict[str, Any]  # of the first step
    is_terminated: bool
    is_truncated: bool


def discounted_sum(rewards: Sequence[float], gamma: float) -> float:
    """Return r_1 + gamma r_2 + gamma^2 r_3 + ..., summed from the last reward as RLlib does."""
    total = 0.0
    for reward in reversed(rewards):
        total = reward + gamma * total
    return total


class Segments:
    """The stored segments by slot.

    Invariant: `length_S` is the number of steps of each slot, 0 where it is free; `next_S` is the slot of the segment
    that continues it without a gap, -1 where none is stored.
    """

    def __init__(self, segment_length: int) -> None:
        """Store nothing yet; a segment has at most `segment_length` steps."""
        self.segment_length = segment_length
        self.at: dict[int, Segment] = {}
        self.length_S = np.zeros(64, np.int64)
        self.next_S = np.full(64, -1, np.int64)
        self._previous: dict[int, int] = {}

    @property
    def num_steps(self) -> int:
        """Return the number of stored steps."""
        return int(self.length_S.sum())

    def open(self, slot: int, segment: Segment, previous: int | None = None) -> None:
        """Store a segment without steps, as the continuation of `previous`."""
        if slot >= len(self.length_S):
            more = max(slot + 1, 2 * len(self.length_S)) - len(self.length_S)
            self.length_S = np.pad(self.length_S, (0, more))
            self.next_S = np.pad(self.next_S, (0, more), constant_values=-1)
        self.at[slot] = segment
        self.length_S[slot], self.next_S[slot] = len(segment), -1
        if previous is not None:
            self.next_S[previous], self._previous[slot] = slot, previous

    def append(self, slot: int, step: Step) -> None:
        """Add a step to a segment."""
        segment = self.at[slot]
        segment.actions.append(step.action)
        segment.rewards.append(step.reward)
        segment.observations.append(step.observation)
        segment.infos.append(step.info)
        for name, value in step.extras.items():
            segment.extras.setdefault(name, []).append(value)
        segment.is_terminated, segment.is_truncated = step.is_terminated, step.is_truncated
        self.length_S[slot] += 1

    def is_full(self, slot: int) -> bool:
        """Return whether a segment takes no further steps."""
        return len(self.at[slot]) >= self.segment_length

    def remove(self, slot: int) -> Segment:
        """Remove a segment and return it."""
        after = int(self.next_S[slot])
        if after >= 0:
            del self._previous[after]
        if (before := self._previous.pop(slot, None)) is not None:
            self.next_S[before] = -1
        self.length_S[slot], self.next_S[slot] = 0, -1
        return self.at.pop(slot)

    def reach(self, num: int) -> np.ndarray:
        """Return for each slot the steps stored without a gap from its first one on, exact up to length + num."""
        reach_S, next_S = self.length_S.copy(), self.next_S
        added = 0
        while added < num and (next_S >= 0).any():
            # A segment that is continued is full, except the last one of the chain.
            reach_S += np.where(next_S >= 0, self.length_S[next_S], 0)
            next_S = np.where(next_S >= 0, self.next_S[next_S], -1)
            added += self.segment_length
        return reach_S

    def window(self, slot: int, offset: int, num: int) -> Window:
        """Return the transition over `num` steps from step `offset` of a segment; the steps must be stored."""
        first = last = self.at[slot]
        end, rewards = offset + num, first.rewards[offset : offset + num]
        while end > len(last):
            end -= len(last)
            slot = int(self.next_S[slot])
            last = self.at[slot]
            rewards = rewards + last.rewards[:end]
        is_last = end == len(last)
        return Window(
            first.start + offset,
            (first.observations[offset], last.observations[end]),
            (first.infos[offset], last.infos[end]),
            first.actions[offset],
            rewards,
            {name: values[offset] for name, values in first.extras.items()},
            is_last and last.is_terminated,
            is_last and last.is_truncated,
        )

    def get_state(self) -> dict[str, Any]:
        """Return every segment by slot, and the slot that each one continues."""
        return {"at": {slot: dict(vars(one)) for slot, one in self.at.items()}, "previous": dict(self._previous)}

    @classmethod
    def from_state(cls, segment_length: int, state: Mapping[str, Any]) -> Segments:
        """Return the segments whose `get_state` this is; the lists of `state` are copied."""
        found = cls(segment_length)
        for slot, values in state["at"].items():
            copied: dict[str, Any] = {n: list(one) if isinstance(one, list) else one for n, one in values.items()}
            copied["extras"] = {name: list(one) for name, one in values["extras"].items()}
            found.open(slot, Segment(**copied))
        for slot, previous in state["previous"].items():
            found.next_S[previous], found._previous[slot] = slot, previous
        return found
