"""The environment `agent`: a program that calls the policy by itself, in as many conversations as it likes.

    reset(prompt_id)        starts the program on a task and waits for its first call
    answer_call(text, ...)  answers the call with the policy's turn and waits for the next one, or for the end
    refuse_call(code, ...)  answers it with an error

A call is `info["conversation"]`: messages, tools, `max_tokens` and `stop` as JSON. The answer that the program got is
`info["answered"]`. From these the player records every token as it was sampled (rllib_srl/rollout/conversations.py).

Calls that a program makes at the same time are answered one after the other. A program that fails costs its episode.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import gymnasium

from rllib_srl.envs import text
from rllib_srl.envs.agents.endpoint import Call, Ended, Refusal, endpoint
from rllib_srl.envs.agents.programs import CommandProgram, FunctionProgram, Program
from rllib_srl.envs.agents.requests import plain_message
from rllib_srl.envs.agents.responses import answer_of
from rllib_srl.envs.agents.tasks import Tasks
from rllib_srl.envs.question import read_settings
from rllib_srl.envs.rewards.loading import load_function
from rllib_srl.envs.tools.formats import CALL_FORMATS

HISTORY = ("split", "refuse")

Step = tuple[str, float, bool, bool, dict[str, Any]]


@dataclass(frozen=True)
class AgentSettings:
    """Settings of the environment `agent`. Invariant: `faults` is empty for one that was built."""

    agent: str = ""  # "my_module:run" or "file.py:run": run(client, task) -> reward from 0 to 1, sync or async
    agent_command: list[str] = field(default_factory=list)  # in place of it: a program and its arguments
    path: str = ""  # file of the tasks, one row each; "": {"seed": number}
    heldout_path: str = ""  # file of the held-out tasks; "": a fixed share of the others
    history: str = "split"  # a call that rewrites its conversation: "split" it off, or "refuse" it with status 400
    call_format: str = "native"  # how the policy writes calls of tools; a name of `CALL_FORMATS`
    domain: str = "agent"

    def faults(self) -> list[str]:
        """Return one error message for each setting out of its range."""
        faults = []
        if bool(self.agent) == bool(self.agent_command):
            faults.append(
                f"agent = {self.agent!r} and agent_command = {self.agent_command}; expected one of the two"
            )
        if self.agent and ":" not in self.agent:
            faults.append(f"agent = {self.agent!r}; expected 'my_module:run' or 'file.py:run'")
        if not all(isinstance(one, str) and one for one in self.agent_command):
            faults.append(f"agent_command = {self.agent_command!r}; expected a list of texts")
        for name, known in (("history", HISTORY), ("call_format", tuple(CALL_FORMATS))):
            if getattr(self, name) not in known:
                faults.append(f"{name} = {getattr(self, name)!r}; expected one of {', '.join(known)}")
        if not self.domain:
            faults.append("domain = ''; expected a name")
        return faults


class AgentError(RuntimeError):
    """The agent failed; the episode is lost."""


class Agent(gymnasium.Env[str, str]):
    """An agent program; see the module. Invariant: between episodes no program runs and no token is valid."""

    metadata: dict[str, Any] = {"render_modes": []}
    stop_strings: tuple[str, ...] = ()

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        """Check the settings, and load the function and the tasks.

        Raises:
            ValueError: a setting, the function or a file of tasks cannot be used.
        """
        self.observation_space = self.action_space = text.TextSpace()
        self.settings: AgentSettings = read_settings(AgentSettings, env_config, "agent")
        self.domain = self.settings.domain
        self._function = load_function(self.settings.agent, "agent") if self.settings.agent else None
        if self._function is not None and find_spec("openai") is None:
            raise ValueError("agent needs the package openai (pip install 'rllib_srl[agents]'), or set agent_command")
        self._tasks = Tasks(self.settings.path, self.settings.heldout_path)
        self._format = CALL_FORMATS[self.settings.call_format]()
        self._session: Any = None
        self._program: Program | None = None
        self._call: Call | None = None
        self._num_calls = 0

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield the prompt ids of a split; see `Tasks`."""
        return self._tasks.prompt_ids(split, seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start the agent on a task, and return its first call.

        Args:
            seed: of the generator that draws a training task when no prompt id is given
            options: "prompt_id"

        Raises:
            ValueError: an unknown option or prompt id, or a history: an agent cannot be put into the middle of a task.
            AgentError: the agent failed or ended before its first call.
        """
        super().reset(seed=seed)
        prompt_id, history = text.reset_options(options)
        if history:
            raise ValueError(f"a history of {len(history)} turns; expected none: an agent begins at the beginning")
        if prompt_id is None:
            prompt_id = next(self.prompt_ids("train", int(self.np_random.integers(2**31))))
        task = self._tasks.task(prompt_id)
        self._stop()
        server = endpoint()
        self._session = session = server.open()
        self._num_calls = 0
        where = (server.url, session.token, task, session.end)
        if self._function is not None:
            self._program = FunctionProgram(self._function, *where)
        else:
            self._program = CommandProgram(self.settings.agent_command, *where)
        try:
            self._program.start()
            observation, _, is_over, _, info = self._next("")
        except BaseException:
            self._stop()
            raise
        if is_over:
            raise AgentError("the agent ended without a call of the policy")
        return observation, {"prompt_id": prompt_id, **info}

    def step(self, action: str) -> Step:
        """Answer the call, for players that do not count tokens; see `answer_call`."""
        text.check_step(action, self._call is not None)
        return self.answer_call(action, "stop", 0, 0)

    def answer_call(self, turn: str, reason: str, num_prompt_tokens: int, num_tokens: int) -> Step:
        """Answer the call with a turn of the policy; return the next call, or the end with the reward.

        Args:
            turn: its text
            reason: "stop" or "length"
            num_prompt_tokens: tokens before the turn
            num_tokens: tokens of the turn

        Raises:
            AgentError: the agent failed, or did not return a reward.
        """
        call = self._taken()
        request = call.request
        call_id = f"call_{self._num_calls}"
        answer = answer_of(turn, request, self._format, call_id, reason, (num_prompt_tokens, num_tokens))
        if call.is_gone:
            return self._next("")
        call.end(answer)
        return self._next(json.dumps(plain_message(answer.message), ensure_ascii=False))

    def refuse_call(self, code: str, message: str) -> Step:
        """Answer the call with an error of status 400; return the next call, or the end with the reward."""
        self._taken().end(Refusal(400, code, message))
        return self._next("")

    def abandon(self) -> None:
        """End the episode from another thread, while `reset` or `answer_call` still waits in its own."""
        self._stop()

    def close(self) -> None:
        """End the episode, if one is under way."""
        self._stop()

    def _taken(self) -> Call:
        call, self._call = self._call, None
        if call is None:
            raise AgentError("no call is to be answered; call reset first")
        self._num_calls += 1
        return call

    def _next(self, answered: str) -> Step:
        """Wait for the next call or the end of the agent."""
        session = self._session
        event = session.wait() if session is not None else None
        told = {"answered": answered} if answered else {}
        if isinstance(event, Call):
            self._call = event
            return self._asked(event, told)
        self._stop()
        if not isinstance(event, Ended):
            raise AgentError("the episode was ended")
        if event.error:
            raise AgentError(event.error)
        return "", _reward(event.value), True, False, told

    def _asked(self, call: Call, told: Mapping[str, Any]) -> Step:
        request, messages = call.request, call.request.plain_messages()
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        limits = [one for one in (request.max_tokens, request.max_completion_tokens) if one is not None]
        conversation = {
            "messages": messages,
            "tools": json.dumps(tools, ensure_ascii=False) if tools else "",
            "max_tokens": min(limits, default=None),
            "stop": request.stops(),
            "refuses_rewriting": self.settings.history == "refuse",
        }
        info = {**told, "conversation": json.dumps(conversation, ensure_ascii=False)}
        return messages[-1]["content"], 0.0, False, False, info

    def _stop(self) -> None:
        """Close the session first, so that no further call of a dying program is taken."""
        session, program = self._session, self._program
        self._session = self._program = self._call = None
        if session is not None:
            endpoint().close(session)
        if program is not None:
            program.stop()


def _reward(value: Any) -> float:
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()  # of an array or a tensor without dimensions
    if isinstance(value, numbers.Real) and 0 <= float(value) <= 1:  # not nan either
        return float(value)
    shown = f"{value!r:.60}"
    raise AgentError(f"the agent returned {shown}, a {type(value).__name__}; expected its reward, a number from 0 to 1")
