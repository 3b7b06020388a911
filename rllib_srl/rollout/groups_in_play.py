"""The groups that a runner plays: episodes are collected until all of a group have ended.

    in_play.add(prompts, group_size, ...)           new groups
    in_play.to_the_end() -> [GroupInPlay, ...]      plays all
    in_play.advance(until) -> [GroupInPlay, ...]    plays a slice; returns the groups that have ended
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.rollout.episodes import MIN_EPISODES, LiveEpisode, to_group
from rllib_srl.rollout.player import Player
from rllib_srl.types import Group, Prompt


@dataclass
class GroupInPlay:
    """A prompt that is played, and the episodes of it that have ended."""

    group_id: str
    prompt: Prompt
    size: int  # episodes
    is_revisit: bool
    is_shown: bool  # is it in transcripts?
    min_episodes: int
    start: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # from the start to the end of the last episode
    episodes: list[SingleAgentEpisode] = field(default_factory=list)

    def collected(self, keeps_turns: bool = False) -> Group | None:
        """Return the group of the ended episodes, None if too few are valid; see `to_group`."""
        origin = "revisit" if self.is_revisit else "fresh"
        return to_group(self.prompt, self.group_id, self.episodes, origin, self.min_episodes, keeps_turns)

    def has_ended_with(self, episode: SingleAgentEpisode) -> bool:
        """Add an ended episode; return whether it was the last one."""
        self.episodes.append(episode)
        if len(self.episodes) < self.size:
            return False
        self.episodes.sort(key=lambda one: one.custom_data["index"])
        self.seconds = time.monotonic() - self.start
        return True


class GroupsInPlay:
    """Plays groups with one `Player`. Invariant: a group is here until `advance` has returned it."""

    def __init__(self, player: Player) -> None:
        """Play with `player`, which has no episodes yet."""
        self._player = player
        self._groups: dict[str, GroupInPlay] = {}

    def __len__(self) -> int:
        """Return the number of groups that have not ended."""
        return len(self._groups)

    @property
    def prompts(self) -> dict[str, Prompt]:
        """Return the prompts by group id."""
        return {group_id: group.prompt for group_id, group in self._groups.items()}

    def add(
        self,
        prompts: Mapping[str, Prompt],
        group_size: int,
        *,
        deadline_s: float,
        revisits: Collection[str] = (),
        shown: Collection[str] = (),
        min_episodes: int = MIN_EPISODES,
    ) -> None:
        """Add new groups; `shown` has the ids of those to return as text. See `PlayArguments` and `Player.add`."""
        episodes = [LiveEpisode(prompt, id_, index) for id_, prompt in prompts.items() for index in range(group_size)]
        self._player.add(episodes, deadline_s)
        for group_id, prompt in prompts.items():
            marks = group_id in revisits, group_id in shown
            self._groups[group_id] = GroupInPlay(group_id, prompt, group_size, *marks, min_episodes)

    def to_the_end(self) -> list[GroupInPlay]:
        """Play until no group is left, and return all in the order in which they ended; always call `close`."""
        try:
            return self.advance(math.inf)
        finally:
            self.close()

    def advance(self, until: float, enough: int = 0) -> list[GroupInPlay]:
        """Play until the monotonic clock shows `until`, no group is left, or `enough` groups have ended (0: any).

        Return the groups that have ended, in this order. Call `close` after an exception.
        """
        ended: list[GroupInPlay] = []
        for episode in self._player.advance(until):
            group = self._groups[episode.custom_data["group_id"]]
            if group.has_ended_with(episode):
                ended.append(self._groups.pop(group.group_id))
                if len(ended) == enough:
                    break
        return ended

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds in the engine and of waiting for environments since the last call."""
        seconds = dict(self._player.seconds)
        self._player.seconds.update(dict.fromkeys(seconds, 0.0))
        return seconds

    def close(self) -> None:
        """Drop all groups and free their requests and environments."""
        self._groups.clear()
        self._player.close()
