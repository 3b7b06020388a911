"""What the page of a served model is made from: the stores of its directory, and what its server says of itself.

    files     versions, ratings, conversations       read and rated whether a server runs or not
    server    paused, slices, ratings waiting        GET /v1/status with DIR/token, while one runs

No file is created here: a directory that was never served has nothing to show.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rllib_srl.cli.serving.gateway import MAX_NAME, rating_of
from rllib_srl.cli.serving.served_directory import DirectoryError, NoServer, ServedDirectory, ask
from rllib_srl.cli.serving.stores import Stores
from rllib_srl.cli.serving.versions import listed, roll_back
from rllib_srl.people.lineage.conversations import CONVERSATIONS, Conversation, Hits
from rllib_srl.people.lineage.versions import VERSIONS, Version
from rllib_srl.people.rating import TAKEN_BACK, VALUES, Rating
from rllib_srl.people.rating_store import RATINGS

T = TypeVar("T")
PAUSE_S = 1.0  # shortest time between two questions to the server
STATUS_TIMEOUT_S = 5.0
ACTION_TIMEOUT_S = 60.0
SEARCH_S = 1.0
NO_SERVER = "no server runs in the directory"


class ServedModel:
    """One served model. Invariant: used by one thread, but for `roll_back` and `pause`."""

    def __init__(self, directory: Path, rater: str = "") -> None:
        """Prepare; nothing is opened before the first use.

        Raises:
            ValueError: the name of the rater is too long.
        """
        if len(rater) > MAX_NAME:
            raise ValueError(f"--rater has {len(rater)} characters; expected at most {MAX_NAME}")
        self.served, self._rater = ServedDirectory(directory), rater
        self._stores: Stores | None = None
        self._asked_at = -PAUSE_S
        self.status: Mapping[str, Any] = {}  # of the server; {} if none answers
        self.why_no_status = NO_SERVER

    # --- reading ---------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Ask the server how it is, unless that was done a moment ago."""
        if time.monotonic() - self._asked_at < PAUSE_S:
            return
        self.status, self.why_no_status = {}, ""
        try:
            self.status = ask(self.served, "/status", STATUS_TIMEOUT_S)
        except NoServer:
            self.why_no_status = NO_SERVER
        except DirectoryError as error:
            self.why_no_status = str(error)
        self._asked_at = time.monotonic()

    def change(self) -> str:
        """Return a text that changes whenever a version or a rating does."""
        return self._read(lambda its: f"{its.lineage.newest_change()}.{its.ratings.newest_change()}", "0.0")

    def said(self) -> str:
        """Return a text that changes whenever the server's state does."""
        return json.dumps(self.status, sort_keys=True) + self.why_no_status

    def active(self) -> Version | None:
        """Return the active version; None: the model that was given."""
        return self._read(lambda its: its.lineage.active(), None)

    def in_training(self) -> Version | None:
        """Return the version in training, which a server that starts goes on with."""
        return self._read(lambda its: its.lineage.in_training(), None)

    def versions(self) -> list[dict[str, Any]]:
        """Return all versions as `srl versions --json` does, the oldest first."""
        stores = self._opened()
        return [] if stores is None else listed(stores)

    def num_waiting(self) -> int:
        """Return the number of ratings that can be trained on and were not yet."""
        return self._read(lambda its: len(its.free_ratings()), 0)

    def num_conversations(self) -> int:
        """Return the number of conversations."""
        return self._read(lambda its: its.conversations.num(), 0)

    def values(self) -> tuple[str, ...]:
        """Return the values that a rating may have."""
        return self._read(lambda its: (*VALUES[its.ratings.scheme], TAKEN_BACK), (*VALUES[""], TAKEN_BACK))

    def search(self, text: str, before: int | None, most: int) -> tuple[Hits, list[tuple[Conversation, Rating | None]]]:
        """Return the newest conversations with a text, and each with its rating."""

        def look(its: Stores) -> tuple[Hits, list[tuple[Conversation, Rating | None]]]:
            hits = its.conversations.search(text, before, most, SEARCH_S)
            return hits, [(one, its.ratings.rating_of(one.as_answer())) for one in hits.conversations]

        nothing: tuple[Hits, list[tuple[Conversation, Rating | None]]] = (Hits([], None, False), [])
        return self._read(look, nothing)

    # --- changing --------------------------------------------------------------------------------

    def rate(self, conversation_id: str, value: str) -> bool:
        """Rate an answer as the gateway does; return whether there is such a conversation.

        Raises:
            ValueError: the value is unknown.
        """

        def rate(its: Stores) -> bool:
            given, rater = rating_of({"rating": value, "rater": self._rater}, its.ratings.scheme)
            found = its.conversations.find(conversation_id)
            if found is not None:
                its.ratings.rate(found.as_answer(), given, rater)
            return found is not None

        return self._read(rate, False)

    def roll_back(self, number: int, reason: str) -> str:
        """Roll a version back if it is the active one, as `srl versions --rollback` does; return what was done."""
        done = roll_back(self.served, reason, number, ACTION_TIMEOUT_S)
        self._asked_at = -PAUSE_S
        return f"{str(done).capitalize()}."

    def pause(self, is_paused: bool) -> str:
        """Pause or continue training; return what was done.

        Raises:
            DirectoryError: no server runs, or it does not answer.
        """
        try:
            found = ask(self.served, "/training", ACTION_TIMEOUT_S, {"paused": is_paused})
        except NoServer:
            word = "pause" if is_paused else "continue"
            raise DirectoryError(f"{NO_SERVER}, so there is no training to {word}; srl serve starts both") from None
        self._asked_at = -PAUSE_S
        return "Training is paused." if found["is_paused"] else "Training goes on."

    # --- stores ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the stores."""
        if self._stores is not None:
            self._stores.close()
            self._stores = None

    def _opened(self) -> Stores | None:
        """Return the stores, None before the first start of the server."""
        if self._stores is None:
            if not all((self.served.path / name).is_file() for name in (CONVERSATIONS, RATINGS, VERSIONS)):
                return None
            self._stores = Stores(self.served)
        return self._stores

    def _read(self, work: Callable[[Stores], T], without: T) -> T:
        """Run a function in the thread of the stores; return another value if there are none yet."""
        stores = self._opened()
        return without if stores is None else stores.now(lambda: work(stores))
