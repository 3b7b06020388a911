"""The driver's proxy of the EnvRunners: every call is typed, has a timeout, and names the runner that failed.

    runners.play_groups({id: arguments}, version, timeout_s)  ->  (id, RunnerBatch or Failure) in order of arrival
    runners.start_slice(id, version, ...)                     ->  PendingSlice, read by `slice_of`
    runners.start_loading(ids, ref, ...)                      ->  what `loaded` waits for
    runners.load_noise(ids, timeout_s)                        ->  {id: the result}, or RunnerFailure
    runners.revive(id, failure, timeout_s)                    ->  killed if hung, restarted by Ray, started again

RLlib starts the runners as `StartedRunners`: while the learners start, and outside Tune spread over the nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.rllib.algorithms import algorithm
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_srl.common.remote_calls import (
    ActorFailure,
    Call,
    Failure,
    Place,
    RunnerFailure,
    end_family,
    family_of,
    gather,
)
from rllib_srl.engine.fingerprint import Fingerprint
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.rollout.batches import Loaded, PlayArguments, RunnerBatch, Slice
from rllib_srl.rollout.env_runner import LLMEnvRunner, token_spaces
from rllib_srl.types import listed

Result = TypeVar("Result")
STALE = Failure("was restarted and does not have the current weights", is_hung=False)


class PendingSlice(NamedTuple):
    """References to the results of a slice that a runner plays."""

    runner_id: int
    answer: ray.ObjectRef[Slice | None]
    groups: Any  # a reference to the list of its groups


class RunnerGroup:
    """Calls of `LLMEnvRunner` methods, in other processes or on the local runner of this one.

    A method with the name of one of `LLMEnvRunner` calls that method on the runners.

    Invariant: no method waits longer than its timeout. A result that is missing, because the runner died or timed out,
    is a `Failure`, or raises `RunnerFailure`. An exception that a runner raises is raised here.
    """

    def __init__(self, group: EnvRunnerGroup) -> None:
        self._group = group
        self.places: dict[int, Place] = {}  # by runner id

    @property
    def ids(self) -> list[int]:
        """Return the ids of all runners; 0 is the local one."""
        return [0] if self.is_local else list(self.actors)

    def play_groups(
        self, arguments: Mapping[int, PlayArguments], version: int, timeout_s: float
    ) -> Iterator[tuple[int, RunnerBatch | Failure]]:
        """Play on the given runners; yield the batch or a `Failure` of each. Played groups outlive their runner.

        A runner with another version of the policy has been restarted since.
        """
        calls = {i: Call.of(LLMEnvRunner.play_groups, version, **of_runner) for i, of_runner in arguments.items()}
        if self.is_local:
            played = {i: call.run(self._group.local_env_runner) for i, call in calls.items()}
            answers: Iterable[tuple[int, Any]] = [(i, batch) for i, (batch, _) in played.items()]
            groups: dict[int, Any] = {i: of_runner for i, (_, of_runner) in played.items()}
        else:
            references = {i: call.submit_both(self.actors[i]) for i, call in calls.items()}
            answers = gather({i: batch for i, (batch, _) in references.items()}, timeout_s)
            groups = {i: of_runner for i, (_, of_runner) in references.items()}
        for i, answer in answers:
            if isinstance(answer, RunnerBatch) and arguments[i].get("as_groups", True):
                answer = replace(answer, groups=listed(answer.groups, groups[i]))
            yield i, answer or STALE

    def start_slice(
        self, runner_id: int, version: int, slice_s: float, enough: int, begin: PlayArguments | None
    ) -> PendingSlice:
        """Start a slice on a remote runner; see `LLMEnvRunner.advance`. Played groups outlive their runner."""
        call = Call.of(LLMEnvRunner.advance, version, slice_s, enough, begin)
        answer, groups = call.submit_both(self.actors[runner_id])
        return PendingSlice(runner_id, answer, groups)

    def slice_of(self, pending: PendingSlice, timeout_s: float) -> Slice | Failure:
        """Return a slice whose `answer` is ready, with references to its groups."""
        (_, played), *_ = gather({pending.runner_id: pending.answer}, timeout_s)
        if not isinstance(played, Slice):
            return played or STALE
        metas = iter(listed([meta for batch in played.batches.values() for meta in batch.groups], pending.groups))
        batches = {
            i: replace(batch, groups=list(islice(metas, len(batch.groups)))) for i, batch in played.batches.items()
        }
        return replace(played, batches=batches)

    def drop_play(self, ids: Iterable[int], timeout_s: float) -> dict[int, Failure]:
        """Drop the groups that are played in slices; return the failures."""
        return self._failures(ids, Call.of(LLMEnvRunner.drop_play), timeout_s)

    def start_loading(
        self, ids: Iterable[int], ref: Any, sequences: Sequence[Sequence[int]], timeout_s: float
    ) -> dict[int, Any]:
        """Start to load a bundle of weights and to score the canary; see `LLMEnvRunner.load_weights`."""
        call = Call.of(LLMEnvRunner.load_weights, ref, sequences, timeout_s)
        if self.is_local:  # no other process: it loads now
            return {i: call.run(self._group.local_env_runner) for i in ids}
        return {i: call.submit(self.actors[i]) for i in ids}

    def loaded(self, started: dict[int, Any], timeout_s: float) -> dict[int, Loaded | Failure]:
        return started if self.is_local else dict(gather(started, timeout_s))

    def load_noise(self, ids: Iterable[int], timeout_s: float) -> dict[int, tuple[Fingerprint, Fingerprint]]:
        return self._all(ids, Call.of(LLMEnvRunner.load_noise), timeout_s, "testing weights (noise)")

    def fingerprint(self, ids: Iterable[int], timeout_s: float) -> dict[int, Fingerprint]:
        return self._all(ids, Call.of(LLMEnvRunner.fingerprint), timeout_s, "testing weights (fingerprint)")

    def sleep(self, ids: Iterable[int], timeout_s: float) -> dict[int, Failure]:
        """Free the engines' memory for a learner on the same GPU; return the failures."""
        return self._failures(ids, Call.of(LLMEnvRunner.sleep), timeout_s)

    def wake_up(self, ids: Iterable[int], timeout_s: float) -> dict[int, Failure]:
        """Undo `sleep`; return the failures."""
        return self._failures(ids, Call.of(LLMEnvRunner.wake_up), timeout_s)

    def check_started(self, timeout_s: float) -> None:
        """Wait until all runners have started; raise the exception of a constructor that failed."""
        self.places = self._all(self.ids, Call.of(LLMEnvRunner.check_started), timeout_s, "starting")

    def revive(self, runner_id: int, failure: Failure, timeout_s: float) -> None:
        """Wait until a failed runner has restarted, on any node; kill it first if it may still be running.

        Raises:
            ActorFailure: it did not restart in time, or its constructor failed.
        """
        actor = self.actors[runner_id]
        manager = self._group._worker_manager
        manager.set_actor_state(runner_id, healthy=False)
        if failure.is_hung:
            family = family_of(self.places[runner_id]) if runner_id in self.places else []
            ray.kill(actor, no_restart=False)
            end_family(family)
        started = Call.of(LLMEnvRunner.check_started)
        deadline, answer = time.monotonic() + timeout_s, started.submit(actor)
        while (left := deadline - time.monotonic()) > 0:
            try:
                self.places[runner_id] = ray.get(answer, timeout=left)
            except RayTaskError as error:  # it restarted, and its constructor failed: waiting cannot help
                raise ActorFailure(f"runner {runner_id} {failure.reason}, and cannot start: {error.cause}") from error
            except RayError:
                time.sleep(0.5)
                answer = started.submit(actor)
            else:
                manager.set_actor_state(runner_id, healthy=True)
                manager._restored_actors.discard(runner_id)  # prevents a second restore by RLlib
                return
        raise ActorFailure(f"runner {runner_id} {failure.reason}, and did not come back within {timeout_s:g} s")

    def _answers(self, ids: Iterable[int], call: Call[Result], timeout_s: float) -> dict[int, Result | Failure]:
        """Run a call on several runners; return the result or a `Failure` of each."""
        if self.is_local:
            return {i: call.run(self._group.local_env_runner) for i in ids}
        return dict(gather({i: call.submit(self.actors[i]) for i in ids}, timeout_s))

    def _failures(self, ids: Iterable[int], call: Call[Any], timeout_s: float) -> dict[int, Failure]:
        return {i: answer for i, answer in self._answers(ids, call, timeout_s).items() if isinstance(answer, Failure)}

    def _all(self, ids: Iterable[int], call: Call[Result], timeout_s: float, what: str) -> dict[int, Result]:
        """Run a call on several runners and return all results; `what` is the action that an error names."""
        results: dict[int, Result] = {}
        for runner_id, answer in self._answers(ids, call, timeout_s).items():
            if isinstance(answer, Failure):
                raise RunnerFailure(runner_id, answer, what)
            results[runner_id] = answer
        return results

    @property
    def is_local(self) -> bool:
        """Return whether the only runner is in this process."""
        return self._group.local_env_runner is not None

    @property
    def actors(self) -> dict[int, Any]:
        """Return the handles of the remote runners by id."""
        return dict(self._group._worker_manager.actors())


