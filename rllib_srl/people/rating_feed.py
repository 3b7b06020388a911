"""Feed the ratings of a run's directory into its memory, between two iterations.

    RUN/ratings.db ──changes since the position──> RatedGroup ──memory.rate_answers──> rewards, grades
                          position, unused <── the memory's own state, so a restored run applies again what it lost

Without news a call costs one stat and one indexed query. A group is fed with all of its ratings, so a repetition
changes nothing. Ratings of answers that were not found are fed again once their group is played again (a resumed run).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rllib_srl.people.rating import Rating
from rllib_srl.people.rating_store import RatingStore
from rllib_srl.replay.client import ReplayClient
from rllib_srl.replay.ratings import RatedAnswer, RatedGroup


class RatingFeed:
    """The ratings that a run has not applied yet.

    Invariant: every change of the file up to `_position` was fed to the memory; None: ask the memory.
    """

    def __init__(self, path: Path) -> None:
        """Use the file at `path`, which need not exist."""
        self._path = path
        self._store: RatingStore | None = None
        self._position: int | None = None
        self._again: set[str] = set()  # ids of groups to feed again
        self._known: set[str] = set()  # ids of groups with ratings

    def check(self) -> None:
        """Open the file if it exists; RatingsError: it is damaged, or of another version."""
        self._opened()

    def restart(self) -> None:
        """Ask the memory at the next call which ratings it has: it was restored."""
        self._position = None

    def note_played(self, group_ids: Iterable[str]) -> None:
        """Note groups that were stored; those with ratings are fed again."""
        self._again |= self._known.intersection(group_ids) if self._known else set()

    def apply(self, memory: ReplayClient, now: int) -> dict[str, int]:
        """Apply new ratings; return counts, as `rate_answers`. RatingsError: a later call applies them."""
        store = self._opened()
        if store is None:
            return {}
        if self._position is None:
            self._position, unused = memory.rated_until(store.source_id)
            self._known = store.group_ids()
            self._again = set(unused) & self._known
        newest = store.newest_change()
        if newest <= self._position and not self._again:
            return {}
        changed = {rating.answer.group_id for rating in store.changed_since(self._position)}
        ratings = store.of_groups(sorted(changed | self._again))
        # A change that came after the first query belongs to the next call; feeding its whole group now does no harm.
        counts = memory.rate_answers(as_groups(ratings), store.source_id, newest, now)
        self._position, self._again = newest, set()
        self._known |= changed
        return counts

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _opened(self) -> RatingStore | None:
        if self._store is None and self._path.exists():
            self._store = RatingStore(self._path)
        return self._store


def as_groups(ratings: Iterable[Rating]) -> list[RatedGroup]:
    """Return ratings by group, in the order in which groups first appear."""
    by_group: dict[tuple[str, str], list[Rating]] = {}
    for rating in ratings:
        by_group.setdefault((rating.answer.group_id, rating.answer.key), []).append(rating)
    return [
        RatedGroup(
            group_id,
            key,
            tuple(
                RatedAnswer(
                    rating.answer.episode, rating.answer.fingerprint, rating.reward, rating.is_binary, rating.quality
                )
                for rating in listed
            ),
            min((mark for rating in listed if (mark := rating.pass_reward) is not None), default=None),
        )
        for (group_id, key), listed in by_group.items()
    ]
