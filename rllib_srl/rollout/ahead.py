"""Rollouts ahead of training: the runners play on while the learners update (`max_lag`).

    ahead.launch(runner, arguments)    new groups; the runner begins with them in its next slice
    ahead.take(P)                      waits for P groups; of more those that were launched first
    with ahead.at_rest(): sync         no slice is being played: weights may be loaded
    ahead.finish()                     plays all groups to their end, for evaluation on the same engines

One thread keeps a slice of `slice_s` seconds going on each runner. The runners keep unfinished groups from one slice to
the next, so a turn may span several versions of the weights. The groups of a lost runner are played again from their
start by the restarted one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import ray

from rllib_srl.common.remote_calls import ActorFailure, Failure
from rllib_srl.rollout.batches import PlayArguments, RunnerBatch, Slice
from rllib_srl.rollout.runner_group import PendingSlice, RunnerGroup
from rllib_srl.types import Prompt

POLL_S = 0.05  # longest time until an idle runner gets new groups
JOIN_S = 10.0  # wait for the thread at the end, in addition to the time of a slice
ANSWER_S = 60.0  # to fetch a result that is ready

Restore = Callable[[dict[int, Failure]], None]


@dataclass
class Launched:
    """A group that was launched and has not been taken. Invariant: it ends on the runner that it was launched on."""

    group_id: str
    prompt: Prompt
    runner_id: int
    arguments: PlayArguments  # arguments of its launch, which may have launched other groups
    is_begun: bool = False  # has the runner begun it since its last start?
    num_lost: int = 0  # how often its runner was lost
    batch: RunnerBatch | None = None  # once it has ended

    @property
    def is_revisit(self) -> bool:
        return self.group_id in self.arguments.get("revisits", ())


class RolloutsAhead:
    """Keeps the runners playing in the background.

    Invariant: a launched group is in `outstanding` until `take` returns its batch, even if its runner is lost.
    """

    def __init__(
        self, runners: RunnerGroup, restore: Restore, *, slice_s: float, timeout_s: float, max_tries: int
    ) -> None:
        """Start the thread; nothing is played yet, and the weights are of version 0.

        `restore` restarts lost runners with the weights of `version` and calls `restarted`, or raises. A runner that
        does not end its slice within `slice_s + timeout_s` is lost. A wait lasts `timeout_s` longer, so that it
        outlasts a slice that hangs; one for groups begins anew after a restart of runners.
        """
        self.version = 0  # version of the weights; changed by the main thread while the runners are at rest
        self._runners, self._restore = runners, restore
        self._slice_s, self._timeout_s, self._max_tries = slice_s, timeout_s, max_tries
        self._wait_s = slice_s + 2 * timeout_s
        self._changed = threading.Condition()
        self._groups: dict[str, Launched] = {}  # by id, in the order of their launch
        self._in_slice: dict[int, tuple[PendingSlice, float]] = {}  # and the time from which it counts as lost
        self._lost: dict[int, Failure] = {}
        self._error: Exception | None = None
        self._wanted = self._num_at_rest = 0
        self._is_closed = False
        self._seconds: dict[int, list[dict[str, float]]] = {}  # seconds of the slices since the last `take`, by runner
        self._thread = threading.Thread(target=self._keep_going, name="rollouts-ahead", daemon=True)
        self._thread.start()

    # --- called by the main thread ----------------------------------------------------------------

    @property
    def outstanding(self) -> list[Launched]:
        """Return the groups that were launched and not taken, in the order of their launch."""
        with self._changed:
            return list(self._groups.values())

    def loads(self) -> dict[int, int]:
        """Return runner id -> number of its episodes whose groups have not ended."""
        with self._changed:
            return {i: sum(group.arguments["group_size"] for group in self._unended(i)) for i in self._runners.ids}

    def launch(self, runner_id: int, arguments: PlayArguments) -> None:
        """Let a runner play new groups; it begins with them in its next slice."""
        with self._changed:
            for group_id, prompt in arguments["prompts"].items():
                self._groups[group_id] = Launched(group_id, prompt, runner_id, arguments)
            self._changed.notify_all()

    def take(self, num: int) -> list[RunnerBatch]:
        """Wait until `num` groups have ended, all if fewer are outstanding; return a batch for each of them.

        If more have ended, those launched first are returned. The first batch has the seconds in the engine
        and of waiting for environments since the last call, from the runner with the most.

        Raises:
            ActorFailure: the same group was lost `max_tries` times, or the groups did not end in time.
            Exception: raised by a runner or by `restore`.
        """
        num = min(num, len(self._groups))
        with self._changed:
            self._wanted = num
        try:
            self._wait(lambda: len(self._ended()) >= num, f"{num} groups did not end")
        finally:
            with self._changed:
                self._wanted = 0
        with self._changed:
            taken = self._ended()[:num]
            for group in taken:
                del self._groups[group.group_id]
            batches = [group.batch for group in taken if group.batch is not None]
            if batches:
                spent, self._seconds = list(self._seconds.values()), {}
                for name in ("engine_s", "environment_s"):
                    most = max((sum(times.get(name, 0.0) for times in slices) for slices in spent), default=0.0)
                    batches[0] = replace(batches[0], seconds={**batches[0].seconds, name: most})
            return batches

    def finish(self) -> None:
        """Wait until all outstanding groups have ended; `take` returns them later. See `take`."""
        self._wait(lambda: len(self._ended()) == len(self._groups), "groups did not end")

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Wait until the slices have ended, and play none inside the context.

        Raises:
            ActorFailure: a runner did not end its slice in time.
        """
        with self._changed:
            self._num_at_rest += 1
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._in_slice, self._wait_s):
                    raise ActorFailure(f"runners did not end their slice within {self._wait_s:g} s")
            yield
        finally:
            with self._changed:
                self._num_at_rest -= 1
                self._changed.notify_all()

    def forget(self) -> None:
        """Drop all outstanding groups, on the runners too."""
        with self.at_rest():
            with self._changed:
                self._groups.clear()
                alive = [i for i in self._runners.ids if i not in self._lost]
            lost = self._runners.drop_play(alive, self._timeout_s)
        with self._changed:
            self._lost.update(lost)

    def close(self) -> None:
        """End the thread; wait for running slices at most as long as they should take."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(self._slice_s + JOIN_S)

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._wait_s
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: is_done() or self._lost or self._error, max(0.0, deadline - time.monotonic())
                )
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if is_done():
                    return
                lost = dict(self._lost)
            if not lost:
                raise ActorFailure(f"{what} within {self._wait_s:g} s")
            self._restore(lost)
            deadline = time.monotonic() + self._wait_s

    def restarted(self, runners: Mapping[int, Failure]) -> int:
        """Play the groups of lost runners again, each on the same runner; return their number.

        Raises:
            ActorFailure: a group was lost `max_tries` times.
        """
        num = 0
        with self._changed:
            for runner_id, failure in runners.items():
                again = self._unended(runner_id)
                for group in again:
                    group.is_begun, group.num_lost = False, group.num_lost + 1
                if any(group.num_lost >= self._max_tries for group in again):
                    raise not_played(len(again), self._max_tries, runner_id, failure)
                num += len(again)
                self._lost.pop(runner_id, None)
            self._changed.notify_all()
        return num

    def _unended(self, runner_id: int) -> list[Launched]:
        return [group for group in self._groups.values() if group.runner_id == runner_id and group.batch is None]

    def _ended(self) -> list[Launched]:
        return [group for group in self._groups.values() if group.batch is not None]

    # --- the thread -------------------------------------------------------------------------------

    def _keep_going(self) -> None:
        try:
            self._play_slices()
        except Exception as error:  # any: the main thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _play_slices(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                if not self._num_at_rest and self._error is None:
                    self._start_slices()
                if not self._in_slice:
                    is_playing = len(self._ended()) < len(self._groups)
                    self._changed.wait(POLL_S if is_playing and not self._num_at_rest else None)
                    continue
                pending = {call.answer: call for call, _ in self._in_slice.values()}
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=POLL_S)
            for answer in ready:
                self._end_slice(pending[answer])
            self._drop_hung()

    def _start_slices(self) -> None:
        for runner_id in self._runners.ids:
            if runner_id in self._in_slice or runner_id in self._lost:
                continue
            new = self._take_new(runner_id)
            if not self._unended(runner_id):
                continue
            missing = max(0, self._wanted - len(self._ended()))
            enough = -(-missing // len(self._runners.ids))
            pending = self._runners.start_slice(runner_id, self.version, self._slice_s, enough, new)
            self._in_slice[runner_id] = pending, time.monotonic() + self._slice_s + self._timeout_s

    def _take_new(self, runner_id: int) -> PlayArguments | None:
        """Return the arguments of the groups that a runner is to begin, None without any."""
        groups = [group for group in self._unended(runner_id) if not group.is_begun]
        if not groups:
            return None
        for group in groups:
            group.is_begun = True
        prompts = {group.group_id: group.prompt for group in groups}
        revisits = frozenset(group.group_id for group in groups if group.is_revisit)
        return {**groups[-1].arguments, "prompts": prompts, "revisits": revisits}

    def _end_slice(self, pending: PendingSlice) -> None:
        played: Slice | Failure
        error: Exception | None = None
        try:
            played = self._runners.slice_of(pending, ANSWER_S)
        except Exception as raised:  # any that the runner raised: the main thread raises it
            error, played = raised, Failure("raised an error", is_hung=False)
        with self._changed:
            self._in_slice.pop(pending.runner_id, None)
            self._error = self._error or error
            if isinstance(played, Failure):
                self._lost[pending.runner_id] = played
            else:
                self._keep(pending.runner_id, played)
            self._changed.notify_all()

    def _keep(self, runner_id: int, played: Slice) -> None:
        """Keep the batches of a slice; a runner without the groups that it should have counts as lost."""
        self._seconds.setdefault(runner_id, []).append(played.seconds)
        for group_id, batch in played.batches.items():
            if group_id in self._groups:
                self._groups[group_id].batch = batch
        expected = sum(group.is_begun for group in self._unended(runner_id))
        if played.num_unfinished != expected:
            reason = f"plays {played.num_unfinished} groups instead of {expected}"
            self._lost[runner_id] = Failure(reason, is_hung=False)

    def _drop_hung(self) -> None:
        with self._changed:
            now = time.monotonic()
            for runner_id in [i for i, (_, end) in self._in_slice.items() if now > end]:
                del self._in_slice[runner_id]
                limit_s = self._slice_s + self._timeout_s
                self._lost[runner_id] = Failure(f"gave no answer within {limit_s:g} s", is_hung=True)
                self._changed.notify_all()


def not_played(num: int, num_tries: int, runner_id: int, failure: Failure) -> ActorFailure:
    return ActorFailure(
        f"{num} prompts could not be played in {num_tries} attempts: runner {runner_id} {failure.reason}"
    )
