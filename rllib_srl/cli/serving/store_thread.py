"""The file of a served model in one thread, so that the event loop never waits for a disk.

    await db.run(db.store.find, "chatcmpl-...")
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rllib_srl.people.served_store import FILE, ServedStore

Result = TypeVar("Result")


class StoreThread:
    """A thread with an open store. Invariant: methods of `store` are called in it alone, by `run`."""

    def __init__(self, directory: Path, scheme: str = "") -> None:
        """Open the store.

        Args:
            directory: of the served model.
            scheme: of the ratings; "" for that of the ratings so far.

        Raises:
            ValueError: there are ratings of another scheme.
            RatingsError: the file is damaged.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            self.store = self._thread.submit(ServedStore, directory / FILE, scheme).result()
        except BaseException:
            self._thread.shutdown()
            raise

    async def run(self, function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """Call a function in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments, **named))

    def close(self) -> None:
        """Close the store, after what is under way."""
        self._thread.submit(self.store.close).result()
        self._thread.shutdown()
