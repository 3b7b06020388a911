"""The phases of an iteration, and how something is done at a chosen moment of one.

    play -> remember -> learn -> sync -> evaluate -> (rest)

A phase begins with the call in `PHASES`. "rest" is the time between two iterations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

# phase: whose method begins it, and the method
PHASES: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "play": (lambda algo: algo.runners, "play_groups"),
    "remember": (lambda algo: algo.memory, "add"),
    "learn": (lambda algo: algo, "_learn"),
    "sync": (lambda algo: algo.weight_sync, "sync"),
    "evaluate": (lambda algo: algo, "evaluate"),
}
REST = "rest"
EVERY_PHASE = (*PHASES, REST)
EVERY = "every"  # in place of a phase: from the beginning of an iteration to its end


@contextmanager
def beginning(owner: Any, name: str, action: Callable[[], object]) -> Iterator[None]:
    """Call `action` before every call of a method.

    Args:
        owner: an object, or a class: then of all its objects.
        name: of the method.
        action: without arguments.
    """
    usual, was_own = getattr(owner, name), vars(owner).get(name)

    def begun(*arguments: Any, **named: Any) -> Any:
        action()
        return usual(*arguments, **named)

    setattr(owner, name, begun)
    try:
        yield
    finally:
        if was_own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, was_own)


class Moment:
    """Something that is done once, a given time after the beginning of a phase.

    Invariant: `struck_at` is the time at which it was done, None before.
    """

    def __init__(self, action: Callable[[], None], delay_s: float) -> None:
        """Set what is done, and how long after the beginning of the phase; 0: before the phase does anything."""
        self._action, self._delay_s = action, delay_s
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self.struck_at: float | None = None
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Begin to count; later calls do nothing."""
        with self._lock:
            if self._timer is not None:
                return
            self._timer = threading.Timer(self._delay_s, self._strike)
        self._timer.start()
        if not self._delay_s:
            self.wait()

    def wait(self) -> None:
        """Wait until it is done, if the phase has begun.

        Raises:
            Exception: that of the action.
        """
        if self._timer is not None:
            self._timer.join()
        if self.error is not None:
            raise self.error

    def _strike(self) -> None:
        self.struck_at = time.monotonic()
        try:
            self._action()
        except Exception as error:  # any: `wait` raises it in the thread that asked for it
            self.error = error


@contextmanager
def at_moment_of(algo: Any, phase: str, action: Callable[[], None], delay_s: float) -> Iterator[Moment]:
    """Do something a given time after a phase next begins; in "rest" and for `EVERY` phase at once.

    Args:
        algo: the algorithm.
        phase: one of `EVERY_PHASE`, or `EVERY`.
        action: what is done.
        delay_s: seconds from the beginning of the phase.
    """
    is_at_once = phase in (REST, EVERY)
    moment = Moment(action, 0.0 if is_at_once else delay_s)
    if is_at_once:
        moment.begin()
        yield moment
        return
    find, name = PHASES[phase]
    with beginning(find(algo), name, moment.begin):
        yield moment
    moment.wait()


def seconds_of_phases(algo: Any) -> dict[str, float]:
    """Run one iteration, and return how long each phase took; "rest" takes none, "iteration" is the whole."""
    begun: dict[str, float] = {}

    def note(phase: str) -> None:
        begun.setdefault(phase, time.monotonic())

    start = time.monotonic()
    with ExitStack() as stack:
        for phase, (find, name) in PHASES.items():
            stack.enter_context(beginning(find(algo), name, partial(note, phase)))
        algo.train()
    end = time.monotonic()
    moments = [*begun.values(), end]
    took = {phase: moments[at + 1] - moments[at] for at, phase in enumerate(begun)}
    return {**dict.fromkeys(PHASES, 0.0), **took, REST: 0.0, EVERY: 0.0, "iteration": end - start}
