"""Multi-turn function calling: BFCL's multi-turn categories, where user requests are served by calls into simulators.

    Tools: cd(folder: str) - ...                         8 simulators, 10 to 60 functions
    User: Move 'final_report.pdf' within document directory to 'temp' directory in document. ...
    [cd(folder='document'), mkdir(dir_name='temp'), mv(source='final_report.pdf', destination='temp')]
    Result: {"current_working_directory": "document"}
    Result: null
    Result: {"result": "'final_report.pdf' moved to 'temp/final_report.pdf'"}
    Answer: done                                         a turn without calls: the user's next request
    User: Perform a detailed search using grep ...       after the last one: reward 1 or 0

A user turn passes if every simulator ends in the ground truth's state, and if every result that the ground truth
produced in this turn has occurred (in any order, at any time so far). An episode passes if all its user turns pass.

As in BFCL, a function that is not offered yet (miss_func) can be called: the ground truth of one task does so. One
difference: a number that would block the program (an exponent or a precision beyond 1000) is refused.

Source: Patil et al., 2025, BFCL; checks as in bfcl-eval 2026.3.23, multi_turn_checker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from rllib_srl.envs import text
from rllib_srl.envs.functions.simulators import CATEGORIES, Library, Simulation, Task, method_docs, tasks
from rllib_srl.envs.question import Listed, Question
from rllib_srl.envs.settings import OneOf, Within
from rllib_srl.envs.tools.calls import CallError, Said, ToolCall
from rllib_srl.envs.tools.deadline import run_within
from rllib_srl.envs.tools.tool import Tool
from rllib_srl.envs.tools.tool_questions import Reply, ToolQuestionEnv, ToolSettings, presentable


@dataclass(frozen=True)
class BfclSettings(ToolSettings):
    """Settings of `Bfcl`. Invariant: as in `ToolSettings`."""

    category: Annotated[str, OneOf(*CATEGORIES)] = "base"
    num_shots: int = 0
    call_format: str = "python"
    max_calls: int = 200
    max_result_chars: int = 20_000
    max_steps: Annotated[int, Within(1, 1000)] = 20  # turns with calls for one request, as in BFCL
    num_requests: Annotated[int, Within(0, 100)] = 0  # requests of an episode, the first ones; 0 = all
    # "episode": 1 if every user turn passes; "turns": the share of them that do.
    reward: Annotated[str, OneOf("episode", "turns")] = "episode"

    unused = ("num_shots", "feedback_turns", "forgiven_turns")
    has_many_arguments = True


class Bfcl(Listed, ToolQuestionEnv):
    """Requests served by calls into simulators.

    Invariant: a prompt id is a task's id in BFCL. Variants of a task in other categories are in the same split.
    """

    domain = "bfcl"
    votes_by_calls = True
    settings_class = BfclSettings
    settings: BfclSettings

    def _prepare(self) -> None:
        super()._prepare()
        self.domain = f"bfcl_{self.settings.category}"
        self._tasks = tasks(self.settings.category)
        self._ids = list(self._tasks)
        self._library = Library()

    def question(self, prompt_id: str) -> Question:
        """Return the first request; no text is its right answer."""
        task = self._task(prompt_id)
        asked = "\n".join(self._requests(task))
        return Question(asked, answer="done", wrong="done", canonical=f"bfcl multi-turn {task.number}")

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Raise: the calls are graded, not an answer in words."""
        raise NotImplementedError("Bfcl grades the state of its simulators")

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the ground truth: for each request one turn with its calls, then one turn without calls."""
        task, turns = self._task(prompt_id), []
        for calls in task.ground_truth[: len(self._requests(task))]:
            named = [self._named(task, call) for call in calls]
            turns += [self.format.call(*named)] if named else []
            turns.append(self.format.answer("done"))
        return turns

    def tools(self, prompt_id: str) -> Sequence[Tool]:
        """Return the functions that are offered with the first request."""
        task = self._task(prompt_id)
        later = {name for names in task.added.values() for name in names}
        return [tool for tool in self._all_tools(task) if tool.name not in later]

    # --- the turns ----------------------------------------------------------------------------

    def _begin_episode(self) -> None:
        super()._begin_episode()
        self._episode = _Episode(self._task(self._asked_id), self._library)

    def _opening(self) -> str:
        return (
            f"{self._instructions()}Serve each request of the user by calling tools until it is fulfilled; then say so "
            f"in a turn without a call.\n\n{self._user(self._episode.task.requests[0])}"
        )

    def _user(self, request: str) -> str:
        return request if self.settings.tools_in == "template" else f"User: {request}\n"

    def _called(self, action: str, calls: Sequence[ToolCall]) -> Reply:
        self._episode.num_steps += 1
        if self._episode.num_steps > self.settings.max_steps:
            return self._ended("out_of_turns")
        return super()._called(action, calls)

    def _run(self, tools: Mapping[str, Tool], call: ToolCall) -> tuple[str, bool]:
        limit = self.settings.max_result_chars
        try:
            if call.is_text and call.name in tools:
                call = ToolCall(call.name, (), tools[call.name].arguments(call))
            result = run_within(self.settings.call_timeout_s, self._episode.played.run, {"call": call})
        except CallError as error:
            result = f"Error: {error}"
        self._episode.results.append(result)
        return presentable(result, limit), result.startswith("Error")

    def _unreadable(self, action: str, error: str) -> Reply:
        self._num_unreadable += 1
        return self._answered(action, Said(text=action))  # as in BFCL, this ends the user's turn

    def _answered(self, action: str, said: Said) -> Reply:
        episode = self._episode
        episode.check_user_turn()
        episode.user_turn, episode.num_steps = episode.user_turn + 1, 0
        if episode.user_turn == len(self._requests(episode.task)):
            return self._finished()
        return text.reply(action, self._next_request()), 0.0, False, False, {}

    def _next_request(self) -> str:
        episode = self._episode
        added = episode.task.added.get(episode.user_turn, ())
        new = [tool for tool in self._all_tools(episode.task) if tool.name in added]
        self._tools.update({tool.name: tool for tool in new})
        request = episode.task.requests[episode.user_turn]
        if new:
            request = f"{self.format.instructions(new)}These tools are new. What about now? {request}".rstrip()
        return self._user(request)

    def _finished(self) -> Reply:
        passed, num_calls = self._episode.passed, self._num_calls
        reward = float(all(passed)) if self.settings.reward == "episode" else sum(passed) / len(passed)
        info = {"stop_reason": "unparsable"} if not num_calls and self._num_unreadable else {}
        self._question, self._tools = None, {}
        return "", reward, True, False, info

    # --- the tasks ----------------------------------------------------------------------------

    def _task(self, prompt_id: str) -> Task:
        if not isinstance(prompt_id, str) or prompt_id not in self._tasks:
            raise ValueError(f"prompt_id = {prompt_id!r}; expected a task such as {self._ids[0]!r}")
        return self._tasks[prompt_id]

    def _requests(self, task: Task) -> tuple[str, ...]:
        return task.requests[: self.settings.num_requests or None]

    def _all_tools(self, task: Task) -> list[Tool]:
        docs = [doc for name in task.classes for doc in method_docs(name)]
        return [Tool.declared(doc, _unused) for doc in docs]

    def _named(self, task: Task, call: ToolCall) -> ToolCall:
        """Return a call of the ground truth with all arguments by name, as JSON requires."""
        tool = next(tool for tool in self._all_tools(task) if tool.name == call.name)
        names = list(tool.parameters["properties"])
        return ToolCall(call.name, (), {**dict(zip(names, call.args)), **call.kwargs})


class _Episode:
    """The state of one episode: simulators, results and passed user turns.

    Invariant: `expected` is the ground truth's state after the user turns checked so far.
    """

    def __init__(self, task: Task, library: Library) -> None:
        self.task = task
        self.played, self.expected = Simulation(library, task), Simulation(library, task)
        self.results: list[str] = []  # of all calls so far
        self.passed: list[bool] = []  # one per user turn
        self.user_turn = self.num_steps = 0
        self._num_seen = 0

    def check_user_turn(self) -> None:
        """Run the ground truth of the user turn, and record whether the played turn passes."""
        wanted = [self.expected.run(call) for call in self.task.ground_truth[self.user_turn]]
        has_called = len(self.results) > self._num_seen
        self._num_seen = len(self.results)
        if not wanted:  # nothing could be done: calls made here count in the next user turn
            self.passed.append(True)
            return
        has_results = not Counter(wanted) - Counter(self.results)
        self.passed.append(has_called and has_results and self.played.has_state_of(self.expected))


def _unused() -> None:
    """Placeholder for a function that `Bfcl` calls itself."""
