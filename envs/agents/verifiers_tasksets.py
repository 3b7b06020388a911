"""Environments of `verifiers`: tasks that score themselves, and one agent whose harness plays them.

    loaded = Tasksets("my-taskset", {"agent": {"runtime": {"type": "subprocess"}}})
    loaded.tasks                                       its tasks by key
    await loaded.play(row, url, token)                 Played(reward, {"correct": 1.0, ...})

A harness calls the policy through a proxy of the library, which keeps one client for each address and key. All episodes
therefore share the key of the endpoint, and are told apart by the header that names their trace.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllib_srl.common.loading import load_function
from rllib_srl.envs.agents.endpoint import endpoint
from rllib_srl.envs.agents.tasks import Tasks
from rllib_srl.envs.agents.web import MODEL

# Of the environment variable with the key. The library keeps names with API_KEY from the programs that it starts.
KEY_VARIABLE = "SRL_ENDPOINT_API_KEY"


@dataclass(frozen=True)
class Played:
    """A scored rollout. Invariant: `metrics` has each reward and metric of the task by name."""

    reward: Any
    metrics: Mapping[str, float]


class RolloutError(RuntimeError):
    """A rollout failed for another reason than what the policy wrote."""


class Tasksets:
    """A loaded environment of one agent. Invariant: its shared servers run from the first rollout on."""

    def __init__(self, load: str, args: Mapping[str, Any]):
        """Load it.

        Args:
            load: id of an installed taskset, or "module:function" or "file.py:function" that returns an environment.
            args: of the configuration of its environment ("taskset", "agent", ...), or of the function.

        Raises:
            ValueError: it cannot be loaded, or needs what is not supported.
        """
        import verifiers.v1 as vf

        self._vf = vf
        said = f"load = {load!r}"
        try:
            if ":" in load:
                self._env = load_function(load, "load")(**args)
            else:
                config = {**args, "taskset": {**args.get("taskset", {}), "id": load}}
                self._env = vf.load_environment(vf.resolve_env_config(config))
        except Exception as error:  # a foreign function may raise anything
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{said} with args = {dict(args)!r} failed ({type(error).__name__}: {reason})") from error
        if not isinstance(self._env, vf.SingleAgentEnv):
            raise ValueError(
                f"{said} is a {type(self._env).__name__}; expected an environment of one agent (SingleAgentEnv): a "
                "reward belongs to one rollout"
            )
        agent = self._env.config.agent
        if agent.client is not None or agent.model is not None:
            raise ValueError(f"{said} gives its agent its own model; expected none, so that the policy plays")
        if agent.retries.max_retries or agent.retries.rules:
            raise ValueError(f"{said} repeats failed rollouts of its agent (agent.retries); expected none")
        if not self._env.taskset.bounded:
            raise ValueError(f"{said} has infinitely many tasks; expected a finite set")
        self._tasks = {str(task.key): task for task in self._env.taskset}
        if not self._tasks:
            raise ValueError(f"{said} has no tasks")
        self.tasks = Tasks.of({key: {"key": key} for key in self._tasks})
        self._serving: asyncio.Future[None] | None = None

    async def play(self, task: dict[str, Any], url: str, token: str) -> Played:
        """Play one task.

        Raises:
            RolloutError: something other than the policy made the rollout fail.
        """
        await self._served()
        os.environ[KEY_VARIABLE] = endpoint().key
        client = self._vf.EvalClientConfig(base_url=url, api_key_var=KEY_VARIABLE)
        context = self._vf.ModelContext(model=MODEL, client=client)
        episode = await self._env.run_episode(
            self._tasks[task["key"]], context, on_trace=lambda trace: endpoint().name(token, trace.id)
        )
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok or not episode.traces:
            reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise RolloutError(reasons or "it ended without a trace")
        trace = episode.traces[-1]
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: float(value) for name, value in {**trace.metrics, **scores}.items() if value is not None}
        return Played(trace.reward, metrics)

    async def _served(self) -> None:
        """Start the servers that all rollouts share, once; they run until the process ends."""
        if self._serving is None or (self._serving.done() and self._serving.exception() is not None):
            self._serving = asyncio.get_running_loop().create_future()
            self._server = asyncio.create_task(self._serve(self._serving))  # kept, as a task that nobody keeps may end
        await asyncio.shield(self._serving)

    async def _serve(self, started: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                started.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:  # whatever a server of the environment raises
            if not started.done():
                started.set_exception(error)
