"""The driver's end of the memory: the buffer's process, and a handle with the names and counts of its calls.

    memory.draw_prompts(P, now)   revisits for P slots      memory.add(groups, now)     visits by group id
    memory.draw_groups(P, now)    groups to reuse           memory.snapshot / restore   a copy of the database

Tokens never pass through the driver. Ray restarts a buffer that died, from its database; a hung one is killed first.
The call is then repeated under the same name: the buffer returns the committed answer if there is one, else it does the
work.
"""

from __future__ import annotations

import math
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rllib_srl.common.remote_calls import ActorFailure, Call, Failure, gather
from rllib_srl.replay.intake import Visit
from rllib_srl.replay.ratings import RatedGroup
from rllib_srl.replay.rllib import RLlibReplayBuffer
from rllib_srl.replay.settings import ReplaySettings, check_importable
from rllib_srl.replay.store import DATABASE, SNAPSHOT, holder_of
from rllib_srl.types import GroupMeta, Prompt, listed

COUNTS = ("num_revisits_owed", "num_revisits_short", "num_reuses_owed", "num_reuses_short", "num_groups_lost")
RETRY_S = 0.2
RELEASE_S = 10.0  # wait for a killed process to release its database
LONG = 10  # times the timeout, for a snapshot and its restoration

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Slots:
    """Number of slots of the memory in a sequence of batches: a fraction .2 of batches of 4 gives 0 1 1 1 1, 0 1 1 ...

    Invariant: the sum of all slots returned is the exact fraction of all batches, rounded down; the carry is in [0, 1).
    Slots that the caller cannot fill are not carried over.
    """

    def __init__(self, fraction: float, is_added: bool = False) -> None:
        """Start with nothing carried; the fraction is taken as a decimal, so that .2 is exactly 1/5.

        Slots R that are added come on top of a batch of P, so that R / (P + R) is the fraction, not R / P.
        """
        self._is_added, self.carry = is_added, Fraction(0)
        self.change(fraction)

    def change(self, fraction: float) -> None:
        """Set another fraction; the carry, less than one slot, stays."""
        rate = Fraction(repr(float(fraction)))
        self._rate = rate / (1 - rate) if self._is_added else rate

    def owed(self, num: int) -> int:
        """Return the memory's slots in the next batch of `num`: floor(carry + rate num)."""
        total = self.carry + self._rate * num
        count = math.floor(total)
        self.carry = total - count
        return count


