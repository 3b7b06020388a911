"""Keep account of the episodes in the buffer: which are open, where their newest segment lies, and their returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class _Account:
    newest: int | None = None  # slot of the segment that takes the next step; None: it was evicted
    next_step: int = 0
    num_segments: int = 0
    total: float = 0.0  # sum of rewards
    is_done: bool = False


class EpisodeLedger:
    """Episodes by id. Invariant: every episode here has at least one stored segment."""

    def __init__(self) -> None:
        """Start without episodes."""
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self._accounts)

    def __contains__(self, episode_id: object) -> bool:
        """Return whether a segment of the episode is stored."""
        return episode_id in self._accounts

    def check(self, episode_id: str, start: int) -> None:
        """Check that a chunk beginning at step `start` continues the stored part of its episode.

        Raises:
            ValueError: the episode is finished, or steps are missing or repeated.
        """
        account = self._accounts.get(episode_id)
        if account is None:
            return
        if account.is_done:
            raise ValueError(f"episode {episode_id} is finished and stored; expected each episode once")
        if start != account.next_step:
            raise ValueError(
                f"a chunk of episode {episode_id} starts at step {start}; expected {account.next_step}, the next one"
            )

    def slot_of(self, episode_id: str) -> int | None:
        """Return the slot of an episode's newest segment, None if there is none."""
        account = self._accounts.get(episode_id)
        return account.newest if account else None

    def open(self, episode_id: str, slot: int, start: int) -> None:
        """Note a new segment of an episode, which begins at step `start`."""
        account = self._accounts.setdefault(episode_id, _Account(next_step=start))
        account.newest = slot
        account.num_segments += 1

    def step(self, episode_id: str, reward: float) -> None:
        """Note a step of an episode."""
        account = self._accounts[episode_id]
        account.next_step += 1
        account.total += reward

    def finish(self, episode_id: str) -> float:
        """Note the end of an episode, and return the sum of its rewards."""
        account = self._accounts[episode_id]
        account.is_done, account.newest = True, None
        return account.total

    def return_of(self, episode_id: str) -> float:
        """Return the sum of an episode's rewards, nan while it runs."""
        account = self._accounts[episode_id]
        return account.total if account.is_done else float("nan")

    def remove(self, episode_id: str, slot: int) -> bool:
        """Note the eviction of a segment; return whether it was the last one of its episode."""
        account = self._accounts[episode_id]
        account.num_segments -= 1
        if account.newest == slot:
            account.newest = None
        if account.num_segments:
            return False
        del self._accounts[episode_id]
        return True

    def get_state(self) -> dict[str, Any]:
        """Return all accounts by id."""
        return {one: dict(vars(account)) for one, account in self._accounts.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Mapping[str, Any]]) -> EpisodeLedger:
        """Return the ledger whose `get_state` this is."""
        found = cls()
        found._accounts = {one: _Account(**values) for one, values in state.items()}
        return found
