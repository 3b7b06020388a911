"""Load and play environments of `verifiers` below 0.4: `SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv` and their kin.

    loaded = Classic("my-env", {"difficulty": 3})      calls load_environment(difficulty=3) of the module my_env
    loaded.tasks                                       rows of its data sets by prompt id
    await loaded.play(row, url, token)                 Played(reward, {"correct": 1.0, ...})

The environment rolls out by itself, with a client of the endpoint: its system prompt, examples, tools, turns, stop
conditions and rubric are its own. Rewards that compare the rollouts of a group are refused: a rollout is scored alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rllib_srl.common.loading import load_function
from rllib_srl.envs.agents.programs import async_client
from rllib_srl.envs.agents.tasks import Tasks, ids_of
from rllib_srl.envs.agents.verifiers_parts import Played, RolloutError
from rllib_srl.envs.agents.web import MODEL

# Errors of a rollout that the policy has caused; it then has the reward that the rubric gives it.
POLICY_ERRORS = ("EmptyModelResponseError", "OverlongPromptError", "ToolError", "ToolParseError", "ToolCallError")


class Classic:
    """A loaded environment. Invariant: it scores every rollout alone."""

    def __init__(self, load: str, args: Mapping[str, Any]):
        """Load it.

        Args:
            load: id of an installed environment, or "module:function" or "file.py:function" that returns one.
            args: of its `load_environment`.

        Raises:
            ValueError: it cannot be loaded, or needs what is not supported.
        """
        import verifiers as vf

        self._vf = vf
        said = f"load = {load!r}"
        _leave_signals_alone(vf)
        try:
            self._env = load_function(load, "load")(**args) if ":" in load else vf.load_environment(load, **args)
        except Exception as error:  # a foreign function may raise anything
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{said} with args = {dict(args)!r} failed ({type(error).__name__}: {reason})") from error
        if not isinstance(self._env, vf.Environment):
            raise ValueError(f"{said} returned a {type(self._env).__name__}; expected an environment of verifiers")
        self._refuse_groups(said)
        self.tasks = self._tasks(said)

    def _refuse_groups(self, said: str) -> None:
        parts = [self._env, *getattr(self._env, "envs", ())]  # of an EnvGroup
        for part in parts:
            if part.requires_group_rollouts or getattr(part, "provides_advantages", False):
                raise ValueError(
                    f"{said}: its rubric scores the rollouts of a group together; expected rewards of one rollout "
                    "each: a group is played and graded one episode at a time"
                )
            if not part.score_rollouts:
                raise ValueError(f"{said} has score_rollouts = False; expected rewards to train on")

    def _tasks(self, said: str) -> Tasks:
        train, heldout = self._env.build_dataset(), self._env.build_eval_dataset()
        if train is None or not len(train):
            raise ValueError(f"{said} has no data set to train on, or an empty one")
        return Tasks.of(ids_of(train, "example_id"), None if heldout is None else ids_of(heldout, "example_id"))

    async def play(self, task: dict[str, Any], url: str, token: str) -> Played:
        """Roll out one row, and score it.

        Raises:
            RolloutError: something other than the policy made the rollout fail.
        """
        async with async_client(url, token) as openai:
            client = self._vf.OpenAIChatCompletionsClient(openai)
            output = await self._env.run_rollout(task, client, MODEL, dict(self._env.sampling_args))
        error = output.get("error")
        if error and error["error"] not in POLICY_ERRORS:
            raise RolloutError(error.get("error_chain_repr") or error["error"])
        metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
        return Played(output["reward"], metrics)


def _leave_signals_alone(vf: Any) -> None:
    """Keep its environments from setting the handlers of SIGINT and SIGTERM.

    They do so as they are made, which Python allows in a main thread only, and would replace the handlers of the run.
    """
    module: Any = sys.modules[vf.Environment.__module__]
    if hasattr(module, "signal") and not isinstance(module.signal, SimpleNamespace):
        own = module.signal
        module.signal = SimpleNamespace(
            SIGINT=own.SIGINT, SIGTERM=own.SIGTERM, default_int_handler=own.default_int_handler,
            signal=lambda number, handler: None,
        )  # fmt: skip
