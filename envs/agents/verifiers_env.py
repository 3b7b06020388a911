"""The environment `verifiers`: a taskset of the library verifiers, played through the endpoint for agents.

    env_config = {"load": "my-taskset", "args": {"agent": {...}}}    an installed taskset and its configuration
    env_config = {"load": "my_module:load_environment"}              or a function that returns an environment

Its rollout calls the policy as an agent does. One environment is loaded in each process and plays all episodes there,
on one event loop, as the library expects.
"""

from __future__ import annotations

import json
import math
import numbers
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from rllib_srl.envs.agents.endpoint import Ended
from rllib_srl.envs.agents.environment import HISTORY, AgentError, CallingEnvironment
from rllib_srl.envs.agents.loops import Coroutine, EventLoop
from rllib_srl.envs.agents.programs import Program
from rllib_srl.envs.agents.tasks import Tasks
from rllib_srl.envs.agents.verifiers_tasksets import Played, Tasksets
from rllib_srl.envs.settings import OneOf, Settings, read_settings
from rllib_srl.envs.tools.formats import CALL_FORMATS

INSTALL = "pip install 'rllib_srl[verifiers]'"


@dataclass(frozen=True)
class VerifiersSettings(Settings):
    """Settings of the environment `verifiers`. Invariant: as in `Settings`."""

    load: str = ""  # id of an installed taskset, or "module:f" or "file.py:f" that returns an environment
    args: dict[str, Any] = field(default_factory=dict)  # of its configuration, or of the function
    low: float = 0.0  # reward of a task that counts as 0
    high: float = 1.0  # reward of a task that counts as 1
    history: Annotated[str, OneOf(*HISTORY)] = "split"  # as of the environment `agent`
    call_format: Annotated[str, OneOf(*CALL_FORMATS)] = "native"  # how the policy writes calls of tools
    domain: str = ""  # "": the name in `load`

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        errors = []
        if not self.load:
            errors.append("load = ''; expected the id of a taskset, or 'my_module:load_environment'")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            errors.append(f"low = {self.low:g} and high = {self.high:g}; expected two numbers, low below high")
        return errors


class RewardRangeError(ValueError):
    """A reward outside of `low` to `high`: the settings are wrong, and the best or worst episodes would be lost."""

    ends_run = True


class Verifiers(CallingEnvironment):
    """An environment of verifiers; see the module."""

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        """Check the settings, and load the environment unless this process has it already.

        Raises:
            ValueError: a setting is wrong, or the environment cannot be loaded or needs what is not supported.
        """
        self.settings: VerifiersSettings = read_settings(VerifiersSettings, env_config, "verifiers")
        named = self.settings.domain or self.settings.load.partition(":")[0].rpartition("/")[2].removesuffix(".py")
        super().__init__(named, self.settings.history, self.settings.call_format)
        self._loaded, self._loop = _loaded(self.settings.load, self.settings.args)

    def tasks(self) -> Tasks:
        """Return its tasks, of which a fixed share is held out."""
        return self._loaded.tasks

    def program(self, task: dict[str, Any], url: str, token: str, on_end: Callable[[Ended], None]) -> Program:
        """Return its rollout of a task, not started."""
        if self._loop.is_lost:
            self._loaded, self._loop = _loaded(self.settings.load, self.settings.args)
        loaded = self._loaded
        return Coroutine(self._loop, lambda: loaded.play(task, url, token), on_end)

    def outcome(self, value: Any) -> tuple[float, dict[str, Any]]:
        """Return the task's reward, scaled to [0, 1], and the value of each reward and metric.

        Raises:
            AgentError: there is no reward.
            RewardRangeError: it is outside of `low` to `high`.
        """
        assert isinstance(value, Played)
        low, high = self.settings.low, self.settings.high
        if not isinstance(value.reward, numbers.Real) or not math.isfinite(value.reward):
            raise AgentError(f"the task gave the reward {value.reward!r}; expected a number")
        reward = float(value.reward)
        if not low - 1e-6 <= reward <= high + 1e-6:
            raise RewardRangeError(
                f"the task gave the reward {reward:g}; expected low = {low:g} to high = {high:g}: set low and high "
                "in env_config to the least and the most that its rewards can add up to"
            )
        metrics = {f"reward/{name}": number for name, number in value.metrics.items()}
        return min(max((reward - low) / (high - low), 0.0), 1.0), metrics


_lock = threading.Lock()
_known: dict[str, tuple[Tasksets, EventLoop]] = {}


def _loaded(load: str, args: Mapping[str, Any]) -> tuple[Tasksets, EventLoop]:
    """Return the environment and its loop; it is loaded once a process, and again after its loop was blocked.

    Raises:
        ValueError: it cannot be loaded, or needs what is not supported.
    """
    key = json.dumps([load, dict(args)], sort_keys=True, default=repr)
    with _lock:
        if key not in _known or _known[key][1].is_lost:
            _known[key] = (_load(load, args), EventLoop("verifiers"))
        return _known[key]


def _load(load: str, args: Mapping[str, Any]) -> Tasksets:
    try:
        release = version("verifiers")
    except PackageNotFoundError:
        raise ValueError(f"the environment verifiers needs the package of this name ({INSTALL})") from None
    if not release.startswith("0.4."):
        raise ValueError(f"verifiers {release} is installed; expected 0.4 ({INSTALL})")
    return Tasksets(load, args)
