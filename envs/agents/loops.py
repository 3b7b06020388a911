"""Run coroutines of many episodes on one event loop, in its own thread.

    loop = EventLoop("verifiers")
    program = Coroutine(loop, lambda: play(task), on_end)
    program.start(); program.stop()

Environments of other libraries are made for one loop: what they keep between episodes (clients, locks) belongs to it.
A function that blocks the loop holds up every episode on it. `stop` finds that out: the loop is then given up, and
`is_lost` is True; its thread remains until the function returns.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from rllib_srl.envs.agents.endpoint import Ended
from rllib_srl.envs.agents.programs import one_line

_ANSWER_S = 2.0  # within which a loop that is not blocked runs what it is given
_CLOSE_S = 5.0  # for servers of environments to end with the process


class EventLoop:
    """An event loop in a daemon thread. Invariant: once `is_lost`, it is never used for another episode."""

    def __init__(self, name: str):
        self.is_lost = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name=name).start()
        atexit.register(self.close)

    def submit(self, coroutine: Any) -> Future[Any]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what still runs, so that it can end its servers, and stop the loop; called as the process ends."""
        if not self.is_lost:
            with suppress(TimeoutError):
                self.submit(_cancel_others()).result(_CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)

    def check(self) -> None:
        """Give the loop up if it is blocked."""
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        if not answered.wait(_ANSWER_S):
            self.is_lost = True


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Coroutine:
    """A program (see `Program`) that is a coroutine on a loop."""

    def __init__(self, loop: EventLoop, play: Callable[[], Awaitable[Any]], on_end: Callable[[Ended], None]):
        """Keep what is to be run.

        Args:
            loop: that runs it.
            play: returns a coroutine whose value is the episode's outcome.
            on_end: is called once, with that value or the reason why there is none.
        """
        self._loop, self._play, self._on_end = loop, play, on_end
        self._future: Future[Any] | None = None
        self._has_ended = False

    def start(self) -> None:
        """Run the coroutine."""
        self._future = self._loop.submit(self._run())

    def stop(self) -> None:
        """Cancel the coroutine."""
        if self._future is not None and not self._has_ended:
            self._future.cancel()
            self._loop.check()

    async def _run(self) -> None:
        try:
            ended = Ended(await self._play())
        except asyncio.CancelledError:
            ended = Ended(error="it was cancelled")
        except Exception as error:  # a foreign environment may raise anything
            ended = Ended(error=one_line(error))
        self._has_ended = True
        self._on_end(ended)
