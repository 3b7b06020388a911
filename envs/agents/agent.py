"""The environment `agent`: an agent of the user's, a function or any other program (docs/agents.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any

from rllib_srl.common.loading import load_function
from rllib_srl.envs.agents.endpoint import Ended
from rllib_srl.envs.agents.environment import HISTORY, CallingEnvironment
from rllib_srl.envs.agents.programs import CommandProgram, FunctionProgram, Program
from rllib_srl.envs.agents.tasks import Tasks
from rllib_srl.envs.settings import OneOf, Settings, read_settings
from rllib_srl.envs.tools.formats import CALL_FORMATS


@dataclass(frozen=True)
class AgentSettings(Settings):
    """Settings of the environment `agent`. Invariant: as in `Settings`."""

    agent: str = ""  # "my_module:run" or "file.py:run": run(client, task) -> reward from 0 to 1, sync or async
    agent_command: list[str] = field(default_factory=list)  # in place of it: a program and its arguments
    path: str = ""  # file of the tasks, one row each; "": {"seed": number}
    heldout_path: str = ""  # file of the held-out tasks; "": a fixed share of the others
    # A call that rewrites its conversation: "split" it off, or "refuse" it with status 400.
    history: Annotated[str, OneOf(*HISTORY)] = "split"
    call_format: Annotated[str, OneOf(*CALL_FORMATS)] = "native"  # how the policy writes calls of tools
    domain: str = "agent"

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        errors = []
        if bool(self.agent) == bool(self.agent_command):
            errors.append(f"agent = {self.agent!r} and agent_command = {self.agent_command}; expected one of the two")
        if self.agent and ":" not in self.agent:
            errors.append(f"agent = {self.agent!r}; expected 'my_module:run' or 'file.py:run'")
        if not all(isinstance(word, str) and word for word in self.agent_command):
            errors.append(f"agent_command = {self.agent_command!r}; expected a list of texts")
        if not self.domain:
            errors.append("domain = ''; expected a name")
        return errors


class Agent(CallingEnvironment):
    """An agent of the user's; see the module."""

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        """Check the settings, and load the function and the tasks.

        Raises:
            ValueError: a setting, the function or a file of tasks cannot be used.
        """
        self.settings: AgentSettings = read_settings(AgentSettings, env_config, "agent")
        super().__init__(self.settings.domain, self.settings.history, self.settings.call_format)
        self._function = load_function(self.settings.agent, "agent") if self.settings.agent else None
        if self._function is not None and find_spec("openai") is None:
            raise ValueError("agent needs the package openai (pip install 'rllib_srl[agents]'), or set agent_command")
        self._tasks = Tasks(self.settings.path, self.settings.heldout_path)

    def tasks(self) -> Tasks:
        """Return the tasks of the files."""
        return self._tasks

    def program(self, task: dict[str, Any], url: str, token: str, on_end: Callable[[Ended], None]) -> Program:
        """Return the function or the command, not started."""
        if self._function is not None:
            return FunctionProgram(self._function, url, token, task, on_end)
        return CommandProgram(self.settings.agent_command, url, token, task, on_end)
