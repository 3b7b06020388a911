"""The three stores of a served model, in one thread, and what follows from them: free ratings and stale versions.

    await stores.run(stores.free_ratings)        answer id -> value: can be trained on, and were not yet
    await stores.run(stores.stale_versions)      version -> number of its ratings that have changed since

A call reads what has changed since the last one: the changed ratings, and all that the versions have used if a version
has changed its state, which is seldom. Without a change it reads two numbers. Other processes may write meanwhile.
A conversation is logged before it is rated, and is trainable or not for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rllib_srl.cli.serving.figures import stored_figures
from rllib_srl.cli.serving.served_directory import ServedDirectory
from rllib_srl.people.lineage.conversations import CONVERSATIONS, ConversationStore
from rllib_srl.people.lineage.versions import VERSIONS, Lineage
from rllib_srl.people.rating import TAKEN_BACK
from rllib_srl.people.rating_store import RATINGS, RatingStore

Result = TypeVar("Result")


class Stores:
    """The three stores of a served model, used from one thread, so that the event loop never waits for a disk."""

    def __init__(self, served: ServedDirectory, scheme: str = "") -> None:
        """Open the stores.

        Args:
            served: the directory.
            scheme: of the ratings; "" for that of the ratings so far.

        Raises:
            ValueError: there are ratings of another scheme.
            RuntimeError: one of them is damaged.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stores")
        self._served, self._scheme = served, scheme
        try:
            self._thread.submit(self._open).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def _open(self) -> None:
        directory = self._served.path
        self.conversations = ConversationStore(directory / CONVERSATIONS)
        self.ratings = RatingStore(directory / RATINGS, self._scheme)
        self.lineage = Lineage(directory / VERSIONS)
        self._state = RatingState(self.conversations, self.ratings, self.lineage)

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function in the thread of the stores."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def now(self, function: Callable[[], Result]) -> Result:
        """Run a function in the thread of the stores and wait, outside of an event loop."""
        return self._thread.submit(function).result()

    def close(self) -> None:
        """Close the stores, after what is under way."""
        for store in (self.conversations, self.ratings, self.lineage):
            self._thread.submit(store.close).result()
        self._thread.shutdown()

    # --- what needs more than one of them; call with `run` -----------------------------------------

    def free_ratings(self) -> dict[str, str]:
        """Return the ratings that can be trained on and were not yet: answer id -> value."""
        return self._state.free()

    def ratings_today(self) -> dict[str, str]:
        """Return the newest rating of every answer that was ever rated: answer id -> value."""
        return self._state.today()

    def figures(self) -> dict[str, Any]:
        """Return what they say of ratings and versions."""
        return stored_figures(self.ratings, self.lineage)

    def stale_versions(self) -> dict[int, int]:
        """Return how many ratings of each version have changed since; versions without such are left out."""
        return self._state.stale()


class RatingState:
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
