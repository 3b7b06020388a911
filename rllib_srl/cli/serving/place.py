"""The directory of a served model: its files, who may use it, and the stores in one thread of their own.

    DIR/  settings.json   model, rank, temperature, context: they hold for all versions
          token           of the HTTP interface
          server.json     address of the server that is running
          lock            held while it runs
          conversations.db  ratings.db  versions.db  versions/0001/...  engine.log
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rllib_srl.cli.serving.adapter import read_json
from rllib_srl.cli.serving.job import write_json
from rllib_srl.cli.serving.standing import Standing
from rllib_srl.people.lineage.conversations import CONVERSATIONS, ConversationStore
from rllib_srl.people.lineage.versions import VERSIONS, Lineage
from rllib_srl.people.rating_store import RATINGS, RatingStore

SETTINGS, SERVER, TOKEN, LOCK, LOG = "settings.json", "server.json", "token", "lock", "engine.log"
MOST_NAMED = 5  # ratings that a rollback names; the rest is counted
Result = TypeVar("Result")


class PlaceError(ValueError):
    """The directory cannot be used; the message says why."""


class InUse(PlaceError):
    """Another process holds the directory."""


class Place:
    """The directory of one served model. Invariant: it is readable by its owner only."""

    def __init__(self, directory: Path) -> None:
        """Use a directory, which need not exist."""
        self.directory = directory

    @property
    def is_one(self) -> bool:
        """Return whether the directory is that of a served model."""
        return (self.directory / SETTINGS).is_file()

    @property
    def log(self) -> Path:
        """Return the log file of the engine."""
        return self.directory / LOG

    def version(self, number: int) -> Path:
        """Return the directory of a version."""
        return self.directory / "versions" / f"{number:04d}"

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Write the settings that hold for all versions, or check that they are those of before.

        Raises:
            PlaceError: a setting differs, or the directory holds something else.
        """
        if not self.is_one:
            if self.directory.is_dir() and any(self.directory.iterdir()):
                raise PlaceError(f"--out {self.directory} is not empty; expected a new directory, or one of srl serve")
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(self.directory / SETTINGS, dict(settings))
        before = self.settings()
        for name, value in settings.items():
            if before.get(name) != value:
                raise PlaceError(
                    f"{name} = {value}; expected {before.get(name)}, as --out {self.directory} has been served before"
                )

    def settings(self) -> dict[str, Any]:
        """Return the settings that hold for all versions."""
        return dict(read_json(self.directory / SETTINGS))

    def token(self) -> str:
        """Return the token, made when it is first asked for."""
        path = self.directory / TOKEN
        if not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        found = path.read_text().strip()
        if len(found) < 16:
            raise PlaceError(f"{path} has {len(found)} characters; expected a token of at least 16")
        return found

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory: one server, or one command that changes it.

        Raises:
            InUse: another process holds it.
        """
        with open(os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InUse(f"{self.directory} is in use by another srl serve") from error
            yield


class Stores:
    """The three stores of a place, used from one thread, so that the event loop never waits for a disk."""

    def __init__(self, place: Place, scheme: str = "") -> None:
        """Open the stores.

        Args:
            place: the directory.
            scheme: of the ratings; "" for that of the ratings so far.

        Raises:
            ValueError: there are ratings of another scheme.
            RuntimeError: one of them is damaged.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stores")
        self._place, self._scheme = place, scheme
        try:
            self._thread.submit(self._open).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def _open(self) -> None:
        directory = self._place.directory
        self.conversations = ConversationStore(directory / CONVERSATIONS)
        self.ratings = RatingStore(directory / RATINGS, self._scheme)
        self.lineage = Lineage(directory / VERSIONS)
        self._standing = Standing(self.conversations, self.ratings, self.lineage)

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
        return self._standing.free()

    def ratings_today(self) -> dict[str, str]:
        """Return the newest rating of every answer that was ever rated: answer id -> value."""
        return self._standing.today()

    def stale_versions(self) -> dict[int, int]:
        """Return how many ratings of each version have changed since; versions without such are left out."""
        return self._standing.stale()