class BufferProcess:
    """A buffer in an actor of this node, or (`is_local`) in this process.

    Invariant: a call fails after at most 2 `timeout_s` (`call_long`: 22 `timeout_s`).
    """

    def __init__(self, actor: Any, is_local: bool, path: Path, timeout_s: float) -> None:
        """Wrap the buffer with its database at `path`: the handle of an actor, or a `RLlibReplayBuffer` (`is_local`).

        `timeout_s` limits a call and, separately, a restart with the repeated call.
        """
        self.actor, self.is_local, self.path, self._timeout_s = actor, is_local, path, timeout_s
        self.num_restarts = 0

    @classmethod
    def start(
        cls, settings: ReplaySettings, *, directory: Path, run: str, is_local: bool, timeout_s: float, **arguments: Any
    ) -> BufferProcess:
        """Start a buffer with further `arguments` of `SRLReplayBuffer`; return once it has opened its database.

        Raise what its constructor raises, or an `ActorFailure` if it did not start within `timeout_s`.
        """
        options = {"directory": directory, "run": run, **arguments}
        if is_local:
            actor: Any = RLlibReplayBuffer(settings, **options)
        else:
            check_importable(settings)
            # It reserves none of the node's GPUs in Ray, which would hide them. Its database is a local file.
            variables = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
            remote_class = ray.remote(RLlibReplayBuffer).options(
                name=f"rllib_srl.memory.{run}",
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
                **({"runtime_env": variables} if settings.searches_on_gpu else {}),
            )
            actor = remote_class.remote(settings, is_actor=True, **options)
        process = cls(actor, is_local, directory / DATABASE, settings.timeout_s)
        process.call(Call.of(RLlibReplayBuffer.__len__), timeout_s)
        return process

    def call(self, call: Call[Result], timeout_s: float = 0.0) -> Result:
        """Run a call; repeat it once the buffer that died or timed out is back. Raise what the buffer raises.

        `timeout_s` limits the first attempt and, separately, a restart with the repeated call; 0: the usual limit. An
        `ActorFailure` names the call that got no answer in time.
        """
        result: Result = self._returned(call, 1, timeout_s)[0]
        return result

    def call_both(self, call: Call[tuple[Result, Any]]) -> tuple[Result, Any]:
        """Run a call that returns two values; of an actor the second stays in the object store, as a reference."""
        first, second = self._returned(call, 2)
        return first, second

    def call_long(self, call: Call[Result]) -> Result:
        """Run a call that may take 10 times as long; an already hung buffer is still detected in the usual time."""
        self.call(Call.of(RLlibReplayBuffer.__len__))
        return self.call(call, LONG * self._timeout_s)

    def stop(self) -> None:
        """End the buffer; return when its database can be opened again, after at most `RELEASE_S` seconds."""
        if self.is_local:
            self.actor.close()
        else:
            ray.kill(self.actor)  # Ray answers before the process has ended
        deadline = time.monotonic() + RELEASE_S
        while holder_of(self.path) is not None and time.monotonic() < deadline:
            time.sleep(0.02)

    def _returned(self, call: Call[Any], num: int, timeout_s: float = 0.0) -> Sequence[Any]:
        """Return the first value of a call, and the other `num - 1`, of an actor as references."""
        if self.is_local:
            answer = self.actor.call(call.method, *call.args, **call.kwargs)
            return [answer] if num == 1 else list(answer)
        limit_s = timeout_s or self._timeout_s
        deadline = time.monotonic() + 2 * limit_s
        failure: Failure | None = None
        while (left_s := deadline - time.monotonic()) > 0:
            refs = self.actor.call.options(num_returns=num).remote(call.method, *call.args, **call.kwargs)
            refs = refs if isinstance(refs, list) else [refs]
            wait_s = left_s if failure else min(limit_s, left_s)  # a slow restart is not killed again
            ((_, answer),) = gather({0: refs[0]}, wait_s)
            if not isinstance(answer, Failure):
                return [answer, *refs[1:]]
            if failure is None:
                self.num_restarts += 1
                failure = answer
            if answer.is_hung:
                self._end()
            time.sleep(RETRY_S)
        raise ActorFailure(f"the memory {failure.reason if failure else 'had no time'} while running {call.method!r}")

    def _end(self) -> None:
        """Kill an unresponsive buffer, so that Ray restarts it.

        SIGKILL goes to the process that holds the database: a stopped (SIGSTOP) process ignores `ray.kill`.
        """
        if (holder := holder_of(self.path)) is None:
            ray.kill(self.actor, no_restart=False)
        else:
            with suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL)


