"""Base class for environments in which the policy may call tools before it answers.

    reset                     ->  "<tools><shots>Question: Ann has 86 apples and buys 71. How many?\n"
    step("Tool: 86 + 71\n")   ->  "Result: 157\n", 0.0
    step("Answer: 157\n")     ->  "", reward, terminated

A subclass is a question environment (envs/question.py) that also defines the tools of an episode and the calls that
lead to the answer. This module implements the rest:
- the calls of a turn run in order, each within `call_timeout_s`; a late one ends the episode, "tool_timeout";
- a call that does not fit its tool gets an error reply, and the episode continues;
- a turn that is neither call nor answer ends the episode, "unparsable", unless `forgiven_turns` are left;
- a turn of more than a million characters or a thousand calls is not read and ends the episode in the same way;
- after `max_calls` calls only an answer is accepted; a further call ends the episode, "out_of_turns";
- a long result is truncated, with a note.

Tools are made anew for each episode, so no state outlives it.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from rllib_srl.envs import text
from rllib_srl.envs.question import Question, QuestionEnv, QuestionSettings
from rllib_srl.envs.settings import OneOf, Within
from rllib_srl.envs.tools.calls import CallError, Said, ToolCall, ToolServerError, ToolTimeoutError, written_call
from rllib_srl.envs.tools.deadline import run_within
from rllib_srl.envs.tools.formats import CALL_FORMATS
from rllib_srl.envs.tools.tool import Tool

TOOLS_IN = ("prompt", "template", "shots")

Reply = tuple[str, float, bool, bool, dict[str, Any]]


@dataclass(frozen=True)
class ToolSettings(QuestionSettings):
    """Settings of every environment with tools. Invariant: as in `QuestionSettings`."""

    call_format: Annotated[str, OneOf(*CALL_FORMATS)] = "line"
    tools_in: Annotated[str, OneOf(*TOOLS_IN)] = "prompt"  # what shows the tools: "template" is the model's
    max_calls: Annotated[int, Within(1, 1000)] = 8  # calls in an episode
    call_timeout_s: Annotated[float, Within(0, 3600, is_open=True)] = 5.0  # seconds a call may take
    max_result_chars: Annotated[int, Within(20, 10**6)] = 2000  # of a result that are shown
    forgiven_turns: Annotated[int, Within(0, 100)] = 0  # unreadable turns that get an error reply before one ends it

    unused: ClassVar[tuple[str, ...]] = ()  # settings that the environment does not use and refuses
    has_many_arguments: ClassVar[bool] = False  # its tools take more than the one text that a tag holds

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        errors = [
            f"{name} = {getattr(self, name)}; expected 0: this environment does not use it"
            for name in self.unused
            if getattr(self, name)
        ]
        if self.has_many_arguments and self.call_format == "tags":
            errors.append("call_format = 'tags'; expected another one: a tag holds only one argument")
        if self.tools_in == "shots" and self.num_shots == 0:
            errors.append(
                "tools_in = 'shots' with num_shots = 0 shows no tools; expected shots, 'prompt' or 'template'"
            )
        return errors


class ToolQuestionEnv(QuestionEnv):
    """Questions answered with the help of tools.

    Invariant: as in `QuestionEnv`; and the tools of an episode share no state with other episodes.
    """

    settings_class: ClassVar[type[QuestionSettings]] = ToolSettings
    settings: ToolSettings
    again = "Wrong. Try again.\n"
    bare_tool: ClassVar[str] = ""  # tool whose one text argument needs no name and brackets in the line format
    result_tag: ClassVar[str] = "result"  # of the tags format
    votes_by_calls: ClassVar[bool] = False  # an episode's vote in its group is its calls, not an answer

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        self._tools: dict[str, Tool] = {}
        super().__init__(env_config)
        self._num_calls = self._num_errors = self._num_unreadable = 0

    @abstractmethod
    def tools(self, prompt_id: str) -> Sequence[Callable[..., Any] | Tool]:
        """Return the tools of one episode, made anew: functions with hints and a docstring, or `Tool`s."""

    def gold_calls(self, prompt_id: str) -> list[ToolCall]:
        """Return the calls that lead to the answer, in order; one per turn."""
        return []

    def tool_names(self) -> tuple[str, ...]:
        """Return the tool names that determine the format's closing tags."""
        return (self.bare_tool,) if self.bare_tool else ()

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the episode's tools for the chat template; empty if the prompt shows them."""
        return [tool.schema() for tool in self._tools.values()] if self.settings.tools_in == "template" else []

    def _prepare(self) -> None:
        keywords = {"result_tag": self.result_tag} if self.settings.call_format == "tags" else {}
        self.format = CALL_FORMATS[self.settings.call_format](bare_tool=self.bare_tool, **keywords)
        self.stop_strings = self.format.stop_strings(self.tool_names())

    # --- the prompt ---------------------------------------------------------------------------

    def _draw_shots(self) -> list[Question]:
        shots = super()._draw_shots()
        self._solved = [self._solution(prompt_id) for prompt_id in self._shot_ids()]
        return shots

    def _shot(self, index: int, question: Question) -> str:
        is_retried = self.settings.feedback_turns > 0 and index % 2 == 1
        wrong = self._wrong_turn(question)
        tried = wrong + text.reply(wrong, self.again) if is_retried else ""
        return self._request(question) + tried + self._solved[index] + "\n\n"

    def _wrong_turn(self, question: Question) -> str:
        return self.format.answer(question.wrong)

    def _solution(self, prompt_id: str) -> str:
        """Return the transcript of a correctly played episode, without its request."""
        tools, written = self._made(prompt_id), ""
        for call in self.gold_calls(prompt_id):
            turn = self.format.call(call)
            written += turn + text.reply(turn, self.format.results([self._run(tools, call)[0]]))
        return (written + self.format.answer(self.question(prompt_id).answer)).removesuffix("\n")

    def _request(self, question: Question) -> str:
        return f"Question: {question.text}\n"

    def _opening(self) -> str:
        assert self._question is not None
        return self._instructions() + self._header + self._request(self._question)

    def _instructions(self) -> str:
        """Return the prompt's description of the tools; empty if the chat template or the shots show them."""
        return self.format.instructions(list(self._tools.values())) if self.settings.tools_in == "prompt" else ""

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the turns that earn reward 1: the calls, then the answer."""
        calls = [self.format.call(call) for call in self.gold_calls(prompt_id)]
        return [*calls, self.format.answer(self.question(prompt_id).answer)]

    # --- the turns ----------------------------------------------------------------------------

    def _begin_episode(self) -> None:
        self._tools = self._made(self._asked_id)
        self._num_calls = self._num_errors = self._num_unreadable = 0

    def _made(self, prompt_id: str) -> dict[str, Tool]:
        tools = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in self.tools(prompt_id)]
        return {tool.name: tool for tool in tools}

    def _taken(self, action: str) -> Reply:
        said = self.format.read(action, self._tools)
        if said.calls:
            return self._called(action, said.calls)
        if said.error:
            return self._unreadable(action, said.error)
        return self._answered(action, said)

    def _answered(self, action: str, said: Said) -> Reply:
        """Take a turn without calls: by default, grade its answer."""
        return self._graded(action, self._answer_of(said))

    def _answer_of(self, said: Said) -> str:
        if said.answer is None and self.format.has_plain_answers and not said.calls and not said.error:
            return said.text.strip()
        return said.answer or ""

    def answer_in(self, turn: str) -> str:
        """Return the answer that a turn states; empty for one that makes calls."""
        return self._answer_of(self.format.read(turn, self._tools))

    def vote(self, prompt_id: str, turns: Sequence[str]) -> str | None:
        """Return the outcome of an episode, right or wrong: its answer or, with `votes_by_calls`, its calls."""
        if not self.votes_by_calls:
            return super().vote(prompt_id, turns)
        said = [self.format.read(turn, self._made(prompt_id)) for turn in turns]
        calls = [written_call(call) for reading in said for call in reading.calls]
        has_spoken = any(not reading.error for reading in said)
        return "; ".join(sorted(calls)) if has_spoken else None

    def _called(self, action: str, calls: Sequence[ToolCall]) -> Reply:
        if self._num_calls + len(calls) > self.settings.max_calls:
            return self._ended("out_of_turns")
        results = []
        for call in calls:
            self._num_calls += 1
            try:
                result, is_error = self._run(self._tools, call)
            except ToolTimeoutError:
                return self._ended("tool_timeout")
            self._num_errors += is_error
            results.append(result)
        return self._results_reply(action, results)

    def _results_reply(self, action: str, results: Sequence[str]) -> Reply:
        """Show the results of a turn's calls, and count the calls."""
        info: dict[str, Any] = {"num_calls": self._num_calls, "num_call_errors": self._num_errors}
        if self.settings.tools_in == "template":  # the template formats results itself
            return "\n".join(results), 0.0, False, False, {**info, "role": "tool"}
        return text.reply(action, self.format.results(results)), 0.0, False, False, info

    def _unreadable(self, action: str, error: str) -> Reply:
        self._num_unreadable += 1
        if self._num_unreadable > self.settings.forgiven_turns:
            return self._ended("unparsable")
        said = self.format.notice(f"Cannot be read: {presentable(error, 500)}")
        return text.reply(action, said), 0.0, False, False, {}

    def _ended(self, stop_reason: str) -> Reply:
        """End the episode without a reward."""
        self._question, self._tools = None, {}
        is_cut = stop_reason == "out_of_turns"
        return "", 0.0, not is_cut, is_cut, {"stop_reason": stop_reason}

    def _run(self, tools: Mapping[str, Tool], call: ToolCall) -> tuple[str, bool]:
        """Return the result of a call as text for the policy, and whether it is an error message.

        Raises:
            ToolTimeoutError: the call was late.
            ToolServerError: the tool's server failed.
        """
        tool = tools.get(call.name)
        try:
            if tool is None:
                raise CallError(f"there is no tool {call.name[:60]!r}; expected one of {', '.join(tools)}")
            arguments = tool.arguments(call)
            if tool.is_bounded:
                value = tool.function(**arguments)
            else:
                value = run_within(self.settings.call_timeout_s, tool.function, arguments)
        except (ToolTimeoutError, ToolServerError):
            raise
        except CallError as error:
            return presentable(f"Error: {error}", self.settings.max_result_chars), True
        except Exception as error:  # a tool may raise anything; the policy sees the message and may correct the call
            said = f"Error: {type(error).__name__}: {error}"
            return presentable(said, self.settings.max_result_chars), True
        return presentable(value, self.settings.max_result_chars), False


def presentable(value: Any, max_chars: int) -> str:
    """Return a result as text that UTF-8 can encode; a cut is noted in it.

    Args:
        value: text as it is, anything else as JSON, or as its `repr` if JSON cannot represent it
        max_chars: most characters of the value that are shown
    """
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            value = str(value)
    shown: str = value.encode("utf-8", "backslashreplace").decode()
    if len(shown) <= max_chars:
        return shown
    return f"{shown[:max_chars]}\n[cut: the first {max_chars} of {len(shown)} characters]"
