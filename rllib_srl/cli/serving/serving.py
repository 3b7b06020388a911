"""Which version answers: the engine, its adapters, and the change from one version to another while requests run.

    start ─> verify the active version ─> ready
    push  ─> checksum ─> load ─> canary ─> lineage ─> new answers come from it ─> old answers end ─> old one unloaded
    back  ─> the same with the parent, and the active version is marked as rolled back

A version answers only after its files had the checksums of the lineage and the canary agreed. If the engine ends, it is
started again, and the active version is verified again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rllib_srl.cli.serving.served_directory import ServedDirectory
from rllib_srl.cli.serving.version_files import Canary, check_served, verify
from rllib_srl.cli.serving.vllm_server import BASE, ServerError, VLLMServer
from rllib_srl.engine.canary import CanaryGap
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.people.rating_store import RatingsError
from rllib_srl.people.served_store import LineageError, StoreThread, Version

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 600.0  # for the answers of the version before
MAX_RESTARTS = 3  # of the engine, without an answer between them
WATCH_S = 1.0


class NotReady(RuntimeError):
    """The engine is starting; the message says so."""


class Serving:
    """The version that answers. Invariant: `number` was verified on the engine that is running, while `is_ready`."""

    def __init__(
        self, server: VLLMServer, served: ServedDirectory, db: StoreThread, on_busy: Callable[[bool], None]
    ) -> None:
        """Serve with an engine; `on_busy` is called with whether any answer is under way, when that changes."""
        self.server, self._served, self._db, self._on_busy = server, served, db, on_busy
        self.number, self.is_ready, self.num_restarts = 0, False, 0
        self._under_way: Counter[int] = Counter()
        self._changing = asyncio.Lock()
        self._loaded: set[int] = set()

    @property
    def num_under_way(self) -> int:
        return self._under_way.total()

    async def start(self) -> None:
        """Start the engine with the active version.

        Raises:
            ServerError: the engine does not start.
            FileError, WeightSyncError: the active version fails its check; nothing is served.
        """
        async with self._changing:
            self.is_ready, self._loaded = False, set()
            await self.server.start()
            active = await self._db.run(self._db.store.active)
            if active is not None:
                await self._verified(active)
            self.number = active.number if active else 0
            self.is_ready = True

    @contextmanager
    def answering(self) -> Iterator[tuple[int, str]]:
        """Yield number and served name of the version that answers; NotReady: none does at present."""
        if not self.is_ready:
            raise NotReady("the engine is starting; try again in a minute")
        number = self.number
        self._under_way[number] += 1
        if self.num_under_way == 1:
            self._on_busy(True)
        try:
            yield number, name_of(number)
        finally:
            self._under_way[number] -= 1
            if not self.num_under_way:
                self._on_busy(False)

    async def push(self, candidate: Version) -> CanaryGap:
        """Verify a candidate and make it the active version; the one before answers until then.

        Raises:
            FileError, WeightSyncError, ServerError, LineageError: it is not verified or no child of the active
                version; nothing has changed.
        """
        async with self._changing:
            gap = await self._verified(candidate)
            try:
                reason = f"it passed all gates; canary gap {gap}"
                await self._db.run(self._db.store.activate, candidate.number, reason)
            except (LineageError, RatingsError, OSError):
                await self._unload(candidate.number)
                raise
            await self._switch(candidate.number)
            return gap

    async def roll_back(self, reason: str, number: int | None = None) -> dict[str, Any]:
        """Make the parent of the active version answer again; return what `ServedStore.roll_back` does.

        Raises:
            LineageError: there is nothing to roll back, or another version is active than was meant.
            FileError, WeightSyncError, ServerError: the parent is not verified; nothing has changed.
        """
        async with self._changing:
            store = self._db.store
            if number not in (None, self.number):
                raise LineageError(f"version {number} is not active, version {self.number} is; nothing was rolled back")
            active = await self._db.run(store.active)
            if active is not None and active.parent and active.parent not in self._loaded:
                await self._verified(await self._db.run(store.version, active.parent))
            done = await self._db.run(store.roll_back, reason)
            await self._switch(done["active"])
            return done

    async def watch(self) -> None:
        """Start the engine again whenever it has ended; ServerError: it ends again and again."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.is_ready and self.server.has_ended():
                self.is_ready = False
                while not self.is_ready:
                    await self._start_again()

    async def _start_again(self) -> None:
        self.num_restarts += 1
        if self.num_restarts > MAX_RESTARTS:
            raise ServerError(f"vLLM's server ended {self.num_restarts} times; its log is {self._served.log}")
        logger.warning("vLLM's server has ended; it is started again")
        await self.server.stop()
        try:
            await self.start()
        except ServerError as error:  # it was killed meanwhile, perhaps
            logger.warning("%s", error)

    async def _verified(self, version: Version) -> CanaryGap:
        """Load a version and compare it with what its trainer computed; on failure it is not loaded."""
        directory = self._served.version(version.number)
        await asyncio.to_thread(verify, directory, version.files)
        expected = (await asyncio.to_thread(Canary.read, directory)).continuations
        await self.server.load(name_of(version.number), directory)
        self._loaded.add(version.number)
        try:
            continuations = await self.server.continuations(name_of(version.number), expected)
            return check_served(expected, continuations, version.number, self.server.settings.dtype)
        except (WeightSyncError, ServerError):
            await self._unload(version.number)
            raise

    async def _switch(self, number: int) -> None:
        """Let a version answer from now on; unload the others once their answers have ended."""
        self.number = number
        deadline = asyncio.get_running_loop().time() + DRAIN_TIMEOUT_S
        for other in sorted(self._loaded - {number}):
            while self._under_way[other] and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.02)
            await self._unload(other)

    async def _unload(self, number: int) -> None:
        self._loaded.discard(number)
        if self.server.has_ended():
            return
        try:
            await self.server.unload(name_of(number))
        except ServerError as error:
            logger.warning("version %d stays loaded and is not served: %s", number, error)


def name_of(number: int) -> str:
    """Return the name under which vLLM serves a version."""
    return f"v{number}" if number else BASE
