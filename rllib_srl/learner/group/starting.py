"""Starts a group of remote learners in limited time: RLlib waits for their processes without a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from ray.exceptions import RayActorError
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_srl.learner.group.learners import LearnerFailure


def started(build: Callable[[], LearnerGroup], num: int, timeout_s: float) -> LearnerGroup:
    """Call `build` in a thread of its own, which goes on after a timeout, unheard; return the group.

    Args:
        build: RLlib's function that starts `num` learners.
        num: of remote learners.
        timeout_s: timeout of the start.

    Raises:
        LearnerFailure: a learner died, or the learners did not start in time.
        Exception: raised by a learner's constructor.
    """
    future: Future[LearnerGroup] = Future()

    def start() -> None:
        try:
            future.set_result(build())
        except BaseException as error:  # any: it is raised below
            future.set_exception(error)

    thread = threading.Thread(target=start, name="start-learners", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not future.done():
        raise LearnerFailure(f"{num} learner{'s' * (num > 1)} did not start within {timeout_s:g} s")
    try:
        return future.result()
    except Exception as error:
        # Ray 2.60 raises None after the death of a learner that starts; the death is then the context of the TypeError.
        if any(isinstance(one, RayActorError) for one in (error, error.__context__)):
            raise LearnerFailure("a learner died while starting") from error
        raise
