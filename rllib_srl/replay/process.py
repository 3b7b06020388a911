"""The process of a run's buffer: calls with timeouts, and a restart when it dies or falls silent.

Ray restarts a buffer that died, from its database, and the call is repeated. A silent buffer is killed first.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rllib_srl.common.remote_calls import ActorFailure, Call, Failure, gather
from rllib_srl.replay.rllib import RLlibReplayBuffer
from rllib_srl.replay.settings import ReplaySettings, check_importable
from rllib_srl.replay.store import DATABASE, holder_of

RETRY_S = 0.2
RELEASE_S = 10.0  # wait for a killed process to release its database
LONG = 10  # times the timeout, for a snapshot and its restoration

Result = TypeVar("Result")


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

        Raises:
            ActorFailure: the actor did not start within `timeout_s`.
            Exception: raised by the buffer's constructor.
        """
        given = {"directory": directory, "run": run, **arguments}
        if is_local:
            actor: Any = RLlibReplayBuffer(settings, **given)
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
            actor = remote_class.remote(settings, is_actor=True, **given)
        process = cls(actor, is_local, directory / DATABASE, settings.timeout_s)
        process.call(Call.of(RLlibReplayBuffer.__len__), timeout_s)
        return process

    def call(self, call: Call[Result], timeout_s: float = 0.0) -> Result:
        """Run a call; repeat it once the buffer that died or timed out is back.

        `timeout_s` limits the first attempt and, separately, a restart with the repeated call; 0: the usual limit.

        Raises:
            ActorFailure: no answer came in time; the message names the call.
            Exception: raised by the buffer.
        """
        result: Result = self._returned(call, 1, timeout_s)[0]
        return result

    def call_both(self, call: Call[tuple[Result, Any]]) -> tuple[Result, Any]:
        """Run a call that returns two values; of an actor the second stays in the object store, as a reference."""
        first, second = self._returned(call, 2)
        return first, second

    def call_long(self, call: Call[Result]) -> Result:
        """Run a call that may take 10 times as long; an already silent buffer is still detected in the usual time."""
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
            if answer.is_silent:
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
