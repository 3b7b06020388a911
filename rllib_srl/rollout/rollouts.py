"""All runners as one: prompts in, batches of groups out, even if a runner is lost.

    rollouts.play(prompts, iteration, stream="greedy")      each runner's batch as it arrives
    rollouts.play_training(prompts, iteration)              batches to train on; with `max_lag` runners play ahead
    with rollouts.at_rest(): sync                           nothing is played: weights may be loaded
    rollouts.restore({id: Failure})                         restarts runners and sends them the current weights

A runner that dies or times out is restarted, and plays its prompts again with the same seed: the run goes on as if
nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Unpack

import numpy as np

from rllib_srl.batch.layout import balanced_shards
from rllib_srl.common.remote_calls import Failure, RunnerFailure
from rllib_srl.curriculum.curriculum import Batch
from rllib_srl.replay.payloads import prompt_fields, prompt_of
from rllib_srl.rollout.ahead import RolloutsAhead, not_played
from rllib_srl.rollout.batches import PlayArguments, PlayOptions, RunnerBatch
from rllib_srl.rollout.runner_group import RunnerGroup
from rllib_srl.types import Prompt

MAX_TRIES = 3  # attempts to play the same prompts when runners die
MOST_LOST_ITERATIONS = 5  # consecutive iterations without a group, after which the run ends


class Notes(Protocol):
    """Takes counts and warnings, as `Report` does."""

    def count(self, name: str, number: int) -> None: ...

    def warn(self, line: str) -> None: ...


class Rollouts:
    """Plays prompts on all runners.

    Invariant: every prompt is in a batch that was returned, in play, or in an exception's message.
    """

    def __init__(
        self,
        runners: RunnerGroup,
        config: Any,
        min_episodes: int,
        seed: int,
        load_weights: Callable[[int, Sequence[int]], None],
        notes: Notes,
    ) -> None:
        """Begin with started runners that have weights of version 0; nothing is played yet.

        `config` is that of the algorithm; groups to train on have at least `min_episodes` valid ones. `load_weights` is
        called with (version, runner ids): it sends the current weights, or raises `RunnerFailure`.
        """
        self.runners, self.seed, self.version = runners, seed, 0
        self._config, self._min_episodes, self._load_weights, self._notes = config, min_episodes, load_weights, notes
        self._again: list[tuple[Prompt, bool]] = []  # in play when the restored state was saved; is it a revisit?
        self._counted = 0, 0  # newest iteration whose groups were numbered, and how many they are
        self.ahead: RolloutsAhead | None = None
        if config.max_lag:
            times = {"slice_s": config.slice_s, "timeout_s": config.sample_timeout_s}
            self.ahead = RolloutsAhead(runners, self.restore, **times, max_tries=MAX_TRIES)

    @property
    def in_play(self) -> list[tuple[Prompt, bool]]:
        """Return the prompts that were begun and not taken, each with whether it is a revisit."""
        begun = [] if self.ahead is None else [(group.prompt, group.is_revisit) for group in self.ahead.outstanding]
        return begun + self._again

    @property
    def num_free(self) -> int:
        """Return the number of prompts to begin, in addition to those in play."""
        most: int | None = self._config.in_flight
        if most is None:
            most = (self._config.max_lag + 1) * self._config.num_prompts_per_batch
        return max(0, most - len(self.in_play))

    def resumed_first(self, filled: Batch) -> Batch:
        """Return the prompts to begin: after a resume those that were in play, then those of a batch."""
        if not self._again:
            return filled
        again, self._again = self._again, []
        revisits = [prompt for prompt, is_revisit in again if is_revisit]
        fresh = [prompt for prompt, is_revisit in again if not is_revisit]
        at = filled.num_revisits
        return Batch([*revisits, *filled.prompts[:at], *fresh, *filled.prompts[at:]], len(revisits) + at)

    def play(
        self,
        prompts: Sequence[Prompt],
        iteration: int,
        stream: str = "train",
        num_revisits: int = 0,
        first_slot: int = 0,
        **options: Unpack[PlayOptions],
    ) -> Iterator[RunnerBatch]:
        """Play prompts on all runners and yield each runner's batch as it arrives.

        Groups that are played ahead of training are played to their end first, so that the engines are free.

        Args:
            prompts: the prompts to play.
            iteration: number of finished ones.
            stream: name of the random stream of sampling: "train", or a separate one for evaluation and probes.
            num_revisits: number of prompts, the first ones, that come from the memory.
            first_slot: number of the first prompt within the iteration.
            options: replace those of training.

        Raises:
            ActorFailure: the same prompts failed `MAX_TRIES` times, or a runner did not come back.
        """
        if self.ahead is not None:
            self.ahead.finish()
        pending = _named(prompts, iteration, first_slot)
        revisits = frozenset(list(pending)[:num_revisits])
        parts = _deal(pending, self.runners.ids)
        seeds = {i: self._seed(stream, iteration, i) for i in parts}
        for attempt in range(1, MAX_TRIES + 1):
            calls = {i: self._arguments(part, seeds[i], revisits, options) for i, part in parts.items()}
            lost: dict[int, Failure] = {}
            for runner_id, answer in self.runners.play_groups(calls, self.version, self._config.sample_timeout_s):
                if isinstance(answer, Failure):
                    lost[runner_id] = answer
                else:
                    yield answer
            if not lost:
                return
            parts = {i: parts[i] for i in lost}
            num = sum(map(len, parts.values()))
            if attempt == MAX_TRIES:
                raise not_played(num, MAX_TRIES, min(lost), lost[min(lost)])
            self._notes.count("num_groups_played_again", num)
            self.restore(lost)

    def play_training(
        self, prompts: Sequence[Prompt], iteration: int, num_revisits: int = 0, stream: str = "train"
    ) -> list[RunnerBatch]:
        """Return batches to train on: those of the prompts, or with `max_lag` of the P groups that ended first.

        An iteration that is repeated after an error continues to number its groups: the memory may hold those of the
        first try. Runners that play ahead begin each prompt where the fewest episodes are in play.
        The arguments are those of `play`.
        """
        counted_in, num_counted = self._counted
        first_slot = num_counted if counted_in == iteration + 1 else 0
        self._counted = iteration + 1, first_slot + len(prompts)
        if self.ahead is None:
            return list(self.play(prompts, iteration, stream, num_revisits, first_slot))
        pending, loads = _named(prompts, iteration, first_slot), self.ahead.loads()
        revisits = frozenset(list(pending)[:num_revisits])
        parts: dict[int, dict[str, Prompt]] = {}
        for group_id, prompt in pending.items():
            runner_id = min(loads, key=lambda i: (loads[i], i))
            loads[runner_id] += self._config.group_size
            parts.setdefault(runner_id, {})[group_id] = prompt
        for runner_id, part in parts.items():
            seed = self._seed(stream, iteration, runner_id)
            self.ahead.launch(runner_id, self._arguments(part, seed, revisits, {}))
        return self.ahead.take(self._config.num_prompts_per_batch)

    def restore(self, lost: Mapping[int, Failure]) -> None:
        """Restart runners and send them the current weights; a runner that dies meanwhile is restarted again.

        Raises:
            ActorFailure: a runner did not come back, or died `MAX_TRIES` times.
        """
        for runner_id, failure in lost.items():
            for attempt in range(1, MAX_TRIES + 1):
                self._notes.warn(f"runner {runner_id} {failure.reason}; restarting it and playing its prompts again")
                self.runners.revive(runner_id, failure, self._config.start_timeout_s)
                self._notes.count("num_runner_restarts", 1)
                try:
                    self._load_weights(self.version, [runner_id])
                    if self.ahead is not None:
                        again = self.ahead.restarted({runner_id: failure})
                        self._notes.count("num_groups_played_again", again)
                    break
                except RunnerFailure as error:
                    if attempt == MAX_TRIES:
                        raise
                    failure = error.failure

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Play nothing ahead inside the context, and play on with the weights of `version` after it."""
        if self.ahead is None:
            yield
            return
        with self.ahead.at_rest():
            yield
            self.ahead.version = self.version

    @contextmanager
    def asleep(self, timeout_s: float) -> Iterator[None]:
        """Put the engines to sleep inside the context: their GPU is free."""
        if lost := self.runners.sleep(self.runners.ids, timeout_s):
            self.restore(lost)
            for runner_id, failure in self.runners.sleep(lost, timeout_s).items():
                raise RunnerFailure(runner_id, failure, "going to sleep")
        try:
            yield
        finally:
            self.restore(self.runners.wake_up(self.runners.ids, timeout_s))

    def get_state(self) -> dict[str, Any]:
        in_play = [(prompt_fields(prompt), is_revisit) for prompt, is_revisit in self.in_play]
        return {"version": self.version, "seed": self.seed, "in_play": in_play}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`: its prompts are begun again, and groups in play now are dropped.

        Groups of an iteration that is repeated from a checkpoint have the same names again.
        """
        self.version, self.seed = state["version"], state["seed"]
        if self.ahead is not None:
            self.ahead.forget()
        self._again = [(prompt_of(fields), is_revisit) for fields, is_revisit in state["in_play"]]
        self._counted = 0, 0

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()

    def _seed(self, stream: str, iteration: int, runner_id: int) -> int:
        words = [self.seed, sum(stream.encode()), iteration, runner_id, 0]
        return int(np.random.SeedSequence(words).generate_state(1)[0] >> 1)  # non-negative in 32 bits

    def _arguments(
        self, part: dict[str, Prompt], seed: int, revisits: frozenset[str], options: PlayOptions
    ) -> PlayArguments:
        training: PlayOptions = {
            "group_size": self._config.group_size,
            "num_transcripts": self._config.num_transcripts,
            "min_episodes": self._min_episodes,
        }
        return {"prompts": part, "seed": seed, "revisits": revisits, **training, **options}


def _named(prompts: Sequence[Prompt], iteration: int, first_slot: int) -> dict[str, Prompt]:
    """Return the prompts by group id, "<iteration>.<slot>"."""
    return {f"{iteration + 1}.{slot}": prompt for slot, prompt in enumerate(prompts, first_slot)}


def group_order(group_id: str) -> tuple[int, int]:
    """Return the iteration in which a group was begun, and its slot in it."""
    iteration, slot = group_id.split(".")
    return int(iteration), int(slot)


def _deal(pending: Mapping[str, Prompt], runner_ids: Sequence[int]) -> dict[int, dict[str, Prompt]]:
    """Split prompts by group id over runners, about as many each; leave out runners that get none."""
    listed = list(pending.items())
    parts = balanced_shards([1] * len(pending), len(runner_ids))
    dealt = {runner_id: dict(listed[at] for at in part) for runner_id, part in zip(runner_ids, parts, strict=True)}
    return {runner_id: part for runner_id, part in dealt.items() if part}


class EpisodesLost(ValueError):
    """Every episode of several iterations was lost."""


class LossWatch:
    """Counts consecutive iterations of which no group is left. Invariant: `num_lost` < `MOST_LOST_ITERATIONS`."""

    def __init__(self) -> None:
        self.num_lost = 0

    def check(self, batches: Sequence[RunnerBatch]) -> None:
        """Count an iteration by what was played in it.

        Raises:
            EpisodesLost: every episode of this and the iterations before was lost; the message has the last reason.
        """
        errors = [line for batch in batches for line in batch.errors]
        if not errors or any(batch.groups for batch in batches):
            self.num_lost = 0
            return
        self.num_lost += 1
        if self.num_lost >= MOST_LOST_ITERATIONS:
            raise EpisodesLost(
                f"every episode of the last {self.num_lost} iterations was lost; the last one: {errors[-1]}"
            )
