"""The group of EnvRunners as SRL calls it: every call has a deadline, every silent or dead runner a name.

    runners.each("play_groups", {id: arguments}, timeout_s)  ->  (id, answer or Failure) in order of arrival
    runners.revive(id, failure)                              ->  ended if silent, restarted by Ray, answering again
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_srl.deadlines import ActorFailure, Failure, gather


class Runners:
    """Named calls to local or remote `LLMEnvRunner`s.

    Invariant: no method waits longer than its timeout, and none returns silently without an answer.
    """

    def __init__(self, group: EnvRunnerGroup) -> None:
        """Wrap RLlib's group."""
        self._group = group

    @property
    def ids(self) -> list[int]:
        """Return the ids of all runners; 0 is the local one."""
        return [0] if self._group.local_env_runner is not None else list(self._actors())

    def each(self, method: str, kwargs: Mapping[int, Mapping[str, Any]], timeout_s: float) -> Iterator[tuple[int, Any]]:
        """Call `method` on some runners and yield what each answers, or a `Failure`.

        Raises:
            Exception: what a runner raised itself.
        """
        if self._group.local_env_runner is not None:
            for runner_id, arguments in kwargs.items():
                yield runner_id, getattr(self._group.local_env_runner, method)(**arguments)
            return
        actors = self._actors()
        calls = {i: getattr(actors[i], method).remote(**arguments) for i, arguments in kwargs.items()}
        yield from gather(calls, timeout_s)

    def all(self, method: str, kwargs: Mapping[int, Mapping[str, Any]], timeout_s: float, what: str) -> dict[int, Any]:
        """Call `method` on some runners; all must answer.

        Raises:
            ActorFailure: naming the runner and `what` it was asked for.
        """
        answers = dict(self.each(method, kwargs, timeout_s))
        for runner_id, answer in answers.items():
            if isinstance(answer, Failure):
                raise ActorFailure(f"runner {runner_id} {answer.reason} while {what}")
        return answers

    def check_started(self, timeout_s: float) -> None:
        """Raise what any runner's constructor ran into, or wait until all have started."""
        self.all("check_started", {runner_id: {} for runner_id in self.ids}, timeout_s, "starting")

    def revive(self, runner_id: int, failure: Failure, timeout_s: float) -> None:
        """Wait until a failed runner answers again; end it first if it may still be running.

        Raises:
            ActorFailure: it did not come back in time, or its constructor fails now.
        """
        actor = self._actors()[runner_id]
        manager = self._group._worker_manager
        manager.set_actor_state(runner_id, healthy=False)
        if failure.is_silent:
            ray.kill(actor, no_restart=False)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                ray.get(actor.check_started.remote(), timeout=max(0.1, deadline - time.monotonic()))
            except RayTaskError as error:  # it restarted, and its constructor failed: waiting cannot help
                raise ActorFailure(f"runner {runner_id} {failure.reason}, and cannot start: {error.cause}") from error
            except RayError:
                time.sleep(0.5)
            else:
                manager.set_actor_state(runner_id, healthy=True)
                manager._restored_actors.discard(runner_id)  # we restore it; RLlib need not
                return
        raise ActorFailure(f"runner {runner_id} {failure.reason}, and did not come back within {timeout_s:g} s")

    def actors(self) -> list[Any]:
        """Return the handles of the remote runners, in order of their ids."""
        return [actor for _, actor in sorted(self._actors().items())]

    def _actors(self) -> dict[int, Any]:
        return dict(self._group._worker_manager.actors())
