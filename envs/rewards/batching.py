"""Gather calls of a reward function that arrive within milliseconds into one call of the function.

    def f(prompts, answers, rows): ...                     returns one number for each answer, in their order
    gathered("m:f", f)("2 + 2?", "4", row, deadline)       its number; of 3 threads at once: f gets lists of 3

The function is called `WAIT_S` after the first call of a batch has arrived, or as soon as `MOST_CALLS` have. All
environments of a process share the batches of a function. An exception, a timeout or a list of another length is that
of every call of the batch, and of no other; a batch runs while the latest deadline of its calls has not passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rllib_srl.envs.posting import seconds_left
from rllib_srl.envs.rewards.calling import TIMEOUTS, called_within, listed

WAIT_S = 0.005  # for further calls
MOST_CALLS = 64  # of a batch
_gathered: dict[str, Gathered] = {}  # by the name of a function, one object for all environments of this process
_lock = threading.Lock()


class LateBatch(TimeoutError):
    """The batch of a call is late. `num_late`: 1 for the first of its calls, since one call of the function hangs."""

    def __init__(self, num_late: int):
        super().__init__("no result by the deadline")
        self.num_late = num_late


@dataclass
class _Batch:
    """Calls that become one. Invariant: `values` or `error` is set once `is_done` is, one value for each call."""

    calls: list[tuple[str, str, Mapping[str, Any], float]] = field(default_factory=list)  # ..., deadline
    values: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    is_full: threading.Event = field(default_factory=threading.Event)
    is_done: threading.Event = field(default_factory=threading.Event)


class Gathered:
    """A function of lists as a function of one answer. Invariant: a batch that runs takes no further call."""

    def __init__(self, function: Callable[..., Any]):
        """Take f(prompts, answers, rows), plain or async."""
        self.function = function
        self._lock = threading.Lock()
        self._open: _Batch | None = None

    def __call__(self, prompt: str, answer: str, row: dict[str, Any], deadline: float) -> Any:
        """Return the function's value for an answer, by `deadline` on the clock of `time.monotonic`.

        Raises:
            LateBatch: the deadline has passed.
            NoReward: the function returned no list, or one of another length.
            Exception: that of the function.
        """
        left_s = seconds_left(deadline)
        with self._lock:
            batch = self._open or self._begun()
            place = len(batch.calls)
            batch.calls.append((prompt, answer, row, deadline))
            if len(batch.calls) == MOST_CALLS:
                self._open = None
                batch.is_full.set()
        if not batch.is_done.wait(left_s) or isinstance(batch.error, TIMEOUTS):
            raise LateBatch(num_late=int(place == 0))
        if batch.error is not None:
            raise batch.error
        return batch.values[place]

    def _begun(self) -> _Batch:
        batch = _Batch()
        threading.Thread(target=self._run, args=(batch,), daemon=True, name="reward-batch").start()
        self._open = batch
        return batch

    def _run(self, batch: _Batch) -> None:
        batch.is_full.wait(WAIT_S)
        with self._lock:
            if self._open is batch:
                self._open = None
        prompts, answers, rows, deadlines = (list(column) for column in zip(*batch.calls, strict=True))
        arguments = {"prompts": prompts, "answers": answers, "rows": rows}
        try:
            value = called_within(seconds_left(max(deadlines)), self.function, arguments)
            batch.values = listed(value, len(batch.calls), "answer")
        except BaseException as error:  # also SystemExit: raised in the calls
            batch.error = error
        batch.is_done.set()


def gathered(name: str, function: Callable[..., Any]) -> Gathered:
    """Return the object that gathers the calls of a function, the same one in all environments of a process.

    Args:
        name: as the settings have it
        function: that it names now
    """
    with _lock:
        entry = _gathered.get(name)
        if entry is None or entry.function != function:
            entry = _gathered[name] = Gathered(function)
        return entry
