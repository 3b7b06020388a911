"""The environment `openenv_experimental`: an OpenEnv server, whose environment has text in and text out.

    env_config = {"url": "ws://127.0.0.1:8000/ws", "action": {"message": "{turn}"}, "observation": "echoed_message"}

Experimental: it has been run with the package openenv 0.10 and with small servers, not with a server of the hub.

The server names no tasks, so a task is a seed of its reset: a reset with the same seed must show the same observation,
which the first reset of a process checks. Rewards of an episode are added up.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import gymnasium

from rllib_srl.envs import text
from rllib_srl.envs.allowed import error_of
from rllib_srl.envs.servers.links import ActionError, ServerError, Shown, SocketLink
from rllib_srl.envs.settings import Settings, Within, read_settings

TURN = "{turn}"  # stands for the policy's turn in `action`

Step = tuple[str, float, bool, bool, dict[str, Any]]


@dataclass(frozen=True)
class OpenEnvSettings(Settings):
    """Settings of the environment `openenv_experimental`. Invariant: as in `Settings`."""

    url: str = ""  # ws://host:port/ws
    action: dict[str, Any] = field(default_factory=dict)  # with "{turn}" for the turn; {}: the turn is JSON itself
    observation: str = ""  # the field with the text to show, "a.b" within a; "": all fields as JSON
    reset: dict[str, Any] = field(default_factory=dict)  # further arguments of the server's reset
    low: float = 0.0  # sum of an episode's rewards that counts as 0
    high: float = 1.0  # sum that counts as 1
    timeout_s: Annotated[float, Within(0, 3600, is_open=True)] = 8.0  # of a reset with its repetitions, and of a step
    checks_seed: bool = True  # whether the first reset is made twice, to compare what it shows
    system_prompt: str = ""
    stop: list[str] = field(default_factory=list)  # texts that end a turn
    domain: str = "openenv"

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        errors = []
        if not self.url.startswith(("ws://", "wss://")):
            errors.append(f"url = {self.url!r}; expected ws://host:port/ws")
        elif error := error_of("url", self.url.replace("ws", "http", 1)):
            errors.append(error)
        if self.action and TURN not in json.dumps(self.action, default=str):
            errors.append(f"action = {self.action!r}; expected {TURN!r} in one of its texts, or {{}}")
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            errors.append(f"low = {self.low:g} and high = {self.high:g}; expected two numbers, low below high")
        if not all(isinstance(word, str) and word for word in self.stop):
            errors.append(f"stop = {self.stop!r}; expected a list of texts")
        if not self.domain:
            errors.append("domain = ''; expected a name")
        return errors


class RewardRangeError(ValueError):
    """A sum of rewards outside of `low` to `high`: the settings are wrong, and the best episodes would be lost."""

    ends_run = True


class SeedError(ValueError):
    """The server does not repeat a task by its seed, so that the episodes of a group would be of different tasks."""

    ends_run = True


class OpenEnv(gymnasium.Env[str, str]):
    """An environment behind a server; see the module. Invariant: an episode's rewards add up to 0 to 1 at any time."""

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        """Check the settings.

        Raises:
            ValueError: one is wrong, or a server on another machine is not on the user's list of endpoints.
        """
        self.observation_space = self.action_space = text.TextSpace()
        self.settings: OpenEnvSettings = read_settings(OpenEnvSettings, env_config, "openenv_experimental")
        self.domain, self.system_prompt = self.settings.domain, self.settings.system_prompt
        self.stop_strings = tuple(self.settings.stop)
        self._link = SocketLink(self.settings.url, self.settings.timeout_s)
        self._is_under_way = False
        self._total = self._paid = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin the episode of a seed.

        Raises:
            ServerError: the server failed, within its time.
            SeedError: the server shows something else for the same seed.
        """
        super().reset(seed=seed)
        if options:
            raise ValueError(f"reset option {sorted(options)[0]!r} is unknown; expected none")
        seed = int(self.np_random.integers(2**31)) if seed is None else seed
        self._is_under_way = False
        shown = self._link.reset({**self.settings.reset, "seed": seed})
        if self.settings.checks_seed:
            shown = self._checked(seed, shown)
        self._total, self._paid, self._is_under_way = shown.reward, 0.0, True
        if shown.is_done:
            raise ServerError(f"{self.settings.url}: the episode of seed {seed} ends at its reset; expected a turn")
        return self._text(shown), {}

    def step(self, action: str) -> Step:
        """Send a turn.

        Raises:
            ServerError: the server failed, within its time.
            RewardRangeError: the rewards add up to less than `low` or more than `high`.
        """
        text.check_step(action, self._is_under_way)
        sent = self._action(action)
        if sent is None:
            return self._refused("the turn is not a JSON object")
        try:
            shown = self._link.step(sent)
        except ActionError as error:
            if self.settings.action:
                raise  # its fields are the user's
            return self._refused(str(error))
        self._total += shown.reward
        if shown.is_done:
            self._is_under_way = False
            self._check_total()
        return self._text(shown), self._pay(), shown.is_done, False, {}

    def close(self) -> None:
        """End the session."""
        self._link.close()

    def _action(self, turn: str) -> dict[str, Any] | None:
        if self.settings.action:
            filled: dict[str, Any] = _filled(self.settings.action, turn)
            return filled
        try:
            action = json.loads(turn)
        except (ValueError, RecursionError):
            return None
        return action if isinstance(action, dict) else None

    def _refused(self, reason: str) -> Step:
        """End the episode with a turn that is not an action; what was paid is taken back."""
        self._is_under_way = False
        back, self._paid = 0.0 - self._paid, 0.0
        return "", back, True, False, {"stop_reason": "unparsable", "reason": reason[:200]}

    def _pay(self) -> float:
        """Return what the sum of rewards has changed the scaled reward by."""
        low, high = self.settings.low, self.settings.high
        before, self._paid = self._paid, min(max((self._total - low) / (high - low), 0.0), 1.0)
        return self._paid - before

    def _check_total(self) -> None:
        low, high = self.settings.low, self.settings.high
        if not low - 1e-6 <= self._total <= high + 1e-6:
            raise RewardRangeError(
                f"the rewards of an episode add up to {self._total:g}; expected low = {low:g} to high = {high:g}: set "
                "low and high in env_config to the least and the most that they can be"
            )

    def _text(self, shown: Shown) -> str:
        value: Any = shown.observation
        for name in filter(None, self.settings.observation.split(".")):
            if not isinstance(value, Mapping) or name not in value:
                has = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
                raise ServerError(f"observation = {self.settings.observation!r}: the server's observation has {has}")
            value = value[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _checked(self, seed: int, shown: Shown) -> Shown:
        """Return a second reset with the same seed, once a process and server."""
        key = json.dumps([self.settings.url, self.settings.reset], sort_keys=True, default=repr)
        with _lock:
            if key in _checked:
                return shown
        again = self._link.reset({**self.settings.reset, "seed": seed})
        if self._text(again) != self._text(shown):
            raise SeedError(
                f"{self.settings.url} shows {self._text(shown)[:80]!r} and then {self._text(again)[:80]!r} for seed = "
                f"{seed}; expected the same, as a group plays one task; if it does, set checks_seed = false"
            )
        with _lock:
            _checked.add(key)
        return again


_lock = threading.Lock()
_checked: set[str] = set()  # servers that repeat a task by its seed


def _filled(value: Any, turn: str) -> Any:
    """Return `value` with the turn in place of "{turn}" in its texts."""
    if isinstance(value, str):
        return value.replace(TURN, turn)
    if isinstance(value, Mapping):
        return {name: _filled(item, turn) for name, item in value.items()}
    return [_filled(item, turn) for item in value] if isinstance(value, list | tuple) else value
