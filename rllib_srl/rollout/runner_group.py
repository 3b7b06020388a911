"""Remote calls to the group of EnvRunners; every call has a timeout, and every failure names its runner.

    runners.play({id: arguments}, version, timeout_s)        ->  (id, RunnerBatch or Failure) in order of arrival
    runners.each("load_weights", {id: arguments}, timeout_s) ->  (id, result or Failure) in order of arrival
    runners.revive(id, failure, timeout_s)                   ->  killed if silent, restarted by Ray, started again
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_srl.common.remote_calls import ActorFailure, Failure, RunnerFailure, gather
from rllib_srl.rollout.env_runner import RunnerBatch
from rllib_srl.types import listed


class Runners:
    """Named calls to local or remote `LLMEnvRunner`s.

    Invariant: no method waits longer than its timeout; a missing result is a `Failure` or an exception.
    """

    def __init__(self, group: EnvRunnerGroup) -> None:
        """Wrap RLlib's group."""
        self._group = group

    @property
    def ids(self) -> list[int]:
        """Return the ids of all runners; 0 is the local one."""
        return [0] if self._group.local_env_runner is not None else list(self._actors())

    def play(
        self, kwargs: Mapping[int, Mapping[str, Any]], version: int, timeout_s: float
    ) -> Iterator[tuple[int, RunnerBatch | Failure]]:
        """Play on the given runners; yield the batch or a `Failure` of each. Played groups outlive their runner.

        Args:
            kwargs: arguments of `LLMEnvRunner.play_groups`, by runner id.
            version: of the policy that plays; a runner with another version has been restarted since.
            timeout_s: for all runners together.

        Raises:
            Exception: an exception that a runner raised.
        """
        if self._group.local_env_runner is not None:
            yield from self.each("play_groups", kwargs, timeout_s)
            return
        actors = self._actors()
        calls = {i: actors[i].play_groups_apart.remote(version, **arguments) for i, arguments in kwargs.items()}
        for i, answer in gather({i: batch for i, (batch, _) in calls.items()}, timeout_s):
            if isinstance(answer, RunnerBatch) and kwargs[i].get("as_groups", True):
                answer = replace(answer, groups=listed(answer.groups, calls[i][1]))
            yield i, answer or Failure("was restarted and does not have the current weights", is_silent=False)

    def each(self, method: str, kwargs: Mapping[int, Mapping[str, Any]], timeout_s: float) -> Iterator[tuple[int, Any]]:
        """Call `method` on the given runners; yield the result or a `Failure` of each.

        Raises:
            Exception: an exception that a runner raised.
        """
        if self._group.local_env_runner is not None:
            for runner_id, arguments in kwargs.items():
                yield runner_id, getattr(self._group.local_env_runner, method)(**arguments)
            return
        actors = self._actors()
        calls = {i: getattr(actors[i], method).remote(**arguments) for i, arguments in kwargs.items()}
        yield from gather(calls, timeout_s)

    def all(self, method: str, kwargs: Mapping[int, Mapping[str, Any]], timeout_s: float, what: str) -> dict[int, Any]:
        """Call `method` on the given runners and return the result of each; all must return.

        Raises:
            RunnerFailure: a runner failed; the message names the runner and `what`, the failed action.
        """
        answers = dict(self.each(method, kwargs, timeout_s))
        for runner_id, answer in answers.items():
            if isinstance(answer, Failure):
                raise RunnerFailure(runner_id, answer, what)
        return answers

    def check_started(self, timeout_s: float) -> None:
        """Wait until all runners have started; raise the exception of a constructor that failed."""
        self.all("check_started", {runner_id: {} for runner_id in self.ids}, timeout_s, "starting")

    def revive(self, runner_id: int, failure: Failure, timeout_s: float) -> None:
        """Wait until a failed runner has restarted; kill it first if it may still be running.

        Raises:
            ActorFailure: it did not restart within `timeout_s`, or its constructor failed.
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
                manager._restored_actors.discard(runner_id)  # prevents a second restore by RLlib
                return
        raise ActorFailure(f"runner {runner_id} {failure.reason}, and did not come back within {timeout_s:g} s")

    def actors(self) -> list[Any]:
        """Return the handles of the remote runners, in order of their ids."""
        return [actor for _, actor in sorted(self._actors().items())]

    def _actors(self) -> dict[int, Any]:
        return dict(self._group._worker_manager.actors())
