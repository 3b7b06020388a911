"""A world in which the policy may call tools before it answers.

    reset                     ->  "<tools><shots>Question: Ann has 86 apples and buys 71. How many?\n"
    step("Tool: 86 + 71\n")   ->  "Result: 157\n", 0.0
    step("Answer: 157\n")     ->  "", reward, terminated

A subclass is a world of questions (envs/question.py) that also says which tools an episode has, and which calls lead
to the answer. Everything else is here:
- the calls of a turn run in their order, each within `call_timeout_s`; a late one ends the episode, "tool_timeout";
- a call that does not fit its tool is answered with what is wrong, and the episode goes on;
- a turn that is neither call nor answer ends the episode, "unparsable", unless `forgiven_turns` are left;
- so does one of more than a million characters, or of more than a thousand calls: it is not read;
- after `max_calls` calls only an answer is taken; a further call ends the episode, "out_of_turns";
- a long result is cut, and says so.

Tools are made anew for each episode, so no state outlives it.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from envs import text
from envs.question import Question, QuestionSettings, QuestionWorld
from envs.tools.calls import CallError, Said, ToolCall, ToolTimeoutError, written_call
from envs.tools.deadline import run_within
from envs.tools.formats import CALL_FORMATS
from envs.tools.tool import Tool

TOOLS_IN = ("prompt", "template", "shots")

Reply = tuple[str, float, bool, bool, dict[str, Any]]


@dataclass(frozen=True)
class ToolSettings(QuestionSettings):
    """Settings that every world with tools has. Invariant: as in `QuestionSettings`."""

    call_format: str = "line"  # a name of `CALL_FORMATS`
    tools_in: str = "prompt"  # who shows the tools: the prompt, the model's chat template, or the shots alone
    max_calls: int = 8  # calls in an episode
    call_timeout_s: float = 5.0  # seconds a call may take
    max_result_chars: int = 2000  # of a result that are shown
    forgiven_turns: int = 0  # unreadable turns that are answered with what is wrong, before one ends the episode

    unused: ClassVar[tuple[str, ...]] = ()  # settings that a world has no use for, and so refuses to have set
    has_many_arguments: ClassVar[bool] = False  # its tools take more than the one text that a tag holds

    def faults(self) -> list[str]:
        """Return one line for each setting out of its range."""
        faults = super().faults()
        for name, known in (("call_format", tuple(CALL_FORMATS)), ("tools_in", TOOLS_IN)):
            if getattr(self, name) not in known:
                faults.append(f"{name} = {getattr(self, name)!r}; expected one of {', '.join(known)}")
        ranges = {"max_calls": (1, 1000), "max_result_chars": (20, 10**6), "forgiven_turns": (0, 100)}
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                faults.append(f"{name} = {getattr(self, name)}; expected {least} to {most}")
        faults += [
            f"{name} = {getattr(self, name)}; expected 0, for this world has no use for it"
            for name in self.unused
            if getattr(self, name)
        ]
        if self.has_many_arguments and self.call_format == "tags":
            faults.append("call_format = 'tags'; expected another one, for a tag holds one argument only")
        if not 0 < self.call_timeout_s <= 3600:
            faults.append(f"call_timeout_s = {self.call_timeout_s}; expected more than 0, at most 3600")
        if self.tools_in == "shots" and self.num_shots == 0:
            faults.append(
                "tools_in = 'shots' with num_shots = 0 shows no tools; expected shots, 'prompt' or 'template'"
            )
        return faults


class ToolWorld(QuestionWorld):
    """Questions answered with the help of tools.

    Invariant: as in `QuestionWorld`; and the tools of an episode see nothing of any other.
    """

    settings_class: ClassVar[type[QuestionSettings]] = ToolSettings
    settings: ToolSettings
    again = "Wrong. Try again.\n"
    bare_tool: ClassVar[str] = ""  # in the line format its one text argument may stand without name and brackets
    result_tag: ClassVar[str] = "result"  # of the tags format
    votes_by_calls: ClassVar[bool] = False  # what an episode says, to its group, are its calls and not an answer

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        self._tools: dict[str, Tool] = {}
        super().__init__(env_config)
        self._num_calls = self._num_faults = self._num_unreadable = 0

    @abstractmethod
    def tools(self, prompt_id: str) -> Sequence[Callable[..., Any] | Tool]:
        """Return the tools of one episode, made anew: functions with hints and a docstring, or `Tool`s."""

    def gold_calls(self, prompt_id: str) -> list[ToolCall]:
        """Return calls after which the answer is known, in their order; one a turn."""
        return []

    def tool_names(self) -> tuple[str, ...]:
        """Return the names that the format's closing tags depend on."""
        return (self.bare_tool,) if self.bare_tool else ()

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the episode's tools for the chat template; empty where the prompt shows them."""
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
        """Return the transcript of an episode that is played right, without its request."""
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
        """Return what the prompt says of the episode's tools: nothing where template or shots show them."""
        return self.format.instructions(list(self._tools.values())) if self.settings.tools_in == "prompt" else ""

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the turns that earn reward 1: the calls, then the answer."""
        calls = [self.format.call(call) for call in self.gold_calls(prompt_id)]
        return [*calls, self.format.answer(self.question(prompt_id).answer)]

    # --- the turns ----------------------------------------------------------------------------

    def _begin_episode(self) -> None:
        self._tools = self._made(self._asked_id)
        self._num_calls = self._num_faults = self._num_unreadable = 0

    def _made(self, prompt_id: str) -> dict[str, Tool]:
        tools = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in self.tools(prompt_id)]
        return {tool.name: tool for tool in tools}

    def _taken(self, action: str) -> Reply:
        said = self.format.read(action, self._tools)
        if said.calls:
            return self._called(action, said.calls)
        if said.fault:
            return self._unreadable(action, said.fault)
        return self._answered(action, said)

    def _answered(self, action: str, said: Said) -> Reply:
        """Take a turn without calls: by default, grade its answer."""
        return self._graded(action, self._answer_of(said))

    def _answer_of(self, said: Said) -> str:
        if said.answer is None and self.format.has_plain_answers and not said.calls and not said.fault:
            return said.text.strip()
        return said.answer or ""

    def answer_in(self, turn: str) -> str:
        """Return the answer that a turn hands in; nothing for one that makes calls."""
        return self._answer_of(self.format.read(turn, self._tools))

    def vote(self, prompt_id: str, turns: Sequence[str]) -> str | None:
        """Return what an episode comes to, whether right or not: its answer or, with `votes_by_calls`, its calls."""
        if not self.votes_by_calls:
            return super().vote(prompt_id, turns)
        said = [self.format.read(turn, self._made(prompt_id)) for turn in turns]
        calls = [written_call(call) for one in said for call in one.calls]
        has_spoken = any(not one.fault for one in said)
        return "; ".join(sorted(calls)) if has_spoken else None

    def _called(self, action: str, calls: Sequence[ToolCall]) -> Reply:
        if self._num_calls + len(calls) > self.settings.max_calls:
            return self._ended("out_of_turns")
        results = []
        for call in calls:
            self._num_calls += 1
            try:
                result, is_fault = self._run(self._tools, call)
            except ToolTimeoutError:
                return self._ended("tool_timeout")
            self._num_faults += is_fault
            results.append(result)
        return self._told(action, results)

    def _told(self, action: str, results: Sequence[str]) -> Reply:
        """Show the results of a turn's calls, and count."""
        info: dict[str, Any] = {"num_calls": self._num_calls, "num_call_faults": self._num_faults}
        if self.settings.tools_in == "template":  # the template shows results in its own way
            return "\n".join(results), 0.0, False, False, {**info, "role": "tool"}
        return text.reply(action, self.format.results(results)), 0.0, False, False, info

    def _unreadable(self, action: str, fault: str) -> Reply:
        self._num_unreadable += 1
        if self._num_unreadable > self.settings.forgiven_turns:
            return self._ended("unparsable")
        said = self.format.notice(f"Cannot be read: {presentable(fault, 500)}")
        return text.reply(action, said), 0.0, False, False, {}

    def _ended(self, stop_reason: str) -> Reply:
        """End the episode without a reward."""
        self._question, self._tools = None, {}
        is_cut = stop_reason == "out_of_turns"
        return "", 0.0, not is_cut, is_cut, {"stop_reason": stop_reason}

    def _run(self, tools: Mapping[str, Tool], call: ToolCall) -> tuple[str, bool]:
        """Return what a call yields, as text for the policy, and whether that is a complaint.

        Raises:
            ToolTimeoutError: the call was late.
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
        except ToolTimeoutError:
            raise
        except CallError as error:
            return presentable(f"Error: {error}", self.settings.max_result_chars), True
        except Exception as error:  # a tool may refuse in whatever way it likes; the policy is told and may mend it
            said = f"Error: {type(error).__name__}: {error}"
            return presentable(said, self.settings.max_result_chars), True
        return presentable(value, self.settings.max_result_chars), False


def presentable(value: Any, max_chars: int) -> str:
    """Return a result as text that UTF-8 can hold; a cut is stated in it.

    Args:
        value: text as it is, anything else as JSON, or as Python says it where JSON cannot
        max_chars: of the value that are shown
    """
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            value = str(value)
    value = value.encode("utf-8", "backslashreplace").decode()
    if len(value) <= max_chars:
        return value
    return f"{value[:max_chars]}\n[cut: the first {max_chars} of {len(value)} characters]"
