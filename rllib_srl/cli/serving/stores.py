"""The three stores of a served model, in one thread, and what follows from them: free ratings and stale versions.

    await stores.run(stores.free_ratings)        answer id -> value: can be trained on, and were not yet
    await stores.run(stores.stale_versions)      version -> number of its ratings that have changed since

Other processes may write meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
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
    """What follows from the three stores. Invariant: after `_read` it is that of their newest changes.

    It belongs to the thread of the stores. Without a change two numbers are read; after one, everything: of 10,000
    ratings in some 20 ms. A conversation is logged before it is rated, and is trainable or not for good.
    """

    def __init__(self, conversations: ConversationStore, ratings: RatingStore, lineage: Lineage) -> None:
        """Read nothing yet."""
        self._conversations, self._ratings, self._lineage = conversations, ratings, lineage
        self._changes = (-1, -1)  # newest one of the versions, and of the ratings, that was read
        self._trainable: dict[str, bool] = {}  # answer id -> its conversation is
        self._today: dict[str, str] = {}  # answer id -> value, in the order of the changes, as the next
        self._free: dict[str, str] = {}
        self._stale: Counter[int] = Counter()  # version -> number of its ratings that have changed

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
        return dict(sorted(self._stale.items()))

    def _read(self) -> None:
        changes = (self._lineage.newest_change(), self._ratings.newest_change())
        if changes == self._changes:
            return
        rows, used_up = self._ratings.values(), self._lineage.used_up()
        for name, group_id, _ in rows:
            if name not in self._trainable:
                self._trainable[name] = not self._conversations.is_untrainable(group_id)
        today = self._today = {name: value for name, _, value in rows}
        self._free = {
            name: value
            for name, value in today.items()
            if value != TAKEN_BACK and self._trainable[name] and (name, value) not in used_up
        }
        uses = self._lineage.all_uses()
        self._stale = Counter(number for number, name, used in uses if today.get(name, used) != used)
        self._changes = changes