class StartedRunners(EnvRunnerGroup):
    """RLlib's group of runners, whose engines start while the driver goes on to start the learners.

    RLlib asks remote runners for their spaces and states at the start, and so would wait for them, without a timeout.
    Here the driver answers; `wait_until_started` waits. Runners that share a card with a learner are waited for before
    the learners start, since an engine measures the free memory of its card.

    Each runner is on the node with the fewest, unless they share a card with the learner or Tune places them.
    """

    def _setup(self, **settings: Any) -> None:
        config = settings["config"]
        if not config.colocate and ray.util.get_current_placement_group() is None:
            self._remote_args["scheduling_strategy"] = "SPREAD"  # also of a runner that Ray restarts
        super()._setup(**settings)

    def add_workers(self, num_workers: int, validate: bool = False) -> None:
        """Start runners, and wait only for those that may share a card with a learner; `validate` is ignored."""
        super().add_workers(num_workers)
        shares_card = self._remote_config.colocate or 0 < (self._remote_config.num_gpus_per_env_runner or 0) < 1
        if num_workers and shares_card:
            self.wait_until_started()

    def wait_until_started(self) -> RunnerGroup:
        """Wait until all runners have started, at most `start_timeout_s`; return their proxy.

        Raises:
            RunnerFailure: a runner died or did not start in time; all are ended.
            Exception: raised by a runner's constructor.
        """
        runners = RunnerGroup(self)
        try:
            runners.check_started(self._remote_config.start_timeout_s)
        except BaseException:
            for actor in self._worker_manager.actors().values():
                ray.kill(actor)
            raise
        return runners

    def get_spaces(self) -> dict[str, Any]:
        """Return the spaces of the model's tokens, read from the tokenizer here."""
        return token_spaces(len(load_tokenizer(self._remote_config.model_dir())))

    def sync_env_runner_states(self, **states: Any) -> None:
        """Do nothing: runners have no state."""

    def sync_weights(self, *args: Any, **weights: Any) -> None:
        """Do nothing: `weights/sync.py` sends weights, and verifies them."""


@contextmanager
def runners_started_in_time() -> Iterator[None]:
    """Make algorithms that are set up inside the context start their runners as `StartedRunners`.

    RLlib 2.60 has no setting for it: `Algorithm.setup` creates the group by its class's name.
    """
    usual = algorithm.EnvRunnerGroup
    algorithm.EnvRunnerGroup = StartedRunners
    try:
        yield
    finally:
        algorithm.EnvRunnerGroup = usual
