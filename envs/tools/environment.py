"""Questions answered with plain Python functions as tools: `ToolEnvironment`, the public form of `ToolQuestionEnv`.

    def add(a: int, b: int) -> int:
        '''Add two numbers.'''
        return a + b

    ToolEnvironment(tools=[add], questions=[{"question": "What is 86 + 71?", "answer": "157"}, ...])

    Tool: add(86, 71)           the policy's first turn
    Result: 157                 the environment's reply
    Answer: 157                 the policy's second turn: reward 1

Schemas come from signatures and docstrings (envs/tools/tool.py), calls, timeouts and limits from `ToolSettings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rllib_srl.envs.math.data_files import RowError, rows_of
from rllib_srl.envs.math.final_answers import graded
from rllib_srl.envs.math.grading import DEADLINE_S
from rllib_srl.envs.math.question_rows import Problem, problem_of
from rllib_srl.envs.math.row_prompts import RowPrompts, add_problem
from rllib_srl.envs.question import Question
from rllib_srl.envs.rewards.scoring import Rewards
from rllib_srl.envs.tools.calls import ToolCall
from rllib_srl.envs.tools.mcp_server import McpSettings, McpTools
from rllib_srl.envs.tools.tool import Tool
from rllib_srl.envs.tools.tool_questions import Reply, ToolQuestionEnv, ToolSettings

REWARD_TIMEOUT_S = 8.0

ToolFunction = Callable[..., Any]


class ToolEnvironment(RowPrompts, ToolQuestionEnv):
    """Questions with tools that are plain functions.

    A subclass may override `tools`, `gold_calls` and `grade`; all other parts are settings. Invariant: prompt ids
    are those of `id_of` (envs/math/row_prompts.py); equal arguments make equal environments.
    """

    settings: ToolSettings

    def __init__(
        self,
        tools: Sequence[ToolFunction | Tool] = (),
        questions: str | Path | Sequence[Mapping[str, Any]] = (),
        reward: Callable[..., float] | None = None,
        *,
        mcp: Mapping[str, Any] | None = None,
        domain: str = "tools",
        **settings: Any,
    ):
        """Check the tools, the questions and the settings.

        Args:
            tools: functions with type hints and a docstring. They are shared by all episodes: one with a state of its
                own needs a subclass whose `tools` makes it anew.
            questions: rows with a question and its answer, or a file of them (docs/own-data.md)
            reward: f(prompt, answer, row) -> number from 0 to 1; None: answers are compared with the right one
            mcp: a server with further tools, as `McpSettings`: {"command": ["uvx", "mcp-server-time"]}
            domain: the kind of task, counted apart
            settings: of `ToolSettings`, such as call_format="json", max_calls=4, num_shots=2

        Raises:
            ValueError: names each tool without hints or docstring, each row that cannot be used, or a wrong setting.
        """
        self.domain = domain
        self._listed_tools = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in tools]
        if not self._listed_tools and mcp is None:
            raise ValueError("tools = []; expected at least one function, or mcp")
        self._reward = None if reward is None else Rewards.of_function(reward, REWARD_TIMEOUT_S)
        self._problems = _problems_of(questions, has_reward=reward is not None)
        self._ids = list(self._problems)
        self._mcp: McpTools | None = None
        super().__init__({"num_shots": 0, **settings})
        self._mcp = None if mcp is None else McpTools(mcp, self.settings.call_timeout_s)

    def tools(self, prompt_id: str) -> Sequence[ToolFunction | Tool]:
        """Return the tools of an episode."""
        return [*self._listed_tools, *(self._mcp.tools if self._mcp else ())]

    def _begin_episode(self) -> None:
        if self._mcp is not None:
            self._mcp.begin_episode()
        super()._begin_episode()

    def close(self) -> None:
        """End a server of this environment's own."""
        if self._mcp is not None:
            self._mcp.close()

    def gold_calls(self, prompt_id: str) -> list[ToolCall]:
        """Return the calls that lead to the answer, for shots and tests; none are known."""
        return []

    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`."""
        problem = self._problem(prompt_id)
        return Question(problem.question, problem.answer, wrong="unknown", canonical=problem.question)

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return the grade of an answer in [0, 1], None if it cannot be read.

        Raises:
            RewardError: the reward function gave no reward.
        """
        problem = self._problem(prompt_id)
        if self._reward is not None:
            return self._reward.score(problem.question, answer, problem.row).total
        kind = "choice" if problem.is_choice else "auto"
        return graded(problem.answer, answer, "any", kind, DEADLINE_S, question=problem.question).grade

    def _graded(self, action: str, answer: str) -> Reply:
        observation, reward, terminated, truncated, info = super()._graded(action, answer)
        return observation, reward, terminated, truncated, {**info, "num_calls": self._num_calls}


class Mcp(ToolEnvironment):
    """The environment `mcp`: the tools of an MCP server, and `tasks`, rows of questions or a file of them."""

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        """Divide the settings into those of the server and those of `ToolEnvironment`."""
        settings = {"domain": "mcp", **(env_config or {})}
        of_server, of_tools = ({field.name for field in fields(kind)} for kind in (McpSettings, ToolSettings))
        known = {*of_server, *of_tools, "tasks", "reward", "domain"}
        if unknown := sorted(settings.keys() - known):
            known_names = ", ".join(sorted(known))
            raise ValueError(f"env_config of mcp: {unknown[0]} is not a setting; expected one of {known_names}")
        if not settings.get("tasks"):
            raise ValueError("env_config of mcp: tasks is missing; expected rows with question and answer, or a file")
        server = {name: settings.pop(name) for name in of_server & settings.keys()}
        super().__init__((), settings.pop("tasks"), mcp=server, **settings)


def _problems_of(questions: str | Path | Sequence[Mapping[str, Any]], has_reward: bool) -> dict[str, Problem]:
    rows = rows_of(Path(questions).expanduser()) if isinstance(questions, str | Path) else enumerate(questions, 1)
    problems: dict[str, Problem] = {}
    errors = []
    for number, row in rows:
        try:
            add_problem(problems, problem_of(row, has_reward=has_reward))
        except RowError as error:
            errors.append(f"row {number}, {error}")
    if errors or not problems:
        more = f"; and {len(errors) - 5} more rows" if len(errors) > 5 else ""
        raise ValueError(f"questions: {'; '.join(errors[:5]) or 'expected at least one row'}{more}")
    return problems
