"""Base of the environments whose program calls the policy by itself, in as many conversations as it likes.

    reset(prompt_id)        starts the program on a task and waits for its first call
    answer_call(text, ...)  answers the call with the policy's turn and waits for the next one, or for the end
    refuse_call(code, ...)  answers it with an error

A call is `info["conversation"]`: messages, tools, `max_tokens` and `stop` as JSON. The answer that the program got is
`info["answered"]`. From these the player records every token as it was sampled (rllib_srl/rollout/conversations.py).

Calls that a program makes at the same time are answered one after the other. A program that fails costs its episode.
A subclass names its tasks and starts its program.
"""

from __future__ import annotations

import json
import numbers
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium

from rllib_srl.envs import text
from rllib_srl.envs.agents.endpoint import Call, Ended, endpoint
from rllib_srl.envs.agents.programs import Program, bypass_proxy
from rllib_srl.envs.agents.requests import plain_message
from rllib_srl.envs.agents.responses import answer_of
from rllib_srl.envs.agents.tasks import Tasks
from rllib_srl.envs.agents.web import Refusal
from rllib_srl.envs.tools.formats import CALL_FORMATS

HISTORY = ("split", "refuse")

Step = tuple[str, float, bool, bool, dict[str, Any]]


class AgentError(RuntimeError):
    """The agent failed; the episode is lost."""


class CallingEnvironment(gymnasium.Env[str, str]):
    """A program that calls the policy; see the module.

    Invariant: between episodes no program runs and no token is valid.
    """

    metadata: dict[str, Any] = {"render_modes": []}
    stop_strings: tuple[str, ...] = ()

    def __init__(self, domain: str, history: str, call_format: str):
        """Set what all of them have.

        Args:
            domain: of all tasks.
            history: one of `HISTORY`.
            call_format: a name of `CALL_FORMATS`.
        """
        bypass_proxy()  # before an agent's module makes a client
        self.observation_space = self.action_space = text.TextSpace()
        self.domain = domain
        self._refuses_rewriting = history == "refuse"
        self._format = CALL_FORMATS[call_format]()
        self._session: Any = None
        self._program: Program | None = None
        self._call: Call | None = None
        self._num_calls = 0

    @abstractmethod
    def tasks(self) -> Tasks:
        """Return the tasks."""

    @abstractmethod
    def program(self, task: dict[str, Any], url: str, token: str, on_end: Callable[[Ended], None]) -> Program:
        """Return the program of an episode, not started.

        Args:
            task: to be solved.
            url: of the endpoint.
            token: of the episode.
            on_end: to be called once, with the reward or the reason why there is none.
        """

    def outcome(self, value: Any) -> tuple[float, dict[str, Any]]:
        """Return the reward, and what else the info of the last step has, of what the program returned.

        Raises:
            AgentError: it is not a reward.
        """
        return _reward(value), {}

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield the prompt ids of a split; see `Tasks`."""
        return self.tasks().prompt_ids(split, seed)

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
            raise ValueError(f"history has {len(history)} turns; expected none: an agent always starts a new episode")
        if prompt_id is None:
            prompt_id = next(self.prompt_ids("train", int(self.np_random.integers(2**31))))
        task = self.tasks().task(prompt_id)
        self._stop()
        bypass_proxy()
        server = endpoint()
        self._session = session = server.open()
        self._num_calls = 0
        self._program = self.program(task, server.url, session.token, session.end)
        try:
            self._program.start()
            observation, _, is_over, _, info = self._next("")
        except BaseException:
            self._stop()
            raise
        if is_over:
            raise AgentError("the agent ended without a request to the model; expected at least one")
        return observation, {"prompt_id": prompt_id, **info}

    def step(self, action: str) -> Step:
        """Answer the call, for players that do not count tokens; see `answer_call`."""
        text.check_step(action, self._call is not None)
        return self.answer_call(action, "stop", 0, 0)

    def answer_call(
        self,
        turn: str,
        reason: str,
        num_prompt_tokens: int,
        num_tokens: int,
        prompt_ids: Sequence[int] = (),
        token_ids: Sequence[int] = (),
    ) -> Step:
        """Answer the call with a turn of the policy; return the next call, or the end with the reward.

        Args:
            turn: its text
            reason: "stop" or "length"
            num_prompt_tokens: tokens before the turn
            num_tokens: tokens of the turn
            prompt_ids: the tokens before the turn
            token_ids: those of the turn

        Raises:
            AgentError: the agent failed, or did not return a reward.
        """
        call = self._taken()
        request = call.request
        call_id = f"call_{self._num_calls}"
        ids = ([int(token) for token in prompt_ids], [int(token) for token in token_ids])
        answer = answer_of(turn, request, self._format, call_id, reason, (num_prompt_tokens, num_tokens), ids)
        if call.is_gone or not call.answer(answer):
            return self._next("")
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
            raise AgentError("no call waits for an answer; call reset first")
        self._num_calls += 1
        return call

    def _next(self, answered: str) -> Step:
        """Wait for the next call or the end of the agent."""
        session = self._session
        event = session.wait() if session is not None else None
        extra = {"answered": answered} if answered else {}
        if isinstance(event, Call):
            self._call = event
            return self._asked(event, extra)
        self._stop()
        if not isinstance(event, Ended):
            raise AgentError("the episode was ended")
        if event.error:
            raise AgentError(event.error)
        reward, more = self.outcome(event.value)
        return "", reward, True, False, {**extra, **more}

    def _asked(self, call: Call, extra: Mapping[str, Any]) -> Step:
        request, messages = call.request, call.request.plain_messages()
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
        conversation = {
            "messages": messages,
            "tools": json.dumps(tools, ensure_ascii=False) if tools else "",
            "max_tokens": min(limits, default=None),
            "stop": request.stops(),
            "refuses_rewriting": self._refuses_rewriting,
        }
        if arguments := request.template_arguments():
            conversation["template"] = json.dumps(arguments, sort_keys=True)
        info = {**extra, "conversation": json.dumps(conversation, ensure_ascii=False)}
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
