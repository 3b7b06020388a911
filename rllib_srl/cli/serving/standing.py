"""Keep the standing of ratings: the newest value of each answer, which ratings are free, which versions are stale.

    standing.free()     answer id -> value: can be trained on, and were not yet
    standing.stale()    version -> number of its ratings that have changed since

A call reads what has changed since the last one: the changed ratings, and all that the versions have used if a version
has changed its state, which is seldom. Without a change it reads two numbers. Other processes may write meanwhile.
A conversation is logged before it is rated, and is trainable or not for good.
"""

from __future__ import annotations

from rllib_srl.people.lineage.conversations import ConversationStore
from rllib_srl.people.lineage.versions import Lineage
from rllib_srl.people.rating import TAKEN_BACK
from rllib_srl.people.rating_store import RatingStore


class Standing:
    """What follows from the three stores. Invariant: after `_read` it is as if all of them had been read anew.

    It belongs to the thread of the stores.
    """

    def __init__(self, conversations: ConversationStore, ratings: RatingStore, lineage: Lineage) -> None:
        """Read nothing yet."""
        self._conversations, self._ratings, self._lineage = conversations, ratings, lineage
        self._seq, self._change = 0, -1  # newest change of the ratings and of the versions that was read
        self._today: dict[str, str] = {}  # answer id -> value, in the order of the changes, as the two below
        self._trainable: dict[str, bool] = {}
        self._free: dict[str, str] = {}
        self._used_up: set[tuple[str, str]] = set()
        self._uses: dict[str, list[tuple[int, str]]] = {}  # answer id -> (version, value used)
        self._stale: dict[int, set[str]] = {}  # version -> ids of the answers whose ratings have changed

    def today(self) -> dict[str, str]:
        """Return the newest rating of every answer that was ever rated: answer id -> value."""
        self._read()
        return dict(self._today)

    def free(self) -> dict[str, str]:
        """Return the ratings that can be trained on and were not yet: answer id -> value."""
        self._read()
        return dict(self._free)

    def stale(self) -> dict[int, int]:
        """Return how many ratings of each version have changed since; versions without such are left out."""
        self._read()
        return {number: len(names) for number, names in sorted(self._stale.items()) if names}

    def _read(self) -> None:
        change = self._lineage.newest_change()
        if change != self._change:
            self._used_up, self._uses = self._lineage.used_up(), {}
            for number, name, value in self._lineage.all_uses():
                self._uses.setdefault(name, []).append((number, value))
            self._free, self._stale, self._change = {}, {}, change
            for name, value in self._today.items():
                self._enter(name, value)
        for name, group_id, value, seq in self._ratings.values_since(self._seq):
            self._trainable[name] = not self._conversations.is_untrainable(group_id)
            for known in (self._today, self._free):
                known.pop(name, None)  # it comes last now
            self._today[name] = value
            self._enter(name, value)
            self._seq = seq

    def _enter(self, name: str, value: str) -> None:
        """Enter the newest value of an answer into what follows from it."""
        if value != TAKEN_BACK and self._trainable[name] and (name, value) not in self._used_up:
            self._free[name] = value
        for number, used in self._uses.get(name, ()):
            names = self._stale.setdefault(number, set())
            names.discard(name) if used == value else names.add(name)