class ReplayClient:
    """Handle of one run's memory, by the calls of `SRLReplayBuffer`; with capacity 0 it stores and draws nothing.

    Invariant: every remote call times out after 2 `timeout_s` (snapshot and restore: 22 `timeout_s`), and its effect is
    applied at most once.
    """

    def __init__(self, settings: ReplaySettings, process: BufferProcess | None) -> None:
        self.settings, self.is_on = settings, process is not None
        self._revisits, self._reuses = Slots(0.0), Slots(0.0, is_added=True)
        self.set_fractions()
        self._process = process
        self.num_items = 0
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._begin_incarnation()

    def _begin_incarnation(self) -> None:
        self._incarnation = uuid.uuid4().hex[:8]
        self._asked: Counter[str] = Counter()  # requests of each name

    @classmethod
    def start(cls, settings: ReplaySettings, **arguments: Any) -> ReplayClient:
        """Start the buffer as `BufferProcess.start` does; with capacity 0 start nothing."""
        return cls(settings, BufferProcess.start(settings, **arguments) if settings.is_on else None)

    @property
    def process(self) -> BufferProcess:
        if self._process is None:
            raise ValueError("this run has no memory; expected replay_capacity above 0")
        return self._process

    def draw_prompts(self, num_prompts: int, now: int, in_play: Collection[str] = ()) -> list[Prompt]:
        """Draw the revisits of an iteration of `num_prompts` prompts, at most `revisit_fraction` of them.

        The keys `in_play` are not drawn. Slots without an available item are counted in `num_revisits_short`.
        """
        num, prompts = self._owed(self._revisits, num_prompts), list[Prompt]()
        if num:
            prompts = self._do(now, RLlibReplayBuffer.draw_prompts, num, now, without=list(in_play))
        self.counts.update(num_revisits_owed=num, num_revisits_short=num - len(prompts))
        return prompts

    def add(self, groups: Sequence[GroupMeta], now: int, is_played: bool = True) -> dict[str, Visit]:
        """Store and grade groups; return the visits by group id. See `SRLReplayBuffer.add`."""
        if not groups or not self.is_on:
            return {}
        refs = [group.ref for group in groups]
        visits = self._do(now, RLlibReplayBuffer.add, refs, now, is_played=is_played)
        self.counts["num_groups_lost"] += len(groups) - len(visits)
        return {visit.group_id: visit for visit in visits}

    def draw_groups(
        self, num_played: int, now: int, version: int | None = None, exactly: int | None = None
    ) -> list[GroupMeta]:
        """Draw stored groups to train on with `num_played` played prompts, at most `reuse_fraction`.

        The groups stay in the object store. `version` as in `SRLReplayBuffer.draw_groups`; `exactly` is their number
        regardless of what was played, fewer only if fewer can be drawn.
        """
        num = self._owed(self._reuses, num_played) if exactly is None else exactly
        metas = self._draw("draw_groups", num, now, version=version) if num else []
        self.counts.update(num_reuses_owed=num, num_reuses_short=num - len(metas))
        return metas

    def draw_answers(
        self, num: int, now: int, without_domains: Sequence[str], without_keys: Sequence[str]
    ) -> list[GroupMeta]:
        """Draw right answers to hold; they stay in the object store. See `SRLReplayBuffer.draw_answers`."""
        return self._draw("draw_answers", num, now, without_domains=without_domains, without_keys=without_keys)

    def _draw(self, method: str, num: int, now: int, **arguments: Any) -> list[GroupMeta]:
        arguments["request"] = self._request(now, method)
        return listed(*self.process.call_both(Call.of(RLlibReplayBuffer.draw_apart, method, num, now, **arguments)))

    def drop_answers(self, env_ids: Sequence[str], now: int) -> int:
        return self._do(now, RLlibReplayBuffer.drop_answers, list(env_ids))

    def _owed(self, slots: Slots, num: int) -> int:
        least = min(self.settings.min_buffer_size, self.settings.capacity)  # a full memory is always drawn from
        return slots.owed(num) if self.is_on and self.num_items >= least else 0

    def set_fractions(self, revisit: float | None = None, reuse: float | None = None) -> None:
        """Set the replay fractions in use; None is that of the settings. Carried remainders are kept."""
        settings = self.settings
        self.revisit_fraction = settings.revisit_fraction if revisit is None else revisit
        self.reuse_fraction = settings.reuse_fraction if reuse is None else reuse
        self._revisits.change(self.revisit_fraction)
        self._reuses.change(self.reuse_fraction)

    def look_back(self, reused: Sequence[GroupMeta], num_left_out: Mapping[str, int], now: int) -> None:
        """Drop the reused groups all of whose episodes were left out of the update; `num_left_out` is by group id."""
        trained = {g.group_id: len(g.rewards_G) if g.has_reward_G is None else g.has_reward_G.sum() for g in reused}
        if gone := [name for name, num in trained.items() if num and num_left_out.get(name, 0) == num]:
            self._do(now, RLlibReplayBuffer.drop, gone)

    def rate_answers(self, groups: Sequence[RatedGroup], source: str, position: int, now: int) -> dict[str, int]:
        return self._do(now, RLlibReplayBuffer.rate_answers, list(groups), source, position, now)

    def rated_until(self, source: str) -> tuple[int, list[str]]:
        return self.process.call(Call.of(RLlibReplayBuffer.rated_until, source))

    def remove(self, keys: Collection[str] = (), before: int | None = None) -> int:
        return self.process.call(Call.of(RLlibReplayBuffer.remove, keys, None, before))

    def stats(self, now: int) -> dict[str, float]:
        stats = self.process.call(Call.of(RLlibReplayBuffer.stats, now))
        self.num_items = int(stats["num_items"])
        gauges = {name: float(value) for name, value in stats.items()}
        return {**gauges, "num_restarts": self.process.num_restarts, **self.counts}

    def snapshot(self, directory: Path) -> None:
        """Write a copy of the database into `directory`; without a memory write nothing."""
        if self.is_on:
            directory.mkdir(parents=True, exist_ok=True)
            self.process.call_long(Call.of(RLlibReplayBuffer.snapshot, directory / SNAPSHOT))

    def restore(self, directory: Path) -> int:
        """Restore the snapshot in `directory`; return the number of groups stored after it, which are dropped."""
        if not self.is_on:
            return 0
        num_dropped = self.process.call_long(Call.of(RLlibReplayBuffer.restore, directory / SNAPSHOT))
        self.num_items = self.process.call(Call.of(RLlibReplayBuffer.__len__))
        self._begin_incarnation()
        return num_dropped

    def check_fits(self, has_memory: bool) -> None:
        """Raise a ValueError if a checkpoint has a memory and this run has none, or the reverse."""
        if has_memory and not self.is_on:
            raise ValueError("the checkpoint has a memory, this run has none; expected replay_capacity above 0")
        if self.is_on and not has_memory:
            raise ValueError("the checkpoint has no memory, this run has one; expected replay_capacity = 0")

    def get_state(self) -> dict[str, Any]:
        """Return carried remainders and counts, {} without a memory; everything else is in the snapshots."""
        if not self.is_on:
            return {}
        carries = {"revisits": {"carry": str(self._revisits.carry)}, "reuses": {"carry": str(self._reuses.carry)}}
        return {**carries, "counts": dict(self.counts), "num_items": self.num_items}

    def set_state(self, state: Mapping[str, Any]) -> None:
        if self.is_on:
            for slots, name in ((self._revisits, "revisits"), (self._reuses, "reuses")):
                slots.carry = Fraction(state[name]["carry"])
            self.counts, self.num_items = Counter({**dict.fromkeys(COUNTS, 0), **state["counts"]}), state["num_items"]

    def stop(self) -> None:
        if self.is_on:
            self.process.stop()

    def _request(self, now: int, method: str) -> str:
        """Return a new request name, such as "3f2a91c0/12.add".

        The incarnation keeps a restarted or restored run from getting answers of its past; the suffix does so for an
        iteration that is retried after an error.
        """
        self._asked[f"{now}.{method}"] += 1
        num = self._asked[f"{now}.{method}"]
        return f"{self._incarnation}/{now}.{method}" + (f".{num}" if num > 1 else "")

    def _do(
        self,
        now: int,
        method: Callable[Concatenate[Any, Parameters], Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Run a method that changes the buffer, under a new request name."""
        named = {**kwargs, "request": self._request(now, method.__name__)}
        return self.process.call(Call(method.__name__, args, named))
